"""The dashboard's file: what is written, how far it grows, and what leaves it."""

from __future__ import annotations

import json
import sqlite3
import stat
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from proxy.apps.dashboard import rows as module
from proxy.apps.dashboard.queries import Reader, Wanted
from proxy.apps.dashboard.rows import (
    DAY,
    HOUR,
    LONGEST_TEXT,
    MINUTE,
    MOST,
    REMEMBERED,
    SUMS,
    Recorded,
    Rows,
)
from proxy.apps.dashboard.savings import savings
from proxy.errors import DashboardFault
from proxy.telemetry.outcome import CacheMiss, Holdout, Kind, ToolUse
from tests.apps.dashboard.traffic import ended, outcome, sums

SIZE = 1 << 20
NOW = 1_800_000_000.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rows.db"


@pytest.fixture
def rows(path: Path) -> Iterator[Rows]:
    with closing(Rows(path, SIZE)) as opened:
        yield opened


@pytest.fixture
def reader(rows: Rows, path: Path) -> Iterator[Reader]:
    with closing(Reader(path)) as opened:
        yield opened


def count(rows: Rows, table: str, condition: str = "true") -> int:
    [found] = rows.connection.execute(f"SELECT count(*) FROM {table} WHERE {condition}").fetchone()
    return int(found)


def size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.parent.iterdir() if "wal" not in file.name)


def test_a_row_has_the_whole_outcome(rows: Rows, reader: Reader) -> None:
    errors = {"get:timeout": 2}
    one = outcome(
        3,
        words="Moved 3.",
        stream=True,
        tool_uses=(ToolUse("grep", "ok", 12),),
        store_errors=errors,
    )
    rows.write([Recorded(NOW, one, 5, [1, 2, 3])])
    [found] = reader.requests()
    told = json.loads(msgspec.json.encode(one))
    assert {name: found[name] or None for name in told} == {
        name: value or None for name, value in told.items()
    }
    assert (found["id"], found["time"], found["session"], found["kinds"]) == (
        1,
        NOW,
        f"{5:016x}",
        [1, 2, 3],
    )
    assert json.dumps(found)


