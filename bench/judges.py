"""Two third-party packages judge runs, in the environment of `bench/competitors/fidelity.txt`.

    .competitors/fidelity/bin/python bench/judges.py < RUNS

A run is one line of JSON: `canaries`, as compaction-conformance-kit wants them; `visible`, the text
of the last request; `stored`, the text that its tools can read back; `bodies`, of all its requests.
The answer is one line too: `visible` and `both`, the share of each type of canary that survived in
the context alone and together with stored text; `breaks`, how many requests broke the prefix of the
one before, according to ctxdiff.
"""

from __future__ import annotations

import json
import logging
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from compaction_kit import load_canaries, score_compacted_output
from ctxdiff import trace
from ctxdiff.analyze.cache import analyze_cache
from ctxdiff.store.ctrace import CTrace

Json = dict[str, Any]


class Client:
    """A stand-in for the SDK's client for ctxdiff to wrap. It answers nothing: the requests were
    sent earlier."""

    __module__ = "openai"

    def __init__(self) -> None:
        self.chat = SimpleNamespace(
            completions=SimpleNamespace(create=lambda **_: SimpleNamespace(usage=None))
        )


def survived(canaries: Path, text: str) -> dict[str, float]:
    """The share of the canaries of each type that `text` still holds."""
    report = score_compacted_output(text, load_canaries(canaries), "offload-proxy")
    return {finding.canary_type: finding.round1_survival for finding in report.findings}


def breaks(bodies: Sequence[Json], folder: Path) -> int:
    """How many of these requests broke the prefix of the one before."""
    tracer = trace.init("fidelity", path=str(folder / "run.ctrace"))
    client: Any = tracer.wrap(Client())
    for body in bodies:
        client.chat.completions.create(
            model=body["model"], messages=body["messages"], tools=body.get("tools") or []
        )
    tracer.close()
    recorded = CTrace.open(str(folder / "run.ctrace"))
    try:
        return len(analyze_cache(recorded).breaks)
    finally:
        recorded.close()


def judged(run: Json) -> Json:
    with tempfile.TemporaryDirectory(prefix="offload-judges-") as name:
        folder = Path(name)
        canaries = folder / "canaries.json"
        canaries.write_text(json.dumps(run["canaries"]))
        return {
            "visible": survived(canaries, run["visible"]),
            "both": survived(canaries, run["visible"] + "\n" + run["stored"]),
            "breaks": breaks(run["bodies"], folder),
        }


def main() -> None:
    # ctxdiff would fetch an encoding to count tokens. Without one it estimates them and finds the
    # same breaks.
    sys.modules["tiktoken"] = None  # type: ignore[assignment]
    logging.getLogger("ctxdiff").setLevel(logging.ERROR)
    for line in sys.stdin:
        print(json.dumps(judged(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
