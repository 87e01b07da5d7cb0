"""A file that another version of the proxy began goes on being written, or makes place for a new one."""

from __future__ import annotations

import logging
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest

from bench.dashboard import batch_of
from proxy.dashboard import database as database_module
from proxy.dashboard import versions
from proxy.dashboard.database import Database, opened
from proxy.dashboard.reader import REQUESTS, Reader
from proxy.dashboard.rows import ADDED, DAY, HOUR, NO_ROW, STORED
from proxy.dashboard.versions import VERSION, aside
from proxy.dashboard.writer import Writer
from proxy.errors import DashboardFault
from proxy.telemetry.outcome import Outcome
from tests.dashboard.test_faults import SIZE, outcome, rows
from tests.dashboard.traffic import apart, until

OLDER = Path(__file__).with_name("older.sql")
"""A file of the first version, with a session of four requests, as `sqlite3 .dump` prints it."""


def older(path: Path, change: str = "") -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.executescript(OLDER.read_text() + change)


def upgraded(database: Database) -> Database:
    """Pack all rows of earlier versions, as the writer does by and by."""
    while database.upgrade():
        pass
    return database


def test_a_file_of_the_first_version_keeps_its_rows_and_gets_new_ones(tmp_path: Path) -> None:
    path = tmp_path / "rows.db"
    older(path)
    with closing(upgraded(opened(path, SIZE))) as database, closing(Reader(path)) as reader:
        before = reader.before(1 << 62)
        assert [row["tokens_before"] for row in before] == [587, 397, 207, 17]
        assert before[0]["new_event"] and all(row["cause"] == row["words"] == "" for row in before)
        [session] = reader.sessions()
        assert session["kind"] == before[0]["kind"]
        assert [row["kinds"] for row in reader.session(int(session["session"], 16))]
        shown = reader.request(4)
        assert shown and len(shown["detail"]["messages"]) == 8
        database.write(batch_of(rows(3, start=4, at=before[0]["time"])))
        assert len(reader.before(1 << 62)) == 7
        assert sum(row["requests"] for row in reader.sums(0.0)) == 7
        assert database.secret() == bytes(32), "logins stay valid"
    assert not aside(path).exists()
    Database(path, SIZE).close()