def test_sums_are_those_of_the_rows_in_each_span(rows: Rows, reader: Reader) -> None:
    many = [
        Recorded(
            NOW + 7 * number,
            outcome(number, cost_before=10, cost_after=number % 20, prompt_tokens=3),
        )
        for number in range(1_000)
    ]
    for start in range(0, 1_000, 300):
        rows.write(many[start : start + 300])
    for span in (60, 3_600, 86_400):
        course = reader.sums("time", {name: name for name in SUMS}, span, NOW)
        assert [row["time"] for row in course] == sorted(
            {int(one.time // span * span) for one in many}
        )
        for name in ("requests", "cost_before", "cost_after"):
            whole = sum(getattr(one.outcome, name, 1) for one in many)
            assert sum(row[name] for row in course) == whole
    [found] = sums(reader, NOW)
    assert (found["requests"], found["prompt_tokens"], found["losses"]) == (1_000, 3_000, 450)


def test_a_plan_that_is_only_observed_counts_where_upstream_took_the_request(
    rows: Rows, reader: Reader
) -> None:
    """As in the metrics, a request that upstream refused would have got no other reply."""
    seen = [
        outcome(n, kind=Kind.OBSERVED, status=status, tokens_after=5)
        for n, status in enumerate((200, 500))
    ]
    rows.write([Recorded(NOW, one) for one in seen])
    [found] = sums(reader, NOW)
    assert (found["requests"], found["tokens_after"]) == (2, 5)


def test_a_session_adds_up_its_requests_and_shows_the_newest(rows: Rows, reader: Reader) -> None:
    for number, kind in enumerate((Kind.UNTOUCHED, Kind.OFFLOADED)):
        one = outcome(
            number,
            kind=kind,
            tokens_before=10 + number,
            tokens_after=9,
            compacted=number,
            new_event=True,
        )
        rows.write([Recorded(NOW + number, one, 7)])
    [found] = reader.sessions()
    assert (found["session"], found["requests"], found["events"], found["moved"]) == (
        f"{7:016x}",
        2,
        2,
        1,
    )
    assert (found["began"], found["last"], found["kind"]) == (NOW, NOW + 1, "offloaded")
    assert (found["tokens_before"], found["newest_before"], found["tokens_after"]) == (21, 11, 18)
    assert [row["tokens_before"] for row in reader.session("7")] == [10, 11]


def test_ids_are_never_given_twice(rows: Rows, reader: Reader) -> None:
    """A page asks for what came after the newest that it has."""
    rows.write(ended(3))
    rows.forget("acme-1", 100.0)
    rows.write(ended(2, at=200.0))
    assert [row["id"] for row in reader.requests()] == [5, 4]


@pytest.mark.parametrize(
    "name", ["\ud800", "m" * 1_000_000, "<b>\n\ndata: x\x00", "é" * 30_000], ids=lambda n: n[:5]
)
def test_a_name_that_a_client_chose_costs_no_row(name: str, rows: Rows, reader: Reader) -> None:
    hostile = outcome(1, model=name, path="/" + name, detail=name)
    rows.write([Recorded(0.0, one, 1) for one in (outcome(), hostile, outcome())])
    shown = [row["model"] for row in reader.requests()]
    assert [len(shown), shown[0], len(reader.session("1"))] == [3, "gpt-4.1-mini", 3]
    assert len(shown[1]) <= LONGEST_TEXT and json.dumps(shown).encode()
    assert {row["model"] for row in sums(reader, 0.0)} == set(shown)


def test_numbers_that_upstream_invents_are_bounded(rows: Rows, reader: Reader) -> None:
    many = {"prompt_tokens": 1 << 70, "cached_tokens": -1 << 70}
    rows.write([Recorded(NOW, outcome(n, **many), 1) for n in range(3)])
    [found] = sums(reader, NOW)
    assert (found["prompt_tokens"], found["cached_tokens"]) == (3 * MOST, -3 * MOST)


# -- its size --


def test_a_full_file_loses_its_oldest_rows(rows: Rows, reader: Reader, path: Path) -> None:
    for start in range(0, 9_000, 100):
        rows.write(ended(100, start))
        assert size(path) <= SIZE + (64 << 10)
    [newest, *_] = reader.requests()
    assert newest["request_id"] == outcome(8_999).request_id
    assert count(rows, "requests", "id < 100") == 0 < count(rows, "requests")
    assert (
        count(rows, "sessions", "last_id < (SELECT min(id) FROM requests)")
        == 0
        < count(rows, "sessions")
    )


def test_a_batch_fits_into_the_smallest_file_that_is_allowed(path: Path) -> None:
    with closing(Rows(path, 16 << 20)) as rows:
        for start in range(0, 8_000, 500):
            assert rows.write(ended(500, start, detail=2_000)) == 500


def test_details_are_kept_of_the_newest_requests(
    rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "DETAILED", 5)
    for start in range(0, 40, 10):
        rows.write(ended(10, start, detail=10))
    assert (count(rows, "details"), count(rows, "details", "id > 35")) == (5, 5)


def test_a_tenant_that_names_ever_new_models_and_keys_costs_the_others_nothing(
    rows: Rows, path: Path
) -> None:
    rows.write([Recorded(NOW, outcome(0, "acme-1"), 1)])
    for start in range(1, 3_000, 50):
        names = [
            (number, f"bulk-{number:016x}", f"model-{number}")
            for number in range(start, start + 50)
        ]
        rows.write(
            [Recorded(NOW + 1, outcome(n, name, model=model), n) for n, name, model in names]
        )
    assert size(path) <= SIZE + (64 << 10)
    rows.expire(lambda name: 1e9, NOW + 2)
    for span in (MINUTE, HOUR, DAY):
        assert count(rows, "sums", f"span = {span} AND namespace = 'acme-1'") == 1
        assert 50 < count(rows, "sums", f"span = {span}") <= SIZE // module.PAGE // 2, (
            "what there is room for stays"
        )


# -- what leaves --


def test_rows_leave_after_their_retention(rows: Rows, reader: Reader) -> None:
    for number, (namespace, at) in enumerate(
        (("old", 0.0), ("new", NOW - 300), ("short", NOW - 5 * DAY))
    ):
        rows.write(ended(20, 20 * number, at, namespace, detail=100))
    rows.expire(lambda name: DAY if name == "short" else 30.0 * DAY, NOW)
    assert {row["namespace"] for row in reader.requests()} == {"new"}
    assert [row["namespace"] for row in reader.sessions()] == ["new", "new"]
    assert [row["requests"] for row in sums(reader, 0.0)] == [20]
    assert (count(rows, "details"), count(rows, "sums", "namespace != 'new'")) == (20, 0)


def test_nothing_is_left_of_a_namespace_that_is_forgotten(rows: Rows, path: Path) -> None:
    rows.write(
        [
            *ended(20, at=NOW, namespace="gone-1", detail=100),
            *ended(20, 20, at=NOW, namespace="acme-1"),
        ]
    )
    assert (rows.count("gone-1"), rows.count("never-1")) == (20, None)
    rows.connection.execute("PRAGMA secure_delete = OFF")  # as in most builds of SQLite
    assert (rows.forget("gone-1", NOW + 30), rows.forget("never-1", NOW + 30)) == (20, 0)
    assert rows.count("gone-1") is None and rows.count("acme-1") == 20
    assert not any(b"gone-1" in file.read_bytes() for file in path.parent.iterdir()), (
        "nor in the log, while it is open"
    )


def test_another_process_writes_nothing_that_was_to_be_forgotten(rows: Rows, path: Path) -> None:
    with closing(Rows(path, SIZE)) as theirs:
        rows.write(ended(3, at=NOW))
        assert theirs.forget("acme-1", NOW + 5) == 3
        late = [
            *ended(4, 2, at=NOW),
            *ended(4, 2, at=NOW, namespace="acme-2"),
            *ended(2, 10, at=NOW),
        ]
        assert rows.write(late) == 6, "rows from before never come"
    assert (rows.count("acme-1"), rows.count("acme-2")) == (2, 4)
    rows.expire(lambda name: 1e9, NOW + 6 + REMEMBERED)
    assert count(rows, "forgotten") == 0


# -- opening it --


def test_what_is_no_file_of_a_dashboard_is_left_alone(path: Path) -> None:
    def somebody_elses(path: Path) -> None:
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("CREATE TABLE requests (id INTEGER)")

    makers: list[Callable[[Path], object]] = [
        somebody_elses, Path.mkdir, lambda path: path.symlink_to(path.with_name("elsewhere")),
        lambda path: path.write_bytes(b"This was never a database. " * 400),
    ]  # fmt: skip
    for number, make in enumerate(makers):
        make(one := path.with_name(str(number)))
        before = one.lstat().st_mode
        with pytest.raises(DashboardFault, match=str(one)):
            Rows(one, SIZE)
        assert one.lstat().st_mode == before


@pytest.mark.parametrize("value", [None, "text", 7])
def test_a_damaged_secret_is_a_fault_and_no_bug(value: object, rows: Rows) -> None:
    rows.connection.execute("UPDATE secret SET value = ?", (value,))
    with pytest.raises(DashboardFault, match="damaged"):
        rows.secret()


def test_the_file_is_its_owners_alone(rows: Rows, path: Path) -> None:
    rows.write(ended(1))
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()} == {0o600}


