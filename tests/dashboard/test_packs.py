"""Rows come out of packs as they went in, in the order of their ids, whatever else has ids between theirs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from proxy.dashboard.batch import Batch
from proxy.dashboard.database import Database
from proxy.dashboard.packs import SPAN, Columns, Pack, PackedRow, entries, pack, with_sent
from proxy.dashboard.reader import PAGE, Reader
from proxy.dashboard.rows import STORED, Damaged, Seen, Sent, named, storable, together
from proxy.telemetry.outcome import Holdout, Outcome, ToolUse
from tests.dashboard.test_faults import SIZE, outcome
from tests.dashboard.traffic import apart

USES = (ToolUse("grep", "ok", 40),)
SENT = b"\x93\x90\x01\xc0"


def outcomes() -> list[Outcome]:
    """Requests that agree in most fields, with values of all kinds."""
    return [
        outcome(
            number,
            tool_uses=USES if number == 2 else (),
            holdout=Holdout.KEPT if number == 3 else Holdout.NONE,
            first_byte_seconds=None if number == 1 else 0.5,
            seconds=number / 7,
            words="größer" if number == 4 else "",
        )
        for number in range(5)
    ]


def packed(
    sessions: Sequence[int | None] = (1, 1, None, 7, 1),
    sent: Sequence[Sent] = (None,) * 5,
    places: Sequence[int] = range(5),
) -> Pack:
    _, table = storable(outcomes())
    return pack("acme-1", places, [1.0, 2.0, 3.0, 2.5, 9.0], table, sessions, sent)


def rows(kept: Pack, first: int = 1, only: int | None = None) -> list[PackedRow]:
    return entries(first + kept.places[0], 4, kept.sessions, kept.rows, kept.sent, only=only)


def test_rows_come_out_as_they_went_in() -> None:
    sent: list[Sent] = [b"one", None, ((1, 2, 3), 4, None, None, []), None, b"five"]
    found = rows(packed(sent=sent), 11)
    assert [(row.id, row.time, row.worker, row.session) for row in found] == [
        (11, 1.0, 4, 1), (12, 2.0, 4, 1), (13, 3.0, 4, None), (14, 2.5, 4, 7), (15, 9.0, 4, 1),
    ]  # fmt: skip
    assert [msgspec.convert(named(row.values), Outcome) for row in found] == outcomes()
    assert [row.sent for row in found] == [b"one", None, [[1, 2, 3], 4, None, None, []], None, b"five"]
    assert (packed().oldest, packed().newest, packed().sent) == (1.0, 9.0, b"")


def test_rows_of_one_session_are_found_alone() -> None:
    found = rows(packed(places=[3, 9, 10, 40, 200]), only=1)
    assert [(row.id, row.time, row.values[0]) for row in found] == [
        (4, 1.0, outcomes()[0].request_id), (10, 2.0, outcomes()[1].request_id), (201, 9.0, outcomes()[4].request_id),
    ]  # fmt: skip
    assert rows(packed(), only=8) == []
    assert len(rows(packed([8] * 5), only=8)) == 5 and len(packed([8] * 5).sessions) == 8
    assert [row.session for row in rows(packed([None] * 5))] == [None] * 5


def test_what_was_sent_may_be_known_later() -> None:
    kept = with_sent(packed(places=[3, 4, 5, 6, 8]), {4: b"late", 8: b"last", 7: b"another's"})
    assert [row.sent for row in rows(kept)] == [None, b"late", None, None, b"last"]
    again = with_sent(kept, {3: b"first"})
    assert [row.sent for row in rows(again)] == [b"first", b"late", None, None, b"last"]
    assert with_sent(again, {7: b"another's"}) is again


def test_rows_that_are_too_far_apart_are_no_pack() -> None:
    assert rows(packed(places=[0, 1, 2, 3, SPAN - 1]))
    with pytest.raises(ValueError, match="too far apart"):
        packed(places=[0, 1, 2, 3, SPAN])


@pytest.mark.parametrize(
    "change",
    [
        {"times": [1.0]},
        {"times": []},
        {"others": {3: []}},
        {"others": {3: [1] * 6}},
        {"places": [0, 1]},
        {"places": [0, 1, 2, 3, SPAN]},
        {"places": [-1, 1, 2, 3, 4]},
    ],
    ids=repr,
)
def test_what_somebody_else_wrote_is_damage(change: dict[str, Any]) -> None:
    kept = packed()
    columns = msgspec.structs.replace(msgspec.msgpack.decode(kept.rows, type=Columns), **change)
    with pytest.raises(Damaged):
        entries(1, 4, kept.sessions, msgspec.msgpack.encode(columns), kept.sent)


@pytest.mark.parametrize("sessions", [b"", b"1234567", bytes(16), bytes(48), "text", None])
def test_sessions_that_somebody_else_wrote_are_damage(sessions: Any) -> None:
    with pytest.raises(Damaged):
        entries(1, 4, sessions, packed().rows, b"")


def test_a_field_that_nobody_knows_is_left_out() -> None:
    columns = msgspec.msgpack.decode(packed().rows, type=Columns)
    later = msgspec.structs.replace(
        columns, values=[*columns.values, "new"], others={**columns.others, len(STORED): list("abcde"), 99: [0] * 5}
    )
    found = entries(1, 4, packed().sessions, msgspec.msgpack.encode(later), b"")
    assert [msgspec.convert(named(row.values), Outcome) for row in found] == outcomes()


def test_rows_of_many_namespaces_come_in_the_order_of_their_requests(tmp_path: Path) -> None:
    """Packs of different namespaces have ids between each other's, and pages divide them anywhere."""
    chance = random.Random(18)
    names = [f"acme-{chance.choice('aaaaabbbcd')}" for _ in range(3_000)]
    sessions = [chance.randrange(20) + 100 * ord(name[-1]) for name in names]
    path = tmp_path / "rows.db"
    with closing(Database(path, 8 * SIZE)) as database:
        start = 0
        while start < len(names):
            batch = Batch()
            for _ in range(chance.randrange(1, 5)):
                places = range(start, min(start + chance.choice((1, 3, 40, 128, SPAN)), len(names)))
                if places:
                    details = [b"x" if place % 7 == 0 else None for place in places]
                    seen = [Seen(sessions[place], SENT, one) for place, one in zip(places, details, strict=True)]
                    some = [outcome(place, names[place]) for place in places]
                    batch.add([1e9 + place for place in places], some, together(seen))
                start = places.stop
            assert database.write(batch) == len(batch)
        known = dict(database.connection.execute("SELECT name, id FROM namespaces"))
        owners = database.connection.execute("SELECT id, namespace FROM details ORDER BY id").fetchall()
        assert owners == [(place + 1, known[names[place]]) for place in range(0, len(names), 7)]
    with closing(Reader(path)) as reader:
        assert reader.newest() == len(names)
        for name in (None, "acme-a", "acme-d", "acme-x"):
            expected = [place + 1 for place in range(len(names)) if name in (None, names[place])][::-1]
            found, before = list[int](), 1 << 60
            while page := reader.before(before, name):
                assert len(page) <= PAGE
                assert [row["request_id"] for row in page] == [outcome(row["id"] - 1).request_id for row in page]
                found += [row["id"] for row in page]
                before = found[-1]
            assert found == expected
        for after in (0, 17, 2_990, 3_000):
            packs = reader.after(after)
            ids = sorted(row["id"] for rows in packs for row in apart(rows))
            assert ids == [*range(max(after, 3_000 - PAGE) + 1, 3_001)]
            assert [rows.id for rows in packs] == sorted(rows.id for rows in packs)
        for session in {*sessions}:
            ids = [place + 1 for place in range(len(names)) if sessions[place] == session]
            assert [row["id"] for row in reader.session(session)] == ids
        for id in chance.sample(range(1, 3_001), 50):
            row, own = reader.request(id), names[id - 1]
            assert row and (row["id"], row["namespace"], row["time"]) == (id, own, 1e9 + id - 1)
            assert reader.request(id, own) and not reader.request(id, "acme-x")
        assert reader.request(3_001) is None is reader.request(0)
    with closing(Database(path, 8 * SIZE)) as database:
        assert database.forget("acme-a", 2e9) == names.count("acme-a")
        assert database.expire(lambda name: 100.0 if name == "acme-b" else 1e9, 1e9 + 2_100) > 0
    with closing(Reader(path)) as reader:
        assert "acme-a" not in {row["namespace"] for row in reader.before(1 << 60)}
        packs = reader._rows("SELECT newest FROM packs WHERE namespace = ? ORDER BY last", known["acme-b"])
        assert 1e9 + 2_000 <= packs[0]["newest"] < 1e9 + 2_000 + SPAN, "a row may outlive its time by those of its pack"
