"""A dashboard that fails never touches a request."""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
import stat
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import aclosing, closing
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import httpx
import msgspec
import pytest

from bench.dashboard import Recorded, batch_of
from proxy.dashboard import Dashboard
from proxy.dashboard import database as database_module
from proxy.dashboard import file as file_module
from proxy.dashboard import live as live_module
from proxy.dashboard import writer as writer_module
from proxy.dashboard.access import Viewer
from proxy.dashboard.batch import Batch
from proxy.dashboard.database import FORGETTING, LEAVING, Database
from proxy.dashboard.events import LiveRows
from proxy.dashboard.file import unreadable
from proxy.dashboard.holding import BRIEF, Unseen
from proxy.dashboard.live import Live
from proxy.dashboard.reader import Reader
from proxy.dashboard.rows import DAY, LONGEST_NAME, NO_ROW, STORED, Seen
from proxy.dashboard.writer import AHEAD, BATCH, HELD, LONGEST_AGE, WAITING, Writer
from proxy.errors import DashboardFault
from proxy.plan.history import Role
from proxy.plan.plan import Room
from proxy.settings import Settings
from proxy.telemetry.outcome import Kind, Outcome
from tests.dashboard.traffic import apart, begin, dashboard, recorded, turn, until
from tests.fake_upstream import StrictUpstream, text
from tests.serving import PLAIN, served, spawned, tight

SIZE = 1 << 20


