"""Pages take no longer with more rows, but for sums and searches. Instructions of SQLite are
counted, and no time."""

from __future__ import annotations

import time
from pathlib import Path

from bench.dashboard import pages, recorded
from proxy.apps.dashboard.queries import Reader
from proxy.apps.dashboard.rows import Recorded, Rows

FEW, MANY = 4_200, 8_400
EVERY = 100
"""Instructions between two calls of the counter."""


def batch(rows: int) -> list[Recorded]:
    since = time.time() - 86_400
    return [recorded(number, since, rows) for number in range(rows)]


def instructions(path: Path, rows: list[Recorded]) -> dict[str, int]:
    """Write rows, and return how many instructions each page takes, in hundreds."""
    file = Rows(path, 64 << 20)
    for start in range(0, len(rows), 500):
        file.write(rows[start : start + 500])
    readers, count = (Reader(path), Reader(path, rows[0].outcome.namespace)), [0]

    def counts() -> bool:
        count[0] += 1
        return False

    for reader in readers:
        reader._connection.set_progress_handler(counts, EVERY)
    found = {}
    for name, page in pages(*readers, rows[0]).items():
        count[0] = 0
        assert page() is not None, name
        found[name] = count[0]
    for opened in (*readers, file):
        opened.close()
    return found


def test_pages_take_no_longer_with_more_rows(tmp_path: Path) -> None:
    few, many = (instructions(tmp_path / f"{count}.db", batch(count)) for count in (FEW, MANY))
    del few["savings"], few["savings, one caller"], few["live, a word"]
    assert {name: many[name] for name in few if many[name] > 1.2 * few[name] + 5} == {}
