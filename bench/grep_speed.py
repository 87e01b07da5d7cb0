"""The speed of `/grep` over a caller's stored files: `python -m bench.grep_speed [--smoke] [--png
FILE]`.

1,000 files of 100 KB are stored as results of offloaded histories. Then the proxy searches all of
them for each pattern, in turns with ripgrep (if installed), which searches the same texts in a
directory and also ignores case. While the proxy searches, another connection keeps asking for
`/health`, to measure for how long the event loop was blocked. The table shows medians, except for
the longest wait of all runs.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, NamedTuple

from bench import chart
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
POLL = 0.001
"""Seconds between two requests for /health."""
HEADERS = {"authorization": "Bearer bench", "content-type": "application/json"}


class Search(NamedTuple):
    """One search by the proxy: seconds, matches, and the seconds that each `/health` took
    meanwhile."""

    seconds: float
    matches: int
    waits: list[float]


class Row(NamedTuple):
    """The figures of one pattern: seconds are medians of the runs; `ripgrep` is None if it is not
    installed."""

    name: str
    matches: int
    seconds: float
    ripgrep: float | None
    waits: list[float]


class Figures(NamedTuple):
    """`idle`: the seconds that `/health` took without a search."""

    files: int
    megabytes: float
    stored: float
    """Seconds that storing the files took."""
    idle: list[float]
    rows: list[Row]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.grep_speed")
    parser.add_argument("--files", type=int, default=1_000, help="of 100 KB each [1000]")
    parser.add_argument(
        "--runs", type=int, default=5, help="of each pattern, after one that is not counted [5]"
    )
    parser.add_argument("--png", type=Path, help="the file to draw a chart to")
    parser.add_argument(
        "--smoke", action="store_true", help="a quick check that it works: takes seconds"
    )
    options = parser.parse_args()
    figures = run(50, 2) if options.smoke else run(options.files, options.runs)
    print(table(figures))
    if options.png:
        draw(options.png, figures)
    return 0


def run(files: int, runs: int) -> Figures:
    """Store so many files through the API, then search for each pattern `runs` times."""
    texts = contents(files)
    megabytes = sum(map(len, texts)) / 1e6
    with tempfile.TemporaryDirectory(prefix="offload-bench-") as folder, spawned() as proxy:
        for number, text in enumerate(texts):
            Path(folder, f"{number}.txt").write_text(text, encoding="utf-8")
        begun = time.perf_counter()
        _put(proxy, texts)
        stored = time.perf_counter() - begun
        rows = [_row(proxy, Path(folder), name, runs) for name in PATTERNS]
        return Figures(files, megabytes, stored, _idle(proxy), rows)


def table(figures: Figures) -> str:
    """The printed table."""
    head = f"{figures.files} files, {figures.megabytes:.0f} MB, stored in {figures.stored:.1f} s"
    speeds = f"{'matches':>9}{'seconds':>9}{'MB/s':>8}{'rg s':>8}{'ratio':>7}"
    waits = f"{'/health p50 ms':>16}{'longest':>9}"
    columns = f"{'':16}{speeds}{waits}"
    idle = f"{'no search':16}{'':41}{_waits(figures.idle)}"
    lines = [head, columns, idle, *(_shown(row, figures.megabytes) for row in figures.rows)]
    if any(row.ripgrep is None for row in figures.rows):
        lines.append("ripgrep is not installed (Debian package ripgrep): left out")
    return "\n".join(lines)


def _shown(row: Row, megabytes: float) -> str:
    beside = (
        f"{row.ripgrep:8.3f}{row.seconds / row.ripgrep:7.1f}"
        if row.ripgrep
        else f"{'-':>8}{'-':>7}"
    )
    speed = f"{row.seconds:9.3f}{megabytes / row.seconds:8.0f}"
    return f"{row.name:16}{row.matches:9}{speed}{beside}{_waits(row.waits)}"


def _waits(waits: list[float]) -> str:
    return f"{1_000 * statistics.median(waits):16.1f}{1_000 * max(waits):9.1f}"


def draw(path: Path, figures: Figures) -> None:
    """Seconds of each pattern, ours beside ripgrep's."""
    places = range(len(figures.rows))
    title = f"/grep over {figures.files:,} files, {figures.megabytes:.0f} MB"
    with chart.saved(path, title, y="seconds") as axes:
        axes.bar(
            [place - 0.2 for place in places],
            [row.seconds for row in figures.rows],
            0.4,
            label="/grep, over HTTP",
        )
        yardstick = [row.ripgrep or 0 for row in figures.rows]
        if any(yardstick):
            axes.bar([place + 0.2 for place in places], yardstick, 0.4, label="ripgrep")
        axes.set_xticks(places, [row.name for row in figures.rows])


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
    kind = chance.choices(
        ["info", "common", "error 17: connection refused", "QXZV-204518"], [989, 8, 1, 2]
    )[0]
    return f"2026-01-{chance.randint(10, 28)} {kind} {words}"


