"""How well a model answers from what was moved out of its context, and what that costs.

    python -m bench.readback --base-url http://127.0.0.1:8080/v1 --model NAME
    python -m bench.readback --local .model          # what `make bench-model` runs

Any server with OpenAI's chat completions will do. Questions go there directly with everything in
the context and with all results cleared, and through the proxy in compact, compress and auto mode.
The key comes from OPENAI_API_KEY.
"""

from __future__ import annotations

import argparse
import os
from contextlib import ExitStack
from pathlib import Path

from bench.readback.histories import LEAST_RECORDS, RECORDS, SETTINGS, histories
from bench.readback.local import MODEL, serving
from bench.readback.recorder import recording
from bench.readback.run import CONDITIONS, Asker, measured, table


def main() -> int:
    parser = _parser()
    given = parser.parse_args()
    if given.records < LEAST_RECORDS:
        parser.error(f"--records must be at least {LEAST_RECORDS}")
    asked = histories(given.records, given.questions)[: given.histories]
    key = os.environ.get("OPENAI_API_KEY", "")
    with ExitStack() as held:
        url = given.base_url or held.enter_context(serving(given.local, given.threads))
        log = held.enter_context(given.log.open("a", encoding="utf-8", buffering=1))
        asker = Asker(held.enter_context(recording(url)), given.model, key, log)
        scores = measured(asker, asked, given.conditions)
        for line in table(scores, f"{given.model}, results of {given.records} entries"):
            print(line, flush=True)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.readback", description=__doc__)
    server = parser.add_mutually_exclusive_group(required=True)
    server.add_argument("--base-url", help="the server's address, up to /v1")
    server.add_argument(
        "--local",
        type=Path,
        metavar="DIR",
        help="serve the model that `make bench-model` put there",
    )
    parser.add_argument(
        "--model", default=MODEL, help="the model's name on the server (default: %(default)s)"
    )
    parser.add_argument(
        "--threads", type=int, metavar="N", help="threads of the local server (default: all cores)"
    )
    parser.add_argument(
        "--conditions", nargs="+", choices=CONDITIONS, default=CONDITIONS, metavar="CONDITION"
    )
    parser.add_argument(
        "--histories", type=int, default=len(SETTINGS), help="how many of the histories"
    )
    parser.add_argument(
        "--questions", type=int, help="how many questions of each history (default: all 14)"
    )
    parser.add_argument(
        "--records", type=int, default=RECORDS, help="entries of each result (default: %(default)s)"
    )
    parser.add_argument(
        "--log",
        type=Path,
        metavar="FILE",
        default=os.devnull,
        help="write each question there, with calls and reply",
    )
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