MESSAGE = SimpleNamespace(role=Role.USER, tokens=1, meaning=b"m" * 32, digest=b"d" * 32)
LONG = [MESSAGE] * (BRIEF + 1)
NO_ROOM = Room()
NO_POLICIES: Any = None
NO_HEALTH: Any = None
BROKEN: Any = SimpleNamespace(planned="nothing that was planned", parsed=MagicMock())
"""An attempt that nobody can describe."""


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let writers wait for nothing."""
    monkeypatch.setattr(writer_module, "LATEST", 0.01)
    monkeypatch.setattr(writer_module, "AGAIN", 0.05)


def outcome(number: int = 0, namespace: str = "acme-1", model: str = "gpt-4.1-mini", **fields: object) -> Outcome:
    return Outcome(
        request_id=f"req_{number:032}", tenant="acme", namespace=namespace, kind=Kind.OFFLOADED, method="POST",
        path="/v1/chat/completions", model=model, dialect="chat", **fields,  # type: ignore[arg-type]
    )  # fmt: skip


def rows(count: int, start: int = 0, at: float = 0.0, namespace: str = "acme-1", detail: int = 0) -> list[Recorded]:
    def seen(number: int) -> Seen:
        return Seen(number // 10, b"\x92\x90\x01", os.urandom(detail) if detail else None)

    return [
        Recorded(at + number, outcome(number, namespace, tokens_before=7), seen(number))
        for number in range(start, start + count)
    ]


def held(model: str, weight: int = 0) -> Unseen:
    return Unseen("acme-1", "chat", model, LONG, 7, NO_ROOM, weight)


def damage(path: Path) -> None:
    path.write_bytes(b"This was never a database. " * 400)


def somebody_elses(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE requests (id INTEGER)")


def a_folder(path: Path) -> None:
    path.mkdir()


def a_link(path: Path) -> None:
    path.symlink_to(path.with_name("elsewhere"))


@pytest.mark.parametrize("break_it", [damage, somebody_elses, a_folder, a_link])
def test_a_file_that_cannot_be_used_is_left_alone_and_requests_are_served(
    break_it: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "rows.db"
    break_it(path)
    before = path.read_bytes() if path.is_file() else None
    with StrictUpstream() as upstream, served({"default": tight(upstream.url)}, dashboard=path) as proxy:
        upstream.script(text("Served."))
        assert turn(proxy, begin(), 1).json()["choices"][0]["message"]["content"] == "Served."
        me = dashboard(proxy, "me")
        refused = httpx.get(f"{proxy.root}/_offload/api/requests", verify=PLAIN)
    assert me["off"] and me["fault"].startswith("the dashboard is off: ")
    assert str(path) in me["fault"]
    assert (refused.status_code, refused.json()["error"]["message"]) == (503, me["fault"])
    assert me["fault"] in caplog.text, "the log says so, too"
    assert (path.read_bytes() if path.is_file() else None) == before


def test_without_the_flag_the_pages_say_how_to_switch_it_on() -> None:
    with served() as proxy:
        assert "--dashboard" in dashboard(proxy, "me")["fault"]
        assert httpx.get(f"{proxy.root}/_offload/", verify=PLAIN).status_code == 200
        assert httpx.get(f"{proxy.root}/_offload/api/live", verify=PLAIN).status_code == 204


def test_a_file_that_is_damaged_later_switches_the_dashboard_off(tmp_path: Path) -> None:
    path = tmp_path / "rows.db"
    with StrictUpstream() as upstream, served({"default": tight(upstream.url)}, dashboard=path) as proxy:
        upstream.script(*(text("Served.") for _ in range(3)))
        turn(proxy, begin(), 1)
        recorded(proxy, 1)
        for file in (path, path.with_name("rows.db-wal"), path.with_name("rows.db-shm")):
            file.write_bytes(b"\xff" * file.stat().st_size)
        for number in (2, 3):
            assert turn(proxy, begin(), number).status_code == 200
            until(lambda: dashboard(proxy, "me")["off"])
        assert "delete it" in dashboard(proxy, "me")["fault"]


def test_rows_that_wait_when_the_dashboard_is_given_up_count_as_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Database, "write", MagicMock(side_effect=sqlite3.DatabaseError("malformed")))
    writer = Writer(tmp_path / "rows.db", SIZE)
    for number in range(3):
        writer.record([outcome(number)])
    writer.start()
    until(lambda: not writer._thread.is_alive())
    writer.record([outcome(3)])
    writer.close()
    assert (writer.state.off, writer.state.written, writer.state.dropped) == (True, 0, 4)
    assert "before the end" not in caplog.text


def test_rows_that_cannot_be_written_at_the_end_are_named_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(writer_module, "CLOSING", 0.05)
    monkeypatch.setattr(writer_module, "LATEST", 600.0)
    writer = Writer(tmp_path / "rows.db", SIZE)
    writer.start()
    until(lambda: writer._database is not None)
    with closing(sqlite3.connect(tmp_path / "rows.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        for number in range(3):
            writer.record([outcome(number)])
        writer.close()
    assert "3 rows of the dashboard were not written" in caplog.text
    writer._thread.join(30)
    assert writer.state.written == 3, "they are written after all, if the process lives as long"


def test_a_file_that_is_removed_while_the_proxy_runs_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "rows.db"
    with StrictUpstream() as upstream, served({"default": tight(upstream.url)}, dashboard=path) as proxy:
        upstream.respond(lambda request: text("Served."))
        turn(proxy, begin(), 1, model="before")
        recorded(proxy, 1)
        for file in list(tmp_path.iterdir()):
            file.unlink()
        turn(proxy, begin(), 2, model="after")
        until(lambda: httpx.get(f"{proxy.root}/_offload/api/requests", verify=PLAIN).status_code == 200)
        assert [row["model"] for row in recorded(proxy, 1)] == ["after"]
        assert not dashboard(proxy, "me")["fault"]
    assert {stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()} == {0o600}


def test_a_file_that_is_replaced_goes_on_with_new_rows(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "rows.db", SIZE)
    writer.start()
    writer.record([outcome(1)])
    until(lambda: writer.state.written == 1)
    Database(tmp_path / "other.db", SIZE).close()
    (tmp_path / "other.db").rename(tmp_path / "rows.db")
    writer.record([outcome(2)])
    until(lambda: writer.state.written == 2)
    writer.close()
    reader = Reader(tmp_path / "rows.db")
    assert reader.before(9)[0]["request_id"] == outcome(2).request_id
    reader.close()


@pytest.mark.parametrize("started", [True, False])
def test_rows_wait_while_another_process_locks_the_file(
    started: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database_module, "BUSY", 0.01)
    Database(tmp_path / "rows.db", SIZE).close()
    other = sqlite3.connect(tmp_path / "rows.db", isolation_level=None, check_same_thread=False)
    writer = Writer(tmp_path / "rows.db", SIZE)
    if started:
        writer.start()
    other.execute("BEGIN IMMEDIATE")
    if not started:
        writer.start()
    for number in range(BATCH):
        writer.record([outcome(number)])
    until(lambda: "locked" in writer.state.fault)
    other.execute("COMMIT")
    until(lambda: writer.state.written == BATCH)
    assert (writer.state.fault, writer.state.dropped, writer.state.off) == ("", 0, False)
    writer.close()
    other.close()


def test_rows_are_written_at_once_when_somebody_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "LATEST", 600.0)
    monkeypatch.setattr(writer_module, "EVERY", 0.01)
    ours, theirs = (Writer(tmp_path / "rows.db", SIZE, others=True) for _ in range(2))
    for writer in (ours, theirs):
        writer.start()
        writer.record([outcome()])
    assert (ours.state.written, theirs.state.written) == (0, 0)
    monkeypatch.setattr(writer_module, "FRESH", 600.0)
    ours.look()
    assert ours.state.written == 1, "who looks sees this process's rows at once"
    ours.record([outcome(2)])
    ours.look()
    assert ours.state.written == 2, "and who looks again"
    until(lambda: theirs.state.written == 1)
    for writer in (ours, theirs):
        writer.close()


def test_old_rows_leave_after_the_clock_was_set_back(tmp_path: Path) -> None:
    now = [2.0e9]
    writer = Writer(tmp_path / "rows.db", SIZE, clock=lambda: now[0])
    writer.start()
    for number, at in enumerate((2.0e9, 1.0e9, 1.0e9 + LONGEST_AGE + 1)):
        now[0] = at
        writer.record([outcome(number)])
        until(lambda number=number: writer.state.written == number + 1)
    writer.close()
    reader = Reader(tmp_path / "rows.db")
    assert [row["time"] for row in reader.before(9)] == [1.0e9 + LONGEST_AGE + 1, 2.0e9]
    reader.close()


def test_a_full_file_loses_its_oldest_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.db"
    database = Database(path, SIZE)
    for start in range(0, 12_000, 100):
        database.write(batch_of(rows(100, start)))
        written = sum(file.stat().st_size for file in tmp_path.iterdir() if "wal" not in file.name)
        assert written <= SIZE + (64 << 10)
    reader = Reader(path)
    newest = reader.before(1 << 62)
    assert newest[0]["request_id"] == f"req_{11_999:032}"
    [oldest] = database.connection.execute("SELECT min(last) FROM packs").fetchone()
    assert oldest > 100
    assert len(reader.sessions()) == 200
    orphans = "SELECT count(*) FROM sessions WHERE last_id < (SELECT min(first) FROM packs)"
    assert database.connection.execute(orphans).fetchone() == (0,)
    database.close()
    reader.close()


def test_a_batch_fits_into_the_smallest_file_that_is_allowed(tmp_path: Path) -> None:
    with closing(Database(tmp_path / "rows.db", 16 << 20)) as database:
        for start in range(0, 30_000, BATCH):
            batch = batch_of(rows(BATCH, start, detail=500))
            assert database.write(batch) == BATCH, "and no failure, after which the next try would be seconds later"


def test_a_full_disk_loses_rows_and_then_records_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = [True]
    real = Database.write

    def write(self: Database, batch: list[Recorded]) -> int:
        if full[0]:
            raise sqlite3.OperationalError("database or disk is full")
        return real(self, batch)

    monkeypatch.setattr(Database, "write", write)
    writer = Writer(tmp_path / "rows.db", SIZE)
    writer.start()
    writer.record([outcome()])
    until(lambda: writer.state.fault)
    assert "full" in writer.state.fault and not writer.state.off
    for number in range(30):
        writer.record([outcome(number)])
    full[0] = False
    until(lambda: writer.state.written + writer.state.dropped == 31)
    assert (writer.state.fault, writer.state.dropped <= 1) == ("", True), "what came meanwhile has waited"
    writer.close()


def test_rows_are_dropped_and_never_waited_for(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "rows.db", SIZE)  # not started: as if the disk hung
    for number in range(WAITING + 5):
        writer.record([outcome(number)])
    assert writer.state.dropped == 5
    writer.close()


def test_waiting_requests_do_not_fill_the_memory(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "rows.db", SIZE)
    for number in range(4):
        writer.record([outcome(number)], [held("gpt-4.1-mini", HELD // 2)])
    assert [place for _, place, _ in writer._long] == [0, 1]
    assert {row.session for row in writer._open.rows()} == {held("gpt-4.1-mini").session}


def test_requests_are_let_go_long_before_their_rows_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "LATEST", 600.0)
    writer = Writer(tmp_path / "rows.db", SIZE)
    writer.start()
    for number in range(2 * AHEAD):
        writer.record([outcome(number)], [held("gpt-4.1-mini", 100_000)])
    until(lambda: len(writer._long) < AHEAD)
    assert writer.state.written == 0
    assert writer._came - writer._left < 100_000 * AHEAD
    writer.look()
    assert (writer.state.written, writer._came - writer._left) == (2 * AHEAD, 0)
    writer.close()


def test_rows_that_come_during_the_last_write_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, write = Writer(tmp_path / "rows.db", SIZE), Database.write

    def closing_meanwhile(database: Database, batch: Any) -> int:
        if not writer._ended.is_set():
            writer.record([outcome(1)])
            writer._ended.set()
            writer._write_soon()
        return write(database, batch)

    monkeypatch.setattr(Database, "write", closing_meanwhile)
    writer.record([outcome(0)])
    writer.start()
    until(lambda: not writer._thread.is_alive())
    assert writer.state.written == 2


@pytest.mark.parametrize("after", ["before the end", "after it"])
def test_a_row_that_comes_right_after_the_last_write_is_written(
    after: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "LATEST", 600.0)
    writer = Writer(tmp_path / "rows.db", SIZE)
    none = MagicMock(wraps=writer._none)

    def closing_meanwhile() -> None:
        if not writer._ended.is_set():
            if after == "after it":  # has hurried the thread, which has written what it found
                writer._ended.set()
            writer.record([outcome(1)])
            if after == "before the end":
                writer._ended.set()
                writer._write_soon()

    none.set.side_effect = closing_meanwhile
    monkeypatch.setattr(writer, "_none", none)
    writer.record([outcome(0)])
    writer.start()
    writer._write_soon()
    until(lambda: not writer._thread.is_alive())
    assert writer.state.written == 2


def test_each_row_is_written_and_added_up_once_whenever_batches_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "LATEST", 0.0)
    writer = Writer(tmp_path / "rows.db", SIZE)
    writer.start()
    for number in range(3_000):
        seen = held("gpt-4.1-mini", 100)
        writer.record([outcome(number)], [seen if number % 3 else Seen(seen.session, b"\x92\x90\x01")])
    writer.look()
    until(lambda: writer.state.written == 3_000)
    writer.close()
    with closing(Reader(tmp_path / "rows.db")) as reader:
        assert [row["requests"] for row in reader.sums(0.0)] == [3_000]
        assert [row["requests"] for row in reader.sessions()] == [3_000]
        assert [row["request_id"] for row in reader.before(3_001)[::-1]] == [
            outcome(number).request_id for number in range(3_000 - len(reader.before(3_001)), 3_000)
        ]
    assert writer._came == writer._left


def test_descriptions_that_cannot_be_written_do_not_fill_the_memory(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "rows.db", SIZE)  # not started: as if the disk hung
    for number in range(4):
        writer.record([outcome(number)], [held("gpt-4.1-mini", HELD // 2)])
    writer._describe()
    assert [bool(row.sent) for row in writer._open.rows()] == [True, True, False, False]
    assert writer._came - writer._left == sum(writer._open.weights.values()) > 0


def test_a_bug_in_describing_a_long_request_costs_no_row(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "rows.db", SIZE)
    writer.record([outcome()], [msgspec.structs.replace(held("gpt-4.1-mini", 0), room=None)])
    writer.start()
    until(lambda: writer.state.written == 1)
    writer.close()


def test_a_bug_in_describing_a_request_at_once_neither(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shown = Dashboard(Settings(dashboard=tmp_path / "rows.db"), lambda: NO_POLICIES, lambda request: True, NO_HEALTH)
    shown.watch(outcome().request_id, BROKEN)
    shown.record([outcome()])
    assert "a bug, in describing" in caplog.text
    shown.start()
    shown.close()
    assert shown.state()["written"] == 1


@pytest.mark.parametrize(
    "name", ["\ud800", "m" * 1_000_000, "<b>\n\ndata: x\x00", "é" * 30_000], ids=lambda name: name[:5]
)
def test_a_name_that_a_client_chose_costs_no_row(name: str, tmp_path: Path) -> None:
    database = Database(tmp_path / "rows.db", SIZE)
    hostile = msgspec.structs.replace(outcome(), model=name, path="/" + name, detail=name)
    database.write(batch_of([Recorded(0.0, one, Seen(1)) for one in (outcome(), hostile, outcome())]))
    reader = Reader(tmp_path / "rows.db")
    shown = [row["model"] for row in reader.before(9)]
    assert [len(shown), shown[0], len(reader.session(1))] == [3, "gpt-4.1-mini", 3]
    assert len(shown[1]) <= LONGEST_NAME and json.dumps(shown).encode()
    assert {row["model"] for row in reader.sums(0.0)} == set(shown)
    database.close()
    reader.close()


@pytest.mark.parametrize("work", ["trim", "_limit_sums"])
def test_rows_are_written_once_even_if_no_room_can_be_made_after_them(
    work: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked = MagicMock(side_effect=[sqlite3.OperationalError("database is locked"), *[None] * 100])
    monkeypatch.setattr(Database, work, locked)
    monkeypatch.setattr(database_module, "COUNTED_AGAIN", 1)
    writer = Writer(tmp_path / "rows.db", SIZE)
    writer.record([outcome(0)])
    writer.record([outcome(1)])
    writer.start()
    until(lambda: locked.called)
    writer.record([outcome(2)])
    until(lambda: writer.state.written >= 3)
    writer.close()
    assert [row["requests"] for row in Reader(tmp_path / "rows.db").sums(0.0)] == [3]


def test_a_full_disk_after_a_row_that_cannot_be_written_repeats_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch is halved, and only one of its halves is written before the disk is full."""
    tried: list[int] = []
    real = Database.write

    def write(self: Database, batch: Any) -> int:
        tried.append(len(batch))
        if len(batch) == 4:
            raise sqlite3.IntegrityError("a bug")
        if len(tried) == 3:
            raise sqlite3.OperationalError("database or disk is full")
        return real(self, batch)

    monkeypatch.setattr(Database, "write", write)
    writer = Writer(tmp_path / "rows.db", SIZE)
    for number in range(4):
        writer.record([outcome(number)])
    writer.start()
    until(lambda: writer.state.written + writer.state.dropped >= 4)
    writer.close()
    assert (writer.state.written, writer.state.dropped, tried) == (4, 0, [4, 2, 2, 1, 1])
    assert [row["requests"] for row in Reader(tmp_path / "rows.db").sums(0.0)] == [4]