@pytest.mark.parametrize(
    "change",
    [
        "ALTER TABLE days DROP COLUMN rounds; ALTER TABLE hours DROP COLUMN cost_after;",
        "ALTER TABLE requests DROP COLUMN sent; ALTER TABLE sessions DROP COLUMN cost_before;",
        "DROP INDEX sessions_by_time; DROP TABLE hours; DROP TABLE details;",
        "DROP INDEX requests_by_namespace; CREATE INDEX requests_by_namespace ON requests (time);",
        "ALTER TABLE days ADD COLUMN later INTEGER NOT NULL DEFAULT 0; ALTER TABLE requests ADD COLUMN later TEXT;",
    ],
)
def test_what_a_file_lacks_is_added(change: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.db"
    older(path, change)
    for start in (4, 7):
        with closing(upgraded(opened(path, SIZE))) as database, closing(Reader(path)) as reader:
            database.write(batch_of(rows(3, start=start)))
            assert sum(row["requests"] for row in reader.sums(0.0)) == start + 3
            assert len(reader.before(1 << 62)) == start + 3
    assert not aside(path).exists()


@pytest.mark.parametrize(
    "change",
    [
        f"PRAGMA user_version = {VERSION + 1};",
        "PRAGMA user_version = 77;",
        "ALTER TABLE requests ADD COLUMN later INTEGER NOT NULL DEFAULT 0; DROP TABLE days;"
        "CREATE TABLE days (day INTEGER, tenant TEXT, PRIMARY KEY (day, tenant));",
        "DROP TABLE hours; CREATE TABLE hours (hour INTEGER PRIMARY KEY, namespace TEXT NOT NULL, more TEXT NOT NULL);",
    ],
)
def test_a_file_that_cannot_be_continued_is_set_aside(
    change: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "rows.db"
    aside(path).write_bytes(b"from the time before")
    older(path, change)
    with pytest.raises(DashboardFault):
        Database(path, SIZE)
    with caplog.at_level(logging.WARNING):
        opened(path, SIZE).close()
    assert str(aside(path)) in caplog.text
    with closing(opened(path, SIZE)) as database, closing(Reader(path)) as reader:
        assert reader.before(1 << 62) == []
        database.write(batch_of(rows(3)))
        assert len(reader.before(1 << 62)) == 3
    with closing(sqlite3.connect(aside(path))) as kept:
        assert kept.execute("SELECT count(*) FROM requests").fetchone() == (4,)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["rows.db", "rows.db.old"]
    versions.expire(path, time.time() - 30 * 86_400)
    assert aside(path).exists()
    versions.expire(path, time.time() + 1)
    assert not aside(path).exists()


MANY = """
WITH RECURSIVE number (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM number WHERE n < 1500)
INSERT INTO requests (id, time, namespace, session, worker, outcome, sent)
SELECT id + 4 * n, time, namespace, session, worker, outcome, sent FROM requests, number;
UPDATE requests SET outcome = x'90' WHERE id = 6;
UPDATE requests SET sent = 'text' WHERE id = 7;
UPDATE sessions SET last_id = 6004;
"""
"""Makes 6,004 rows of those four, two of which are damaged."""


def test_rows_of_earlier_versions_are_packed_beside_new_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.db"
    older(path, MANY)
    at_once = list[int]()
    write = Database.write
    monkeypatch.setattr(Database, "write", lambda self, batch: (at_once.append(self.older), write(self, batch))[1])
    writer = Writer(path, 16 << 20)
    for number in range(5):
        writer.record([outcome(number)])
    writer.start()
    with closing(Reader(path)) as reader:
        until(lambda: reader._rows("SELECT sum(count) AS count FROM packs")[0]["count"] == 6_004 - 2 + 5)
        writer.close()
        assert at_once[0], "new rows need not wait"
        assert [row["id"] for rows in reader.after(6_000) for row in apart(rows)] == [*range(6_001, 6_010)]
        assert [row["id"] for row in reader.before(10)] == [9, 8, 5, 4, 3, 2, 1]
        [theirs] = [one for one in reader.sessions() if one["last_id"] == 6_004]
        assert theirs["kind"] == "offloaded"
        assert len(reader.session(int(theirs["session"], 16))) == REQUESTS
        shown = reader.request(4)
        assert shown and len(shown["detail"]["messages"]) == 8
    with closing(Database(path, SIZE)) as database:
        assert not database.older and database.forget(theirs["namespace"], time.time()) == 6_002
        assert database.connection.execute("SELECT count(*) FROM details").fetchone() == (0,)


def test_a_namespace_is_forgotten_that_an_earlier_version_wrote(tmp_path: Path) -> None:
    path = tmp_path / "rows.db"
    older(path, MANY)
    with closing(opened(path, SIZE)) as database:
        [name] = database.connection.execute("SELECT name FROM namespaces").fetchone()
        assert (database.count(name), database.forget(name, time.time())) == (6_002, 6_002)
        assert database.count(name) is None
    assert name.encode() not in path.read_bytes()


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE requests SET outcome = x'90' WHERE id = 6004;",
        f"UPDATE requests SET id = {NO_ROW} WHERE id = 6004;",
        "UPDATE requests SET time = 0 WHERE id = 6004;",
    ],
)
def test_no_id_is_given_twice_whatever_becomes_of_the_newest_row(change: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.db"
    older(path, MANY + change)
    with closing(opened(path, 16 << 20)) as database, closing(Reader(path)) as reader:
        database.expire(lambda namespace: 86_400.0 * 365 * 50, 1.8e9)
        database.write(batch_of(rows(3)))
        upgraded(database)
        kept = 1 << 62
        found = list[int]()
        while page := reader.before(kept):
            found += [row["id"] for row in page]
            kept = found[-1]
        assert len(found) == len({*found}) >= 6_001 + 3
        assert [row["request_id"] for row in reader.before(1 << 62)[:3]] == [
            outcome(number).request_id for number in (2, 1, 0)
        ]


def test_a_process_of_an_earlier_version_writes_nothing_beside_this_one(tmp_path: Path) -> None:
    """Both would give the same ids."""
    path = tmp_path / "rows.db"
    older(path, MANY)
    with closing(sqlite3.connect(path)) as theirs, closing(opened(path, 16 << 20)) as database:
        assert database.older
        with pytest.raises(sqlite3.OperationalError, match="no such table"):
            theirs.execute("INSERT INTO requests SELECT id + 1, 1.0, 1, 1, 1, outcome, sent FROM requests WHERE id = 4")
        assert upgraded(database).count("default-b2a50bcec4999839") == 6_002


def test_nothing_is_left_in_free_pages_of_rows_that_were_packed_before_they_were_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "rows.db"
    older(path, MANY)
    with closing(opened(path, SIZE)) as database:
        database.connection.execute("PRAGMA secure_delete = OFF")  # as most builds of SQLite have it
        upgraded(database)
    with closing(opened(path, SIZE)) as database:
        [name] = database.connection.execute("SELECT name FROM namespaces").fetchone()
        assert database.forget(name, time.time()) == 6_002
    assert name.encode() not in path.read_bytes()


def test_a_full_file_of_an_earlier_version_loses_its_oldest_rows_only(tmp_path: Path) -> None:
    path = tmp_path / "rows.db"
    older(path, MANY)
    with closing(opened(path, 1 << 20)) as database:
        for start in range(0, 3_000, 100):
            database.write(batch_of(rows(100, start, at=time.time())))
        assert not database.older
    with closing(Reader(path)) as reader:
        newest = reader.before(1 << 62)
        assert newest[0]["request_id"] == outcome(2_999).request_id
        assert not reader.before(2)


def test_rows_that_are_too_old_leave_as_soon_as_they_are_packed(tmp_path: Path) -> None:
    path = tmp_path / "rows.db"
    older(path, MANY)
    writer = Writer(path, 16 << 20, lambda namespace: 3600.0, lambda: 2.0e9)
    writer.record([outcome(0)])
    writer.start()
    with closing(Reader(path)) as reader:
        until(lambda: not reader._rows("SELECT 1 FROM sqlite_master WHERE name = 'older'") and writer.state.written)
        for number in range(1, 4):  # each look for rows that are too old deletes some, after a batch
            writer.record([outcome(number)])
            writer.look()
            until(lambda number=number: writer.state.written == number + 1)
        writer.close()
        assert len(reader.before(1 << 62)) == 4


def test_rows_of_a_quiet_time_leave_when_each_of_them_is_too_old(tmp_path: Path) -> None:
    path, now = tmp_path / "rows.db", 2.0e9
    older(path, "DELETE FROM requests WHERE id > 1")
    with closing(sqlite3.connect(path)) as old:
        old.executemany(
            "INSERT INTO requests SELECT ?, ?, namespace, session, worker, outcome, sent FROM requests WHERE id = 1",
            ((number, now + 3 * HOUR * number) for number in range(2, 241)),
        )
        old.execute("DELETE FROM requests WHERE id = 1")
        old.commit()
    with closing(Database(path, 16 << 20)) as database:
        upgraded(database)
        database.expire(lambda namespace: DAY, now + 20 * DAY)
        [(oldest,)] = database.connection.execute("SELECT min(newest) FROM packs")
        assert now + 19 * DAY - HOUR <= oldest <= now + 19 * DAY + 3 * HOUR


def test_new_rows_do_not_wait_until_a_full_file_of_an_earlier_version_is_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.db"
    older(path, MANY)
    monkeypatch.setattr(database_module, "AT_ONCE", 2)
    with closing(opened(path, 1 << 20)) as database, closing(Reader(path)) as reader:
        database.write(batch_of(rows(3, at=time.time())))
        assert database.older and len(reader.before(1 << 62)) == 200
        assert database.connection.execute("SELECT count(*) FROM older").fetchone()[0] > 5_000


def test_a_file_of_an_earlier_version_is_packed_that_is_larger_than_allowed(tmp_path: Path) -> None:
    path = tmp_path / "rows.db"
    older(path, MANY)
    with closing(sqlite3.connect(path)) as old:  # four fill a page
        old.executemany("INSERT OR IGNORE INTO details VALUES (?, zeroblob(1012))", ((id,) for id in range(1, 6_005)))
        old.commit()
        old.execute("VACUUM")
    with closing(opened(path, 4 << 20)) as database, closing(Reader(path)) as reader:
        assert database.write(batch_of(rows(3, at=time.time()))) == 3
        upgraded(database)
        assert len(reader.before(1 << 62)) == 200
        assert database.used() <= database._full
        assert database._pragma("max_page_count") == max(1024, database._pragma("page_count"))


def test_a_file_that_another_version_still_writes_is_left_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "WAIT", 0.1)
    path = tmp_path / "rows.db"
    older(path, "PRAGMA user_version = 77;")
    with closing(sqlite3.connect(path)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(DashboardFault, match="another version"):
            opened(path, SIZE)
        other.execute("COMMIT")
        assert other.execute("SELECT count(*) FROM requests").fetchone() == (4,)
    assert not aside(path).exists()


def test_a_database_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "mine.db"
    with closing(sqlite3.connect(path)) as mine:
        mine.executescript("CREATE TABLE requests (id INTEGER); INSERT INTO requests VALUES (1);")
    before = path.read_bytes()
    with pytest.raises(DashboardFault, match="name another file"):
        opened(path, SIZE)
    assert path.read_bytes() == before


def test_fields_are_only_added_at_the_end_of_a_row() -> None:
    """A row is a list of values. `ADDED` may only grow at its end, and what it lacks must be what the file has."""
    assert set(STORED) == set(Outcome.__struct_fields__)
    assert ADDED[:2] == ("cause", "words") and STORED[40:42] == ADDED[:2]
    assert STORED[:3] == ("request_id", "tenant", "namespace") and STORED[39] == "first_byte_seconds"
