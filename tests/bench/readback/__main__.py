"""How well a model answers from what was moved out of its context, and what that costs.

    python -m tests.bench.readback --base-url http://127.0.0.1:8080/v1 --model NAME

Any server with OpenAI's chat completions will do. Questions go there directly with everything in the context and with
all results cleared, and through the proxy in compact, compress and auto mode. The key comes from OPENAI_API_KEY.
"""

from __future__ import annotations

import argparse
import os

from tests.bench.readback.histories import histories
from tests.bench.readback.recorder import recording
from tests.bench.readback.run import CONDITIONS, measured, table


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.readback", description=__doc__)
    parser.add_argument("--base-url", required=True, help="the server's address, up to /v1")
    parser.add_argument("--model", required=True, help="the model's name there")
    parser.add_argument("--conditions", nargs="+", choices=CONDITIONS, default=CONDITIONS, metavar="CONDITION")
    given = parser.parse_args()
    with recording(given.base_url) as recorder:
        key = os.environ.get("OPENAI_API_KEY", "")
        scores = list(measured(recorder, given.model, key, histories(), given.conditions))
    print(table(scores, given.model))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