def test_a_row_with_the_last_id_that_there_is_costs_no_later_row(tmp_path: Path) -> None:
    database = Database(tmp_path / "rows.db", SIZE)
    database.write(batch_of(rows(1)))
    database.connection.execute(f"UPDATE packs SET last = {2**63 - 1}")
    for start in (1, 3):
        assert database.write(batch_of(rows(2, start))) == 2
    with closing(Reader(tmp_path / "rows.db")) as reader:
        assert (reader.newest(), [row["id"] for row in reader.before(NO_ROW)]) == (4, [4, 3, 2, 1])
    database.close()


def test_a_row_that_cannot_be_written_costs_no_other_row(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "rows.db", SIZE)
    for number in range(3):
        writer.record([outcome(number, prompt_tokens=1 << 70 if number == 1 else 7)])
    writer.start()
    until(lambda: writer.state.written + writer.state.dropped == 3)
    writer.close()
    assert (writer.state.written, writer.state.dropped, writer.state.off) == (2, 1, False)


DEEP = b"\x91" * 5_000 + b"\1"


@pytest.mark.parametrize(
    ("table", "column"),
    [
        *(("packs", column) for column in ("first", "worker", "count", "newest", "sessions", "rows", "sent")),
        ("details", "detail"),
    ],
    ids=lambda one: one,
)
@pytest.mark.parametrize("written", [b"", b"\xc1", b"\x90", b"\x05", DEEP, "text"], ids=lambda one: repr(one)[:9])
def test_a_damaged_pack_hides_no_other_pack(table: str, column: str, written: object, tmp_path: Path) -> None:
    path = tmp_path / "rows.db"
    with closing(Database(path, SIZE)) as database:
        for number in range(3):
            database.write(batch_of(rows(1, number, at=time.time(), detail=9)))
        id = "id" if table == "details" else "last"
        database.connection.execute(f"UPDATE {table} SET {column} = ? WHERE {id} = 2", (written,))
        database.expire(lambda namespace: 1e9, time.time())
    with closing(Reader(path)) as reader:
        assert {1, 3} <= {row["id"] for rows in reader.after(0) for row in apart(rows)}
        assert {1, 3} <= {row["id"] for row in reader.before(9)}
        assert {1, 3} <= {row["id"] for row in reader.session(0)}
        assert len(reader.sessions()) == 1
        assert (reader.request(2) or {"detail": None})["detail"] is None


