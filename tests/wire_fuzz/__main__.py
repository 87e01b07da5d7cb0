"""The command line of `python -m tests.wire_fuzz`; see the package."""

from __future__ import annotations

import argparse
import asyncio
import sys

from tests import wire_fuzz
from tests.wire_fuzz.run import Plan, run


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.wire_fuzz",
        description=wire_fuzz.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=1,
        help="of all cases; odd: strangers are served, even: refused [1]",
    )
    parser.add_argument("--seconds", type=float, help="how long; without --cases and --case 60")
    parser.add_argument("--cases", type=int, help="how many, at most")
    parser.add_argument("--case", type=int, nargs="+", default=[], help="just these")
    parser.add_argument(
        "--front",
        type=int,
        nargs="+",
        default=[],
        help="just these, and an honest request behind each",
    )
    parser.add_argument("--connections", type=int, default=8, help="attackers at once [8]")
    options = parser.parse_args()
    seconds = (
        options.seconds
        if options.seconds or options.cases or options.case or options.front
        else 60.0
    )
    plan = Plan(
        seed=options.seed,
        cases=options.cases,
        seconds=seconds,
        only=tuple(options.case),
        front=tuple(options.front),
        connections=options.connections,
        strangers=bool(options.seed % 2),
    )
    figures = asyncio.run(run(plan, lambda line: print(line, flush=True)))
    print("\n".join(figures.lines()))
    for text in figures.violations[:20]:
        print(f"VIOLATION (seed {plan.seed}): {text}")
    return 1 if figures.violations else 0


if __name__ == "__main__":
    sys.exit(main())
