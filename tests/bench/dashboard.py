"""How long the dashboard's pages take with many requests recorded: `python -m tests.bench.dashboard [ROWS]`.

It fills a file with rows of made-up requests, and prints its size and the time of each page's queries.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from proxy.dashboard.database import Database
from proxy.dashboard.pages import savings_page
from proxy.dashboard.reader import Reader
from proxy.dashboard.rows import Recorded, Seen
from proxy.settings import Settings
from proxy.telemetry.outcome import Basis, Holdout, Kind, Outcome

ROWS = 1_000_000
BATCH = 500
NAMESPACES, MODELS = 50, 5
REQUESTS = 20
"""Requests of one session."""
PERIOD = 30 * 86_400.0
TRIES = 5


def recorded(number: int, since: float, rows: int) -> Recorded:
    namespace = number // REQUESTS % NAMESPACES
    outcome = Outcome(
        request_id=f"req_{number:032x}",
        tenant=f"tenant-{namespace % 10}",
        namespace=f"tenant-{namespace % 10}-{namespace:016x}",
        kind=Kind.OFFLOADED if number % 3 else Kind.UNTOUCHED,
        method="POST",
        path="/v1/chat/completions",
        dialect="chat",
        model=f"model-{number // REQUESTS % MODELS}",
        status=200,
        mode="auto",
        usage=Basis.BILLED,
        holdout=Holdout.KEPT if number // REQUESTS % 20 == 0 else Holdout.PLANNED,
        messages=number % REQUESTS * 2,
        tokens_before=60_000 + number % 1_000,
        tokens_after=20_000 + number % 500,
        cost_before=9_000,
        cost_after=5_000,
        prompt_tokens=21_000,
        cached_tokens=18_000,
        completion_tokens=300,
        seconds=1.25,
        added_seconds=0.002,
        first_byte_seconds=0.4,
    )
    sent = b"\x93\x98" + b"\xcd\x10\x00" * 8 + b"\xcd\x20\x00\xc0"
    return Recorded(since + PERIOD * number / rows, outcome, Seen(number // REQUESTS, lambda: (sent, None)))


def main(rows: int) -> None:
    since = time.time() - PERIOD
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.db"
        database, begun = Database(path, Settings().dashboard_limit), time.perf_counter()
        for start in range(0, rows, BATCH):
            database.write([recorded(number, since, rows) for number in range(start, min(start + BATCH, rows))])
        seconds = time.perf_counter() - begun
        print(f"{rows:,} rows in {seconds:.0f} s, {1e6 * seconds / rows:.0f} µs each")
        size = sum(file.stat().st_size for file in Path(folder).iterdir())
        print(f"{size / (1 << 20):.0f} MiB, of {Settings().dashboard_limit / (1 << 20):.0f} MiB allowed")
        reader, own = Reader(path), recorded(0, since, rows).outcome.namespace
        newest = reader.newest()
        pages: dict[str, Callable[[], object]] = {
            "live": lambda: reader.before(1 << 62),
            "live, one caller": lambda: reader.before(1 << 62, own),
            "live, older": lambda: reader.before(newest // 2),
            "savings": lambda: savings_page(since, None, lambda tenant, model: None, reader),
            "savings, one caller": lambda: savings_page(since, own, lambda tenant, model: None, reader),
            "sessions": reader.sessions,
            "sessions, one caller": lambda: reader.sessions(own),
            "session": lambda: reader.session(newest // REQUESTS // 2),
        }
        for name, page in pages.items():
            print(f"{name:22} {1000 * max(_timed(page) for _ in range(TRIES)):6.0f} ms, the slowest of {TRIES}")
        reader.close()
        database.close()


def _timed(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else ROWS)