@pytest.mark.parametrize("written", [msgspec.msgpack.Ext(5, b"x"), {None: 1}], ids=["extension", "no key of JSON"])
def test_a_row_without_a_form_in_json_hides_no_other_row(written: object, tmp_path: Path) -> None:
    path = tmp_path / "rows.db"
    with closing(Database(path, SIZE)) as database:
        for number in range(3):
            database.write(batch_of(rows(1, number, at=time.time())))
        [packed] = database.connection.execute("SELECT rows FROM packs WHERE last = 2").fetchone()
        columns = msgspec.msgpack.decode(packed)
        columns[1][STORED.index("words")] = written
        database.connection.execute("UPDATE packs SET rows = ? WHERE last = 2", (msgspec.msgpack.encode(columns),))
    with served(dashboard=path) as proxy:
        assert [row["id"] for row in dashboard(proxy, "requests")] == [3, 1]
        assert [row["id"] for row in dashboard(proxy, "sessions/0")] == [1, 3]
        reply = httpx.get(f"{proxy.root}/_offload/api/requests/2", verify=PLAIN)
        assert reply.status_code == 503 and "damaged" in reply.text


def test_numbers_that_nobody_can_add_up_keep_no_namespace_from_being_forgotten(tmp_path: Path) -> None:
    with closing(Database(tmp_path / "rows.db", SIZE)) as database:
        for number in range(3):
            database.write(batch_of(rows(1, number, at=time.time())))
        namespace = outcome(0).namespace
        database.connection.execute("UPDATE packs SET count = ?", ((1 << 63) - 1,))
        assert database.count(namespace)
        assert database.forget(namespace, time.time()) and database.count(namespace) is None


