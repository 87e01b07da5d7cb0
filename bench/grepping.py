"""The speed of `/grep` over a caller's stored files, beside ripgrep's over the same texts in a
directory.

1,000 files of 100 KB are stored as results of offloaded histories. Then both search all of them for
each pattern, in turns, ignoring case. While the proxy searches, another process keeps asking for
`/health`. The table shows medians, except for the longest wait.
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.probing import Probe
from tests.serving import Proxy, spawned

PATTERNS = {
    "rare literal": "heliotrope-7291",
    "common literal": "common",
    "regex class": "[A-Z]{4}-[0-9]{6}",
    "alternatives": r"(error|warning) [0-9]+:.*refused",
    "no match": "nowhere to be found",
}
FILE_BYTES = 100_000
FILES_A_CALL = 10
"""Results in one history, so that a body has 1 MB."""
LIMITS = {
    "store_dir": "/bench",
    "max_total_tokens": 0,
    "max_tool_message_tokens": 0,
    "keep_recent_count": 0,
}


def main(options: argparse.Namespace) -> None:
    """Store the files through the API, then search for each pattern."""
    texts = contents(50 if options.smoke else 1_000)
    runs = 2 if options.smoke else 5
    print(f"{len(texts)} files, {sum(map(len, texts)) / 1e6:.0f} MB")
    print("| pattern | matches | seconds | beside ripgrep | `/health`, ms | longest |")
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="offload-bench-") as folder, spawned() as proxy:
        for number, text in enumerate(texts):
            Path(folder, f"{number}.txt").write_text(text, encoding="utf-8")
        _put(proxy, texts)
        for name, pattern in PATTERNS.items():
            print(f"| {name} | {_row(proxy, folder, pattern, runs)} |", flush=True)


def contents(files: int) -> list[str]:
    """Lines of log from a pool, another mix in each file, and a few that the patterns are for."""
    chance = random.Random(7)
    pool = [_line(chance) for _ in range(20_000)]
    lines_a_file = FILE_BYTES * len(pool) // sum(len(line) + 1 for line in pool)
    made = [chance.choices(pool, k=lines_a_file) for _ in range(files)]
    for number in range(0, files, max(files // 5, 1)):
        made[number][number % lines_a_file] = "found at last: heliotrope-7291"
    return ["\n".join([f"file {number}", *lines]) for number, lines in enumerate(made)]


def _line(chance: random.Random) -> str:
    words = " ".join(
        "".join(chance.choices("abcdefghijklmnop", k=chance.randint(2, 9))) for _ in range(10)
    )
    kinds = ["info", "common", "error 17: connection refused", "QXZV-204518"]
    kind = chance.choices(kinds, [989, 8, 1, 2])[0]
    return f"2026-01-{chance.randint(10, 28)} {kind} {words}"


def _put(proxy: Proxy, texts: list[str]) -> None:
    """Store texts as results of histories that are offloaded."""
    for start in range(0, len(texts), FILES_A_CALL):
        messages = [
            message
            for number, text in enumerate(texts[start:][:FILES_A_CALL], start)
            for message in _step(number, text)
        ]
        reply = proxy.post("/context_compact", {"messages": messages, **LIMITS}).json()
        assert len(reply["metadata"]["write_file_dict"]) == len(messages) // 2, reply["answer"]


def _step(number: int, text: str) -> Iterator[dict[str, object]]:
    function = {"name": "read", "arguments": "{}"}
    call = {"id": f"call_{number}", "type": "function", "function": function}
    yield {"role": "assistant", "content": None, "tool_calls": [call]}
    yield {"role": "tool", "tool_call_id": call["id"], "content": text}


def _row(proxy: Proxy, folder: str, pattern: str, runs: int) -> str:
    """The cells of a pattern. The first turn does not count."""
    ours = []
    beside = []
    waits = []
    for turn in range(runs + 1):
        with Probe(proxy.port) as probe:
            begun = time.perf_counter()
            reply = proxy.post("/grep", {"pattern": pattern, "path": "/bench"})
            seconds = time.perf_counter() - begun
        matches = len(reply.raise_for_status().json()["metadata"]["matches"])
        yardstick = _ripgrep(pattern, folder, matches)
        if turn:
            ours.append(seconds)
            beside.append(yardstick)
            waits += probe.seen.health
    took = statistics.median(ours)
    ratio = f"{took / statistics.median(beside):.1f}" if min(beside) else "no ripgrep"
    waited = f"{statistics.median(waits) * 1000:.1f} | {max(waits) * 1000:.0f}"
    return f"{matches:,} | {took:.2f} | {ratio} | {waited}"


def _ripgrep(pattern: str, folder: str, matches: int) -> float:
    """Seconds of a search, start-up included; 0 if it is not installed. Checks that it finds as
    many matches."""
    program = shutil.which("rg")
    if program is None:
        return 0.0
    flags = ["--no-config", "--ignore-case", "--line-number", "--regexp", pattern]
    begun = time.perf_counter()
    done = subprocess.run([program, *flags, folder], capture_output=True, check=False)
    taken = time.perf_counter() - begun
    assert done.stdout.count(b"\n") == matches, (done.stdout.count(b"\n"), matches)
    return taken
