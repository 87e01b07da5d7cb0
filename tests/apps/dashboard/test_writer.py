"""A dashboard that fails never touches a request: rows wait, or are dropped and counted."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from proxy.apps.dashboard import MISSING
from proxy.apps.dashboard import rows as rows_module
from proxy.apps.dashboard import writer as module
from proxy.apps.dashboard.describe import NOTHING
from proxy.apps.dashboard.queries import Reader
from proxy.apps.dashboard.rows import Recorded, Rows
from proxy.apps.dashboard.writer import BATCH, HELD, LONGEST_AGE, WAITING, Writer
from tests.apps.dashboard.test_rows import SIZE
from tests.apps.dashboard.traffic import OPERATOR, begin, dashboard, outcome, recorded, turn
from tests.clock import wait_until
from tests.fake_upstream import StrictUpstream, text
from tests.serving import ADMIN, PLAIN, served, tight

BROKEN: Any = SimpleNamespace(in_force="nothing that was planned", body=b"")
"""An attempt that nobody can describe."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "not there yet" / "rows.db"


@pytest.fixture
def writer(path: Path) -> Iterator[Writer]:
    """A writer that is not started: as if the disk hung."""
    writer = Writer(path, SIZE)
    yield writer
    writer.close()


def record(writer: Writer, count: int) -> None:
    for number in range(count):
        writer.record(outcome(number))


def holding(size: int) -> Any:
    return SimpleNamespace(in_force=None, body=bytes(size))


# -- in a running proxy --