def test_sessions_and_requests_whose_ids_somebody_else_wrote_end_in_no_bug(tmp_path: Path) -> None:
    path = tmp_path / "rows.db"
    with closing(Database(path, SIZE)) as database, closing(Reader(path)) as reader:
        for number in range(2):
            database.write(batch_of(rows(1, number, at=time.time())))
        database.connection.execute("UPDATE packs SET rows = (SELECT rows FROM packs WHERE last = 1), first = 1")
        assert reader.request(1)
        database.connection.execute("UPDATE sessions SET last_id = 'text'")
        assert reader.session(0) == []
        database.connection.execute("UPDATE sessions SET last_id = ?", ((1 << 63) - 1,))
        with pytest.raises(DashboardFault, match="cannot be read"):
            reader.session(0)


async def test_viewers_go_on_after_a_bug_in_looking_for_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_module, "EVERY", 0.01)
    found: list[Any] = [ValueError("a bug"), [LiveRows(1, "acme-1", b"{}")]]

    async def newest() -> int:
        return 0

    async def after(last: int) -> list[Any]:
        one = found.pop(0) if found else []
        if isinstance(one, Exception):
            raise one
        return one

    events = Live(after, newest).events(Viewer(), time.time)
    async with aclosing(events), asyncio.timeout(10):
        assert b"data" not in await anext(events)
        assert b"data" in await anext(events)


