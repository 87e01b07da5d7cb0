"""Two packages of other people judge one run, in the environment of `tests/bench/peers/fidelity.txt`.

    .peers/fidelity/bin/python tests/bench/referees.py < RUN

RUN is JSON lines: first `{"canaries": […], "visible": "…", "stored": "…"}`, then one upstream body a line. Printed is
one JSON object: `visible` and `stored`, canaries that survived by their type as compaction-conformance-kit counts them
in the context alone and with what the tools can read back; `pairs` and `breaks`, consecutive requests and how many of
them ctxdiff finds to have broken the prompt's prefix.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from compaction_kit import load_canaries, score_compacted_output
from ctxdiff import trace
from ctxdiff.analyze.cache import analyze_cache
from ctxdiff.store.ctrace import CTrace

MODEL = "recorded"
"""No name that ctxdiff would want an encoding for, which it would have to fetch."""


class Client:
    """What ctxdiff wraps: it looks like the SDK's client and answers nothing. The requests were sent before."""

    __module__ = "openai"

    def __init__(self) -> None:
        self.chat = SimpleNamespace(completions=SimpleNamespace(create=lambda **_: SimpleNamespace(usage=None)))


def survived(canaries: Path, text: str) -> dict[str, float]:
    """The share of the canaries of each type that `text` still holds."""
    report = score_compacted_output(text, load_canaries(canaries), "offload-proxy")
    return {finding.canary_type: finding.round1_survival for finding in report.findings}


def breaks(bodies: Iterable[str], folder: Path) -> tuple[int, int]:
    """Pairs of consecutive requests, and those of them whose prefix broke."""
    tracer = trace.init("fidelity", path=str(folder / "run.ctrace"))
    client: Any = tracer.wrap(Client())
    for body in bodies:
        sent = json.loads(body)
        client.chat.completions.create(model=MODEL, messages=sent["messages"], tools=sent.get("tools") or [])
    tracer.close()
    recorded = CTrace.open(str(folder / "run.ctrace"))
    report = analyze_cache(recorded)
    recorded.close()
    return report.pairs_analyzed, len(report.breaks)


def main() -> None:
    given = json.loads(sys.stdin.readline())
    with tempfile.TemporaryDirectory(prefix="offload-referees-") as name:
        folder = Path(name)
        canaries = folder / "canaries.json"
        canaries.write_text(json.dumps(given["canaries"]))
        visible, both = given["visible"], given["visible"] + "\n" + given["stored"]
        pairs, broken = breaks(sys.stdin, folder)
        verdict = {"visible": survived(canaries, visible), "stored": survived(canaries, both)}
        print(json.dumps({**verdict, "pairs": pairs, "breaks": broken}))


if __name__ == "__main__":
    main()