def test_the_log_of_a_file_that_was_removed_is_not_taken_for_that_of_a_new_one(
    rows: Rows, path: Path
) -> None:
    rows.write(ended(40, namespace="theirs-1"))
    assert path.with_name("rows.db-wal").stat().st_size > 0, "rows are in the log alone"
    path.unlink()
    with closing(Rows(path, SIZE)) as new, closing(Reader(path)) as reader:
        new.write(ended(1, namespace="later-1"))
        assert [row["namespace"] for row in reader.requests()] == ["later-1"]
        assert new.connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


# -- reading it --


def test_viewers_get_what_they_would_in_a_file_of_their_own(
    rows: Rows, reader: Reader, path: Path
) -> None:
    costs = {"holdout": Holdout.PLANNED, "miss": CacheMiss.FIRST, "cost_before": 9}
    mine, theirs = (
        [
            Recorded(NOW + n, outcome(n, of, cost_after=n, **costs), n // 10)
            for n in range(start, start + 15)
        ]
        for start, of in ((0, "mine-1"), (20, "theirs-1"))
    )

    def seen(reader: Reader) -> list[Any]:
        found = [
            reader.requests(),
            reader.request(1),
            reader.request(16),
            reader.latency(),
            reader.sessions(),
        ]
        found += [
            reader.session("0"),
            reader.session("3"),
            reader.names(),
            reader.any(),
            reader.namespaces(),
        ]
        return [*found, savings(reader, "month", NOW + 99, lambda tenant, model: None)]

    rows.write(mine)
    alone = seen(reader)
    rows.write(theirs)
    with closing(Reader(path, "mine-1")) as one:
        assert seen(one) == alone


def test_a_request_names_its_neighbours_in_the_session(rows: Rows, reader: Reader) -> None:
    rows.write(
        [Recorded(NOW, outcome(number), session) for number, session in enumerate((1, 2, 1, 1))]
    )
    found: list[Any] = [reader.request(id) for id in (1, 2, 3, 4)]
    assert [(one["previous"], one["next"]) for one in found] == [
        (None, 3),
        (None, None),
        (1, 4),
        (3, None),
    ]


def test_pages_go_on_where_the_last_one_ended(rows: Rows, reader: Reader) -> None:
    for start in range(0, 500, 100):
        rows.write(ended(100, start, at=NOW))
    found: list[int] = []
    while page := reader.requests(Wanted(offset=len(found))):
        found += [row["id"] for row in page]
    assert found == [*range(500, 0, -1)]
    assert [row["id"] for row in reader.requests(Wanted(after=498))] == [500, 499]


@pytest.mark.parametrize("written", [b"", b"\xc1", b"\x90"], ids=repr)
def test_a_description_that_is_damaged_hides_no_request(
    written: object, rows: Rows, reader: Reader
) -> None:
    rows.write(ended(2, detail=9))
    rows.connection.execute("UPDATE details SET detail = ? WHERE id = 2", (written,))
    shown: Any = reader.request(2)
    assert shown["request_id"] and shown["detail"] is None