def test_rows_leave_after_their_retention_and_when_a_namespace_is_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "rows.db"
    database, reader = Database(path, 64 << 20), None
    now = 40 * 86_400.0
    for number, (namespace, at) in enumerate((("old", 0.0), ("new", now - 300), ("gone", now - 300))):
        database.write(batch_of(rows(20, 20 * number, at, namespace, detail=100)))
    assert database.expire(lambda namespace: 30 * 86_400.0, now) == 20
    assert database.forget("gone", now) == 20
    assert database.forget("never-seen", now) == 0
    reader = Reader(path)
    assert {row["namespace"] for row in reader.before(1 << 62)} == {"new"}
    assert [row["namespace"] for row in reader.sessions()] == ["new", "new"]
    assert [row["requests"] for row in reader.sums(0.0)] == [row["requests"] for row in reader.hours(0.0)] == [20]
    count = database.connection.execute
    assert [count(f"SELECT count(*) FROM {table}").fetchone() for table in ("sessions", "details")] == [(2,), (20,)]
    assert not any(b"gone" in file.read_bytes() for file in tmp_path.iterdir()), "nor in the log, while it is open"
    database.close()
    reader.close()


def test_rows_are_kept_for_a_month_at_most(tmp_path: Path) -> None:
    now = [0.0]
    writer = Writer(tmp_path / "rows.db", SIZE, lambda namespace: 10 * LONGEST_AGE, lambda: now[0])
    writer.start()
    writer.record([outcome(1)])
    until(lambda: writer.state.written == 1)
    now[0] = LONGEST_AGE + 1
    writer.record([outcome(2)])
    writer.close()
    reader = Reader(tmp_path / "rows.db")
    assert [row["request_id"] for row in reader.before(1 << 62)] == [outcome(2).request_id]
    reader.close()


def test_sums_and_details_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database_module, "SUMS_KEPT", 2)
    monkeypatch.setattr(database_module, "DETAILED", 5)
    database = Database(tmp_path / "rows.db", 64 << 20)
    for day in range(4):
        database.write(batch_of(rows(10, at=day * 86_400.0, detail=10)))
    database.expire(lambda namespace: 1e9, 4 * 86_400.0)
    run = database.connection.execute
    assert [run(f"SELECT count(*) FROM {table}").fetchone() for table in ("days", "hours")] == [(2,), (2,)]
    assert run("SELECT min(day) FROM days").fetchone() == (2,), "the newest stay"
    assert run("SELECT min(id) > 20 FROM details").fetchone() == (1,), "five at most, and those of the newest batch"
    database.close()


def test_a_tenant_that_names_ever_new_models_and_keys_costs_the_others_nothing(tmp_path: Path) -> None:
    database = Database(tmp_path / "rows.db", SIZE)
    database.write(batch_of([Recorded(0.0, outcome(0, "acme-1"), Seen(1))]))
    for start in range(1, 2_000, 50):
        names = [(number, f"bulk-{number:016x}", f"model-{number}") for number in range(start, start + 50)]
        database.write(batch_of([Recorded(1.0, outcome(n, name, model=model), Seen(n)) for n, name, model in names]))
    run = database.connection.execute
    for table in ("days", "hours"):
        assert run(f"SELECT requests FROM {table} WHERE namespace = 'acme-1'").fetchone() == (1,)
        assert run(f"SELECT count(*) > 200 FROM {table}").fetchone() == (1,), "what there is room for stays"
    assert sum(file.stat().st_size for file in tmp_path.iterdir() if "wal" not in file.name) <= SIZE + (64 << 10)
    database.expire(lambda name: 0.0 if name.startswith("bulk") else 1e9, 1e6)
    assert run("SELECT name FROM namespaces").fetchall() == [("acme-1",)], "names leave with the last of their rows"
    database.close()


def test_a_namespace_that_another_process_forgot_begins_anew(tmp_path: Path) -> None:
    ours, theirs = (Database(tmp_path / "rows.db", SIZE) for _ in range(2))
    ours.write(batch_of(rows(3)))
    assert theirs.forget("acme-1", 5.0) == 3
    ours.write(batch_of([*rows(4, at=2.0), *rows(4, at=2.0, namespace="acme-2"), *rows(2, 10)]))
    reader = Reader(tmp_path / "rows.db")
    times = {name: [row["time"] for row in reader.before(1 << 62, name)] for name in ("acme-1", "acme-2")}
    assert times == {"acme-1": [11.0, 10.0], "acme-2": [5.0, 4.0, 3.0, 2.0]}, "rows from before never come"
    assert sum(row["requests"] for row in reader.sums(0.0, "acme-1")) == 2
    ours.expire(lambda namespace: 1e9, 5.1 + FORGETTING)
    assert ours.connection.execute("SELECT count(*) FROM forgotten").fetchone() == (0,)
    for one in (ours, theirs, reader):
        one.close()


def test_rows_that_wait_while_their_namespace_is_forgotten_are_never_written(tmp_path: Path) -> None:
    path = tmp_path / "rows.db"
    writer = Writer(path, SIZE)
    with closing(Database(path, SIZE)) as database:
        for number in range(3):
            writer.record([outcome(number)])
        assert database.forget("acme-1", time.time()) == 0, "nothing of it is written yet"
        writer.record([outcome(3, "acme-2")])
        writer.start()
        until(lambda: writer.state.written)
        writer.record([outcome(4)])
        writer.close()
        assert (database.count("acme-1"), database.count("acme-2"), writer.state.written) == (1, 1, 2)


