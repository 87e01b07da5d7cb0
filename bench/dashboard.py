"""How long the dashboard's pages take with many requests recorded.

It fills a file with rows of made-up requests of many callers, and prints its size and the processor
time that each page takes, its JSON included.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from pathlib import Path

import msgspec

from bench.systems import MIB
from proxy.apps.dashboard.queries import Reader, Wanted
from proxy.apps.dashboard.rows import Recorded, Rows
from proxy.apps.dashboard.savings import savings
from proxy.settings import Settings
from proxy.telemetry.outcome import Basis, Holdout, Kind, Outcome

ROWS = 200_000
BATCH = 500
TENANTS = 10
NAMESPACES = 1_000
MODELS = 20
REQUESTS = 20
"""Requests of one session."""
PERIOD = 30 * 86_400.0
TRIES = 5


def recorded(number: int, since: float, rows: int) -> Recorded:
    namespace = number // REQUESTS % NAMESPACES
    outcome = Outcome(
        request_id=f"req_{number:032x}",
        tenant=f"tenant-{namespace % TENANTS}",
        namespace=f"tenant-{namespace % TENANTS}-{namespace:016x}",
        kind=Kind.OFFLOADED if number % 3 else Kind.UNTOUCHED,
        method="POST",
        path="/v1/chat/completions",
        dialect="chat",
        model=f"model-{number // REQUESTS // 3 % MODELS}",
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
    session = int.from_bytes(sha256(b"%d" % (number // REQUESTS)).digest()[:8]) >> 1
    return Recorded(since + PERIOD * number / rows, outcome, session, [2_500] * 8)


def main(options: argparse.Namespace) -> None:
    rows = 2_000 if options.smoke else ROWS
    since = time.time() - PERIOD
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.db"
        file = Rows(path, Settings().dashboard_limit)
        seconds = 0.0
        for start in range(0, rows, BATCH):
            batch = [recorded(number, since, rows) for number in range(start, start + BATCH)]
            seconds += _timed(partial(file.write, batch))
        size = sum(one.stat().st_size for one in Path(folder).iterdir())
        print(f"{rows:,} rows, {1e6 * seconds / rows:.0f} µs each, {size / MIB:.0f} MiB")
        first = recorded(0, since, rows)
        reader = Reader(path)
        mine = Reader(path, first.outcome.namespace)
        for name, page in pages(reader, mine, first).items():
            times = [_timed(lambda page=page: msgspec.json.encode(page())) for _ in range(TRIES)]  # type: ignore[misc]
            print(f"{name:22} {1000 * max(times):6.0f} ms, the slowest of {TRIES}")
        for opened in (reader, mine, file):
            opened.close()


def pages(reader: Reader, mine: Reader, first: Recorded) -> dict[str, Callable[[], object]]:
    """Return what each page reads, for the operator and for one caller."""
    session = f"{first.session or 0:016x}"
    [newest] = [row["id"] for row in reader.requests(Wanted(limit=1))]
    return {
        "live": reader.requests,
        "live, one caller": mine.requests,
        "live, older": lambda: reader.requests(Wanted(offset=1_000)),
        "live, a word": lambda: reader.requests(Wanted(text="nowhere")),
        "live, latency": reader.latency,
        "live, what came": lambda: reader.requests(Wanted(after=newest - 20)),
        "savings": lambda: savings(reader, "month", time.time(), lambda tenant, model: None),
        "savings, one caller": lambda: savings(
            mine, "month", time.time(), lambda tenant, model: None
        ),
        "sessions": reader.sessions,
        "sessions, one caller": mine.sessions,
        "session": lambda: reader.session(session),
        "session's request": lambda: reader.request(newest - REQUESTS),
        "health": reader.namespaces,
    }


def _timed(work: Callable[[], object]) -> float:
    begun = time.process_time()
    work()
    return time.process_time() - begun