def test_a_file_that_cannot_be_used_is_left_alone_and_requests_are_served(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path.parent.mkdir()
    path.write_bytes(b"This was never a database. " * 400)
    with (
        StrictUpstream() as upstream,
        served({"default": tight(upstream.url)}, dashboard=path) as proxy,
    ):
        upstream.script(text("Served."))
        assert turn(proxy, begin(), 1).json()["choices"][0]["message"]["content"] == "Served."
        me = dashboard(proxy, "me")
        refused = httpx.get(f"{proxy.root}/_offload/api/requests", headers=OPERATOR, verify=PLAIN)
    assert me["off"] and me["fault"].startswith("the dashboard is off: ")
    assert me["file"] == str(path) and str(path) in me["fault"]
    assert (refused.status_code, refused.json()["error"]["message"]) == (503, me["fault"])
    assert me["fault"] in caplog.text, "the log says so, too"
    assert "exchange sums" not in caplog.text


def test_without_the_flag_the_pages_say_how_to_switch_it_on() -> None:
    with served(admin_token=ADMIN) as proxy:
        state = dashboard(proxy, "health")["dashboard"]
    assert (state["off"], state["fault"], state["file"]) == (True, MISSING, None)


def test_a_file_that_is_damaged_later_is_named_and_begins_anew_once_it_is_deleted(
    path: Path,
) -> None:
    with (
        StrictUpstream() as upstream,
        served({"default": tight(upstream.url)}, dashboard=path) as proxy,
    ):
        upstream.script(*(text("Served.") for _ in range(2)))
        turn(proxy, begin(), 1)
        recorded(proxy, 1)
        for file in path.parent.glob("rows.db*"):
            # the log goes with whoever closes the file last; a mapped file that is cut off is a bus
            # error for whoever reads it then
            with suppress(FileNotFoundError), file.open("r+b") as opened:
                opened.write(b"\xff" * file.stat().st_size)
        assert turn(proxy, begin(), 2).status_code == 200
        wait_until(lambda: "delete it" in dashboard(proxy, "me")["fault"])
        path.unlink()
        wait_until(lambda: not dashboard(proxy, "me")["fault"])
        assert len(recorded(proxy, 1)) == 1, "the row that waited"


# -- rows wait --


@pytest.mark.parametrize("started", [True, False])
def test_rows_wait_while_another_process_locks_the_file(
    started: bool, writer: Writer, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_module, "BUSY", 0.01)
    Rows(path, SIZE).close()
    other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    if started:
        writer.start()
    other.execute("BEGIN IMMEDIATE")
    if not started:
        writer.start()
    record(writer, BATCH)
    wait_until(lambda: "locked" in writer.state.fault)
    other.execute("COMMIT")
    wait_until(lambda: not writer.state.fault)
    assert (writer.state.written, writer.state.dropped, writer.state.off) == (BATCH, 0, False)
    writer.close()
    other.close()


def test_a_full_disk_loses_no_row_that_there_is_room_for(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    full, real = [True], Rows.write

    def write(self: Rows, some: list[Recorded]) -> int:
        if full[0]:
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise error
        return real(self, some)

    monkeypatch.setattr(Rows, "write", write)
    writer.start()
    record(writer, 30)
    wait_until(lambda: writer.state.fault)
    assert "full" in writer.state.fault and not writer.state.off
    full[0] = False
    wait_until(lambda: not writer.state.fault)
    assert (writer.state.written, writer.state.dropped) == (30, 0)


def test_rows_are_dropped_and_never_waited_for(writer: Writer) -> None:
    record(writer, WAITING + 5)
    assert writer.state.dropped == 5


def test_waiting_requests_do_not_fill_the_memory(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those without a description have a row, and later ones have room again."""
    described: list[bool] = []

    def describe(attempt: Any, *, content: bool) -> Any:
        described.append(attempt is not None)
        return NOTHING

    monkeypatch.setattr(module, "describe", describe)
    for number in range(4):
        writer.record(outcome(number), holding(HELD // 2))
    writer.start()
    wait_until(lambda: writer.state.written == 4)
    for number in range(4, 6):
        writer.record(outcome(number), holding(HELD // 2))
    wait_until(lambda: writer.state.written == 6)
    assert described == [True, True, False, False, True, True]


def test_rows_are_written_in_pieces_that_fit_the_smallest_file(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    large = bytes(module.LARGE // 2)

    def write(rows: Rows, some: list[Recorded]) -> int:
        written.append(len(some))
        return len(some)

    monkeypatch.setattr(Rows, "write", write)
    monkeypatch.setattr(
        module, "describe", lambda attempt, *, content: (None, None, attempt and large)
    )
    record(writer, BATCH + 1)
    for number in range(5):
        writer.record(outcome(number), holding(1))
    writer.start()
    wait_until(lambda: writer.state.written == BATCH + 6)
    assert written == [BATCH, 3, 2, 1]


def test_rows_that_wait_when_it_is_given_up_are_dropped(
    writer: Writer, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path.parent.mkdir()
    path.write_bytes(b"This was never a database. " * 400)
    record(writer, 3)
    writer.start()
    record(writer, 2)
    writer.close()
    assert writer.state.off and writer.state.dropped == 5
    assert "were not written before the end" not in caplog.text


def test_rows_that_cannot_be_written_at_the_end_are_named_in_the_log(
    writer: Writer, path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "CLOSING", 0.05)
    writer.start()
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        record(writer, 3)
        writer.close()
    assert "3 rows of the dashboard were not written" in caplog.text
    writer._thread.join(30)


# -- what is wrong with a row costs no other row --


def test_a_bug_in_describing_a_request_costs_no_row(
    writer: Writer, caplog: pytest.LogCaptureFixture
) -> None:
    writer.record(outcome(0), BROKEN)
    writer.record(outcome(1))
    writer.start()
    wait_until(lambda: writer.state.written == 2)
    writer.close()
    assert "a bug, in describing" in caplog.text


def test_all_who_write_go_on_in_one_new_file_when_theirs_is_removed(path: Path) -> None:
    """Whoever notices first makes it, and the others find it there."""
    writers = [Writer(path, SIZE) for _ in range(3)]
    for number, writer in enumerate(writers):
        writer.start()
        writer.record(outcome(number))
    wait_until(lambda: all(writer.state.written == 1 for writer in writers))
    path.unlink()
    for number in range(3, 30):
        writers[number % 3].record(outcome(number))
    wait_until(lambda: all(writer.state.written == 10 for writer in writers))
    for number, writer in enumerate(writers, 30):
        wait_until(lambda writer=writer: not writer._queue)
        writer.record(outcome(number))
    wait_until(lambda: all(writer.state.written == 11 for writer in writers))
    for writer in writers:
        writer.close()
    assert [writer.state.fault for writer in writers] == [""] * 3
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        assert connection.execute("SELECT count(*) FROM requests").fetchone()[0] >= 3


# -- old rows --


def test_rows_are_kept_for_a_month_at_most_also_after_the_clock_was_set_back(path: Path) -> None:
    now = [2.0e9]
    writer = Writer(path, SIZE, lambda namespace: 10 * LONGEST_AGE, lambda: now[0])
    writer.start()
    for number, at in enumerate((2.0e9, 1.0e9, 1.0e9 + LONGEST_AGE + 1)):
        now[0] = at
        writer.record(outcome(number))
        wait_until(lambda number=number: writer.state.written == number + 1)
    with closing(Reader(path)) as reader:
        wait_until(
            lambda: [row["time"] for row in reader.requests()] == [1.0e9 + LONGEST_AGE + 1, 2.0e9]
        )
    writer.close()


def test_rows_that_wait_while_their_namespace_is_forgotten_are_never_written(
    writer: Writer, path: Path
) -> None:
    with closing(Rows(path, SIZE)) as rows:
        record(writer, 3)
        assert rows.forget("acme-1", 9e9) == 0, "nothing of it is written yet"
        writer.record(outcome(3, "acme-2"))
        writer.start()
        wait_until(lambda: writer.state.written)
        writer.close()
        assert (rows.count("acme-1"), rows.count("acme-2"), writer.state.written) == (None, 1, 1)