def _put(proxy: Proxy, texts: list[str]) -> None:
    """Store texts through the API, as results of histories that are offloaded."""
    tight = {
        "store_dir": "/bench",
        "max_total_tokens": 0,
        "max_tool_message_tokens": 0,
        "keep_recent_count": 0,
    }
    for start in range(0, len(texts), FILES_A_CALL):
        messages = [
            message
            for number, text in enumerate(texts[start:][:FILES_A_CALL], start)
            for message in _step(number, text)
        ]
        reply = _post(proxy, "/context_compact", {"messages": messages, **tight})
        assert len(reply["metadata"]["write_file_dict"]) == len(messages) // 2, reply["answer"]


def _step(number: int, text: str) -> Iterator[dict[str, object]]:
    call = {
        "id": f"call_{number}",
        "type": "function",
        "function": {"name": "read", "arguments": "{}"},
    }
    yield {"role": "assistant", "content": None, "tool_calls": [call]}
    yield {"role": "tool", "tool_call_id": call["id"], "content": text}


def _row(proxy: Proxy, folder: Path, name: str, runs: int) -> Row:
    """Both search in turns, so that other load on the machine affects both; the first turn does not
    count."""
    searches = []
    yardstick = []
    for _ in range(runs + 1):
        searches.append(_search(proxy, PATTERNS[name]))
        yardstick.append(_ripgrep(PATTERNS[name], folder, searches[0].matches))
    seconds = statistics.median(search.seconds for search in searches[1:])
    counted = [taken for taken in yardstick[1:] if taken is not None]
    waits = [wait for search in searches[1:] for wait in search.waits]
    return Row(
        name, searches[0].matches, seconds, statistics.median(counted) if counted else None, waits
    )


def _search(proxy: Proxy, pattern: str) -> Search:
    body = json.dumps({"pattern": pattern, "path": "/bench"})
    with closing(_connected(proxy)) as connection, _polled(proxy) as waits:
        begun = time.perf_counter()
        connection.request("POST", "/grep", body, HEADERS)
        reply = connection.getresponse()
        raw = reply.read()
        seconds = time.perf_counter() - begun
    assert reply.status == 200, raw[:300]
    return Search(seconds, len(json.loads(raw)["metadata"]["matches"]), waits)


def _idle(proxy: Proxy) -> list[float]:
    with _polled(proxy) as waits:
        time.sleep(0.5)
    return waits


@contextmanager
def _polled(proxy: Proxy) -> Iterator[list[float]]:
    """The seconds that requests for /health take meanwhile; at least one."""
    waits: list[float] = []
    done = threading.Event()

    def poll() -> None:
        with closing(_connected(proxy)) as connection:
            while not waits or not done.wait(POLL):
                begun = time.perf_counter()
                connection.request("GET", "/health")
                connection.getresponse().read()
                waits.append(time.perf_counter() - begun)

    poller = threading.Thread(target=poll)
    poller.start()
    try:
        yield waits
    finally:
        done.set()
        poller.join()


def _ripgrep(pattern: str, folder: Path, matches: int) -> float | None:
    """Seconds of a search, start-up included; None if not installed. Checks that it finds as many
    matches."""
    program = shutil.which("rg")
    if program is None:
        return None
    command = [
        program,
        "--no-config",
        "--ignore-case",
        "--line-number",
        "--regexp",
        pattern,
        str(folder),
    ]
    begun = time.perf_counter()
    done = subprocess.run(command, capture_output=True, check=False)
    taken = time.perf_counter() - begun
    assert done.stdout.count(b"\n") == matches, (done.stdout.count(b"\n"), matches)
    return taken


def _post(proxy: Proxy, path: str, body: object) -> dict[str, Any]:
    with closing(_connected(proxy)) as connection:
        connection.request("POST", path, json.dumps(body), HEADERS)
        reply: dict[str, Any] = json.loads(connection.getresponse().read())
    return reply


def _connected(proxy: Proxy) -> HTTPConnection:
    connection = HTTPConnection("127.0.0.1", proxy.port, timeout=120)
    connection.connect()
    return connection


if __name__ == "__main__":
    sys.exit(main())