def test_a_clock_that_is_set_back_after_a_namespace_was_forgotten_loses_no_new_rows(tmp_path: Path) -> None:
    with closing(Database(tmp_path / "rows.db", SIZE)) as database:
        with closing(Database(tmp_path / "rows.db", SIZE)) as other:
            other.forget("acme-1", 1e9)
        database.write(batch_of(rows(1, at=1.0)))
        assert not database.count("acme-1")
        database.expire(lambda namespace: 1e9, 2.0)
        database.write(batch_of(rows(1, at=3.0)))
        assert database.count("acme-1") == 1


@pytest.mark.parametrize("first", ["writer", "page"])
def test_nothing_that_a_replaced_file_had_comes_into_the_one_in_its_place(first: str, tmp_path: Path) -> None:
    path, other = tmp_path / "rows.db", tmp_path / "other.db"
    with closing(Database(other, SIZE)) as database:
        database.write(batch_of(rows(3, namespace="theirs")))
    writer = Writer(path, SIZE)
    writer.start()
    for number in range(40):
        writer.record([outcome(number)])
    until(lambda: writer.state.written == 40)
    assert path.with_name("rows.db-wal").stat().st_size > 0, "rows are in the log alone"
    other.rename(path)
    if first == "page":
        writer.leave()
        with closing(Reader(path)) as reader:
            assert {row["namespace"] for row in reader.before(1 << 62)} == {"theirs"}
    writer.record([outcome(40, "later")])
    until(lambda: writer.state.written == 41)
    writer.close()
    with closing(Reader(path)) as reader:
        assert [row["namespace"] for row in reader.before(1 << 62)] == ["later", *["theirs"] * 3]
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def test_two_that_notice_a_replaced_file_at_once_keep_what_is_written_to_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.db"
    ours, theirs = Database(path, SIZE), Database(path, SIZE)
    ours.write(batch_of(rows(3)))
    with closing(Database(tmp_path / "other.db", SIZE)):
        pass
    (tmp_path / "other.db").rename(path)
    opened, real = [], file_module._identity

    def go_on() -> None:
        theirs.leave()
        opened.append(Database(path, SIZE))
        opened[0].write(batch_of(rows(1, 7)))

    other = Thread(target=go_on)

    def looked(file: Path) -> tuple[int, int] | None:
        found = real(file)
        if file.name.endswith("-wal") and not other.ident:
            other.start()
            other.join(0.3)  # it must wait for us, who have looked and not yet deleted
        return found

    monkeypatch.setattr(file_module, "_identity", looked)
    ours.leave()
    other.join()
    monkeypatch.setattr(database_module, "drop", lambda logs: drops.append(dict(logs)))
    drops: list[dict[Path, object]] = []
    ours.leave()
    assert drops in ([], [{}]), "a log with the number of a deleted one is not ours"
    with closing(Reader(path)) as reader:
        assert [row["request_id"] for row in reader.before(1 << 62)] == [outcome(7).request_id]
    for database in (ours, theirs, *opened):
        database.close()
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT sum(count) FROM packs").fetchall() == [(1,)]


def test_the_file_is_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "rows.db"
    path.touch(0o644)
    database = Database(path, SIZE)
    database.write(batch_of(rows(1)))
    assert {stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()} == {0o600}
    database.close()


def test_an_unwritable_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(DashboardFault, match="No such file or directory"):
        Database(tmp_path / "missing" / "rows.db", SIZE)


@pytest.mark.sweep
def test_all_workers_write_and_every_worker_shows_all(tmp_path: Path) -> None:
    with StrictUpstream() as upstream:
        upstream.respond(lambda request: text("Served."))
        flags = ["--workers=3", f"--dashboard={tmp_path / 'rows.db'}"]
        with spawned({"default": tight(upstream.url)}, flags=flags) as proxy:
            for number in range(40):
                turn(proxy, begin(), number)
            until(lambda: len(recorded(proxy, 40)) == 40)
            assert len({row["worker"] for row in recorded(proxy, 40)}) > 1
            found = [dashboard(proxy, "savings")["models"][0]["requests"] for _ in range(8)]
            assert found == [40] * 8
            assert "dashboard" not in proxy.log()


@pytest.mark.parametrize(
    ("error", "cure"), [(sqlite3.DatabaseError, "delete it, or name another"), (sqlite3.OperationalError, "try again")]
)
def test_a_page_that_cannot_read_the_file_says_what_to_do(error: type[sqlite3.Error], cure: str) -> None:
    assert cure in str(unreadable(error("malformed")))


def test_a_page_of_a_damaged_file_says_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "rows.db"
    Database(path, SIZE).close()
    with closing(Reader(path)) as reader:
        path.write_bytes(path.read_bytes()[:4096] + b"\xff" * (path.stat().st_size - 4096))
        with pytest.raises(DashboardFault, match="delete it"):
            reader.sessions()


