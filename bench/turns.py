"""The processor time of an agent's turn with a long history, against another commit: `python -m bench.turns FOLDER`.

FOLDER is a worktree of the other commit (`git worktree add FOLDER COMMIT`). A turn sends a history of some 4,000
messages and 6 MB, full of commas, and two messages more than the turn before. In each pair both commits' proxies are
started anew, and take turns; the table shows the medians.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import httpx

from bench import bodies
from bench.against import of
from bench.systems import POLICIES, ROOT, System, proxy, start

MESSAGES, BYTES = 4_000, 3_000
"""Messages of the longest history, and bytes of each result."""
HEADERS = {"content-type": "application/json", "authorization": "Bearer sk-bench"}
NAMES = ("proxy, off", "proxy, planning", "proxy, moving")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.turns", description=(__doc__ or "").partition(":")[0])
    parser.add_argument("other", type=Path, help="a worktree of the other commit")
    parser.add_argument("--pairs", type=int, default=3, help="fresh pairs of processes [3]")
    parser.add_argument("--turns", type=int, default=20, help="of each process [20]")
    options = parser.parse_args(arguments)
    requests = turns(options.turns)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in NAMES}
    for number in range(options.pairs):
        for name in NAMES:
            found[name].append(_pair((options.other.resolve(), ROOT), name, requests, swapped=number % 2 == 1))
    print(f"{'a turn of 4,000 messages':28}{'other':>9}{'this':>9}{'ratio':>8}  (lowest, highest)")
    for name, pairs in found.items():
        other, this = (median(times) for times in zip(*pairs, strict=True))
        ratios = sorted(this / other for other, this in pairs)
        print(f"{name:28}{other:6.1f} ms{this:6.1f} ms{median(ratios):8.3f}  ({ratios[0]:.3f}, {ratios[-1]:.3f})")


def turns(number: int) -> list[bytes]:
    """The bodies of so many turns at the end of a long run, after one that makes the history known."""
    history = bodies.history(MESSAGES, 0, seed=1)
    chosen = random.Random(1)
    for message in history:
        if message["role"] == "tool":
            rows = (
                f"{chosen.randrange(1_000)},{chosen.choice(bodies.WORDS)},{chosen.random():.3f}" for _ in range(200)
            )
            message["content"] = "\n".join(rows)[:BYTES]
    made = []
    for left in range(number, -1, -1):
        asked = {"model": "gpt-4.1", "messages": history[: len(history) - 2 * left], "tools": [bodies.TOOL]}
        made.append(json.dumps(asked).encode())
    return made


def _pair(roots: tuple[Path, Path], name: str, requests: Sequence[bytes], *, swapped: bool) -> tuple[float, float]:
    """Return the milliseconds of a turn by root, for processes that are started for it."""
    order = [1, 0] if swapped else [0, 1]
    with ExitStack() as running:
        folder = Path(running.enter_context(tempfile.TemporaryDirectory(prefix="offload-bench-")))
        http = running.enter_context(httpx.Client(trust_env=False, timeout=60, headers=HEADERS))
        launchers = {str(at): of(roots[at], proxy(POLICIES[name])) for at in order}
        systems = {system.name: system for system in start(running, folder, launchers)}
        for system in systems.values():
            system.settle()
        used = [0.0, 0.0]
        for turn, request in enumerate(requests):
            for at in order if turn % 2 else order[::-1]:
                taken = _taken(http, systems[str(at)], request)
                used[at] += taken if turn else 0  # the first one makes the history known
        return 1e3 * used[0] / (len(requests) - 1), 1e3 * used[1] / (len(requests) - 1)


def _taken(http: httpx.Client, system: System, body: bytes) -> float:
    """Return the seconds of processor time that one request takes."""
    before = system.busy()
    http.post(f"http://127.0.0.1:{system.port}/v1/chat/completions", content=body).raise_for_status()
    return system.busy() - before


if __name__ == "__main__":
    main()