async def test_the_page_about_health_says_why_the_file_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def health(namespaces: Collection[str]) -> Mapping[str, Any]:
        return {"store": "up", "upstreams": [*namespaces]}

    def unreadable(reader: Reader) -> list[str]:
        raise DashboardFault("The dashboard's file cannot be read: disk I/O error")

    shown = Dashboard(Settings(dashboard=tmp_path / "rows.db"), lambda: NO_POLICIES, lambda request: True, health)
    shown.start()
    try:
        assert (await shown.health())["dashboard"]["fault"] == ""
        monkeypatch.setattr(Reader, "namespaces", unreadable)
        found = await shown.health()
        assert (found["store"], found["upstreams"]) == ("up", [])
        assert found["dashboard"]["fault"] == "The dashboard's file cannot be read: disk I/O error"
    finally:
        shown.close()


def test_rows_that_are_too_old_take_no_messages_of_others_with_them(tmp_path: Path) -> None:
    with closing(Database(tmp_path / "rows.db", 16 << 20)) as database:
        now = 2.0e9
        database.write(batch_of(rows(100, at=now, detail=50)))
        database.write(batch_of(rows(100, start=100, at=now - 60 * DAY, detail=50)))  # the clock was set back
        assert database.expire(lambda namespace: 30 * DAY, now) == 100
        kept = database.connection.execute("SELECT min(id), max(id), count(*) FROM details").fetchone()
        assert kept == (1, 100, 100)


def test_rows_of_a_clock_that_was_ahead_keep_no_others(tmp_path: Path) -> None:
    with closing(Database(tmp_path / "rows.db", 64 << 20)) as database:
        now = 2.0e9
        for start in range(0, LEAVING, BATCH):
            database.write(batch_of(rows(BATCH, start, at=now + 365 * DAY)))
        database.write(batch_of(rows(100, start=LEAVING, at=now)))
        assert database.expire(lambda namespace: 30 * DAY, now + 40 * DAY) == 100
        assert database.expire(lambda namespace: 30 * DAY, now + 400 * DAY) == LEAVING


def test_rows_that_are_too_old_leave_also_while_no_request_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, now = tmp_path / "rows.db", 2.0e9
    monkeypatch.setattr(writer_module, "IDLE", 0.01)
    monkeypatch.setattr(writer_module, "SOON", 0.01)
    with closing(Database(path, 16 << 20)) as database, closing(Reader(path)) as reader:
        database.write(batch_of(rows(2 * LEAVING, at=now - 2 * LEAVING)))
        writer = Writer(path, 16 << 20, lambda namespace: DAY, lambda: now)
        writer.start()
        until(lambda: writer._next_expiry)
        assert len(reader.before(1 << 62)) == 200
        now += 2 * DAY
        until(lambda: not reader.before(1 << 62))
        writer.close()


def test_requests_that_end_far_apart_are_not_kept_together(tmp_path: Path) -> None:
    now = 2.0e9
    writer = Writer(tmp_path / "rows.db", SIZE, clock=lambda: now)
    for number in range(120):  # the file cannot be opened meanwhile, and no thread writes
        writer.record([outcome(number)])
        now += 3_600.0 if number % 10 == 9 else 1.0
    writer.start()
    writer.close()
    with closing(sqlite3.connect(tmp_path / "rows.db")) as file:
        assert file.execute("SELECT count FROM packs").fetchall() == [(10,)] * 12
    assert writer.state.written == 120


def test_nor_are_those_of_which_fewer_are_written_after_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, write, sizes = 2.0e9, Database.write, list[int]()

    def fail_at_first(database: Database, batch: Batch) -> int:
        sizes.append(len(batch))
        if len(sizes) == 1:
            raise sqlite3.OperationalError("database or disk is full")
        return write(database, batch)

    monkeypatch.setattr(Database, "write", fail_at_first)
    writer = Writer(tmp_path / "rows.db", SIZE, clock=lambda: now)
    for number in range(120):
        writer.record([outcome(number)])
        now += 3_600.0 if number % 10 == 9 else 1.0
    writer.start()
    until(lambda: writer.state.written == 120)
    writer.close()
    assert sizes[:2] == [120, 30]
    with closing(sqlite3.connect(tmp_path / "rows.db")) as file:
        assert file.execute("SELECT count FROM packs").fetchall() == [(10,)] * 12


def test_more_requests_than_a_pack_may_have_become_several(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "rows.db", SIZE)
    writer.record([outcome(number) for number in range(600)])
    writer.start()
    writer.close()
    with closing(sqlite3.connect(tmp_path / "rows.db")) as file:
        assert file.execute("SELECT count FROM packs").fetchall() == [(256,), (256,), (88,)]


def test_a_connection_that_forgot_a_namespace_gives_it_a_new_number(tmp_path: Path) -> None:
    with closing(Database(tmp_path / "rows.db", SIZE)) as database:
        database.write(batch_of(rows(5, namespace="a")))
        database.forget("a", 1.0)
        database.write(batch_of(rows(5, start=5, at=2.0, namespace="b")))
        database.write(batch_of(rows(5, start=10, at=2.0, namespace="a")))
        [numbers] = database.connection.execute("SELECT count(DISTINCT namespace) FROM packs").fetchall()
        assert numbers == (2,)
        assert (database.count("a"), database.count("b")) == (5, 5)
