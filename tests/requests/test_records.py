"""What a request finds of what others wrote, in a real store."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.plan.message import ToolCall
from proxy.plan.recognise import Reply, Visible
from proxy.plan.turn import Hidden
from proxy.requests.records import PLACES, Records, sealed
from proxy.requests.summary_writer import Snapshot
from proxy.stores import open_store
from proxy.stores.guarded import Guarded

LINKS = {index: bytes([index]) * 16 for index in (2, 5, 8, 11)}
NOTHING = Visible("")
REPLIES = {index: Reply(b"before%d" % index, link, lambda: NOTHING) for index, link in LINKS.items()}
SNAPSHOT = Snapshot("the record", 3, "m")


@pytest.fixture
def store(tmp_path: Path) -> Guarded:
    return Guarded(open_store(str(tmp_path), lambda _: None), warn=lambda *_: None)


@pytest.fixture
def records(store: Guarded) -> Records:
    return Records(store.visit(), "tenant-caller")


def hidden(number: int, instead: bytes | None = None) -> Hidden:
    return Hidden((b'{"n" : %d}' % number,), instead, (b'{"after":1}',), (number, 0))


async def remember(records: Records, *indexes: int) -> None:
    for index in indexes:
        await records.remember(LINKS[index], "m", hidden(index))


async def test_every_round_is_found(records: Records) -> None:
    await remember(records, 2, 8)
    assert await records.rounds(REPLIES, "m") == {2: hidden(2), 8: hidden(8)}
    assert await records.rounds(REPLIES, "other") == {}
    assert await records.rounds({}, "m") == {}


async def test_bytes_come_back_as_they_were(records: Records) -> None:
    mixed = hidden(5, b'{"role" : "assistant","x":1.50}')
    await records.remember(LINKS[5], "m", mixed)
    assert await records.rounds(REPLIES, "m") == {5: mixed}


async def test_another_caller_finds_nothing(records: Records, store: Guarded) -> None:
    await remember(records, 2)
    await records.keep_snapshot("a", SNAPSHOT)
    other = Records(store.visit(), "tenant-other")
    assert await other.rounds(REPLIES, "m") == {}
    assert await other.snapshots(["a"]) == [None]


async def test_the_first_snapshot_wins(records: Records) -> None:
    first, second = (Snapshot(text, 1, "m") for text in ("first", "second"))
    assert await records.keep_snapshot("a", first) == first
    assert await records.keep_snapshot("a", second) == first
    assert [one and one.text for one in await records.snapshots(["a", "b"])] == ["first", None]


# --- replies that their clients have rewritten ------------------------------------------------------------------------

BEFORE = b"before the reply"


def seen(text: str, *calls: tuple[str, str]) -> Visible:
    """A reply with calls of `look`: id and arguments of each."""
    return Visible(text, tuple(ToolCall(id, "look", arguments) for id, arguments in calls))


def sent(visible: Visible, link: bytes = b"rewritten", before: bytes = BEFORE) -> dict[int, Reply]:
    return {2: Reply(before, link, lambda: visible)}


FIRST, SECOND = seen("Hm.", ("call_0", '{"a":1}')), seen("Well.", ("call_0", '{"a":1}'))
DROPPED = seen("", ("call_0", '{"a":1}'))


async def keep(records: Records, number: int, visible: Visible) -> None:
    await records.remember(bytes([number]) * 16, "m", hidden(number), [BEFORE], visible)


async def test_a_rewritten_reply_is_found_by_the_history_before_it(records: Records) -> None:
    await keep(records, 2, FIRST)
    [found] = (await records.rounds(sent(DROPPED), "m")).values()
    assert found == hidden(2)
    assert await records.rounds(sent(DROPPED), "other") == {}
    assert await records.rounds(sent(DROPPED, before=b"another"), "m") == {}
    assert await records.rounds(sent(SECOND), "m") == {}, "it is another reply to the same history"


async def test_two_samples_that_look_alike_once_rewritten_get_nothing(records: Records) -> None:
    await keep(records, 2, FIRST)
    await keep(records, 3, SECOND)
    assert await records.rounds(sent(DROPPED), "m") == {}
    for visible, number in ((FIRST, 2), (SECOND, 3)):
        [found] = (await records.rounds(sent(visible), "m")).values()
        assert found.before == hidden(number).before
        assert await records.rounds(sent(DROPPED, bytes([number]) * 16), "m") == {2: hidden(number)}, "as it was"


async def test_the_same_reply_twice_is_no_conflict(records: Records) -> None:
    for _ in range(6):
        await keep(records, 2, FIRST)
    assert len(await records.rounds(sent(DROPPED), "m")) == 1


async def test_two_samples_with_ids_of_their_own_are_told_apart(records: Records) -> None:
    ids = ("call_8fj3k2l9dkf0", "call_9dkf03jfk2l8")
    for number, id in enumerate(ids, 2):
        await keep(records, number, seen("Hm.", (id, "{}")))
    for number, id in enumerate(ids, 2):
        [found] = (await records.rounds(sent(seen("", (id, "{}"))), "m")).values()
        assert found.before == hidden(number).before


async def test_with_more_samples_than_places_none_is_taken_for_another(records: Records) -> None:
    for number in range(PLACES):
        await keep(records, number, seen("", (f"call_{number}", '{"a":1}')))
    assert await records.rounds(sent(seen("", ("call_0", '{"a":1}'))), "m") == {}


async def second() -> Visible:
    return SECOND


async def test_a_sample_that_hid_nothing_is_no_reason_to_give_it_the_rounds_of_another(records: Records) -> None:
    await keep(records, 2, FIRST)
    await records.contest(BEFORE, "m", second)
    assert await records.rounds(sent(DROPPED), "m") == {}
    assert await records.rounds(sent(SECOND), "m") == {}
    assert len(await records.rounds(sent(FIRST), "m")) == 1


async def test_a_sample_that_hid_nothing_and_came_first_is_not_forgotten(records: Records) -> None:
    await records.contest(BEFORE, "m", second)
    await keep(records, 2, FIRST)
    assert await records.rounds(sent(DROPPED), "m") == {}
    assert await records.rounds(sent(DROPPED, bytes([2]) * 16), "m") == {2: hidden(2)}, "as it was"


# --- replies behind a history that their clients have rewritten -------------------------------------------------------

IDS = ("call_8fj3k2l9dkf0aXz71mQe", "toolu_9dkf03jfk2l8bYw52nRf1q", "0f8fad5b-d9cb-469f-a165-70867728950e")
ARGUMENTS = '{"a":1}'


def changed(visible: Visible, preceding: str = "", index: int = 2) -> dict[int, Reply]:
    """The reply behind another history."""
    ids = tuple(call.id for call in visible.calls)
    return {index: Reply(b"another before %d" % index, b"link %d" % index, lambda: visible, ids, preceding)}


async def keep_alone(records: Records, number: int, visible: Visible, preceding: str = "") -> None:
    [reply] = changed(visible, preceding).values()
    await records.remember(
        bytes([number]) * 16, "m", hidden(number), [b"before %d" % number, *reply.anchors()], visible
    )


@pytest.mark.parametrize("id", IDS)
async def test_a_reply_is_found_by_the_id_of_its_call_alone(records: Records, id: str) -> None:
    await keep_alone(records, 2, seen("Hm.", (id, ARGUMENTS)))
    assert await records.rounds(changed(seen("", (id, ARGUMENTS))), "m") == {2: hidden(2)}
    assert await records.rounds(changed(seen("", (id, '{"a": 1, "all": true}'))), "m") == {2: hidden(2)}, "a default"
    assert await records.rounds(changed(seen("", (id, '{"a":2}'))), "m") == {}
    assert await records.rounds(changed(seen("", (id, ARGUMENTS))), "other") == {}


@pytest.mark.parametrize("id", ["call_0", "call_00000000000000000023", "functions.look:0", "D681PevKs", ""])
async def test_an_id_that_others_may_have_proves_nothing(records: Records, id: str) -> None:
    await keep_alone(records, 2, seen("Hm.", (id, ARGUMENTS)), preceding=id)
    assert await records.rounds(changed(seen("Hm.", (id, ARGUMENTS)), preceding=id), "m") == {}
    await keep_alone(records, 3, seen("Done."), preceding=id)
    assert await records.rounds(changed(seen("Done."), preceding=id), "m") == {}


async def test_a_text_is_found_by_the_call_before_it(records: Records) -> None:
    await keep_alone(records, 2, seen("<think>Hm.</think>Done it."), IDS[0])
    assert await records.rounds(changed(seen("Done  it.\n"), IDS[0]), "m") == {2: hidden(2)}
    for text, preceding in (("Done that.", IDS[0]), ("Done it.", IDS[1]), ("Done it.", "")):
        assert await records.rounds(changed(seen(text), preceding), "m") == {}


async def test_several_replies_in_one_have_all_their_rounds_before_it(records: Records) -> None:
    for number, id in enumerate(IDS, 2):
        await keep_alone(records, number, seen("Hm.", (id, ARGUMENTS)))
    merged = seen("", *((id, ARGUMENTS) for id in IDS))
    [round] = (await records.rounds(changed(merged), "m")).values()
    assert round.before == tuple(one for number in (2, 3, 4) for one in hidden(number).before)
    assert (round.instead, round.after) == (None, ())


async def test_a_reply_with_fewer_calls_has_its_round(records: Records) -> None:
    await keep_alone(records, 2, seen("", *((id, ARGUMENTS) for id in IDS)))
    assert await records.rounds(changed(seen("", (IDS[1], ARGUMENTS))), "m") == {2: hidden(2)}


async def test_no_round_is_put_back_twice(records: Records) -> None:
    visible = seen("", (IDS[0], ARGUMENTS))
    await keep_alone(records, 2, visible)
    both = changed(visible) | changed(visible, index=5)
    assert await records.rounds(both, "m") == {2: hidden(2)}


async def test_equal_ids_in_two_conversations_get_nothing(records: Records) -> None:
    for number in (2, 3):
        await keep_alone(records, number, seen("", (IDS[0], ARGUMENTS)))
    assert await records.rounds(changed(seen("", (IDS[0], ARGUMENTS))), "m") == {}
    assert await records.rounds({2: Reply(b"", bytes([3]) * 16, lambda: NOTHING)}, "m") == {2: hidden(3)}, "as it was"


CALLS = st.lists(st.tuples(st.sampled_from([*IDS, "call_0", "call_1"]), st.sampled_from(["{}", ARGUMENTS])), max_size=3)


@settings(max_examples=25)
@given(
    kept=st.lists(st.tuples(CALLS, st.sampled_from(["", "Done."])), max_size=5),
    asked=st.tuples(CALLS, st.sampled_from(["", "Done."])),
    preceding=st.sampled_from(["", "call_0", IDS[0]]),
)
async def test_a_round_belongs_to_a_reply_that_shares_what_nobody_else_has(
    kept: list[Any], asked: Any, preceding: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whatever is kept, forks with equal ids included: what is put back was hidden by a reply with the same call, or
    with the same text behind the same call, and no other reply with it hid anything else."""
    store = Guarded(open_store(str(tmp_path_factory.mktemp("store")), lambda _: None), warn=lambda *_: None)
    records = Records(store.visit(), "tenant-caller")
    for number, (calls, text) in enumerate(kept):
        await keep_alone(records, number, seen(text, *calls), preceding)
    found = await records.rounds(changed(seen(asked[1], *asked[0]), preceding), "m")
    numbers = {int(json.loads(raw)["n"]) for round in found.values() for raw in round.before}
    ids = [{id for id, _ in calls if id in IDS} for calls, _ in kept]
    for number in numbers:
        calls, text = kept[number]
        others = set[str]().union(*(ids[other] for other in range(len(kept)) if other != number))
        alone = ids[number] & {id for id, _ in asked[0]} - others
        said = not calls and not asked[0] and text == asked[1] and preceding in IDS
        assert alone or (said and [text for calls, text in kept if not calls].count(text) == 1)


# --- damage ---------------------------------------------------------------------------------------------------------

ASSISTANT = (
    b'{"role" : "assistant","content":"caf\xc3\xa9","tool_calls":[{"id":"c-1","type":"function",'
    b'"function":{"name":"grep","arguments":"{}"}}]}'
)
ANSWER = b'{"role":"tool","tool_call_id":"c-1","content":"found"}'
TURN = Hidden((ASSISTANT, ANSWER), None, (), (5, 2))
ROUND = b'{"before":[%b,%b],"instead":null,"after":[],"tokens":7,"sizes":[5,2],"earlier":[]}' % (ASSISTANT, ANSWER)
STORED = msgspec.json.encode(SNAPSHOT)


class Found(Guarded):
    """A folder as a store, into which damage is laid, and what was said of it."""

    def __init__(self, folder: Path) -> None:
        self.counted: list[str] = []
        self.warned: list[str] = []
        store = open_store(str(folder))
        super().__init__(store, warn=lambda _, text: self.warned.append(text), count_damaged=self.counted.append)
        self.folder = folder

    def lay(self, key: str, value: bytes) -> None:
        path = self.folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(value)


@pytest.fixture(scope="module")
def laid(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return Found(tmp_path_factory.mktemp("damaged"))


def damaged(value: bytes, where: float, bits: int | None) -> bytes:
    """One byte changed, or cut off there (None)."""
    at = min(int(where * len(value)), len(value) - 1)
    return value[:at] if bits is None else value[:at] + bytes([value[at] ^ bits]) + value[at + 1 :]


DAMAGE = given(where=st.floats(0, 1), bits=st.none() | st.integers(1, 255))


async def read_round(guarded: Guarded) -> dict[int, Hidden]:
    return await Records(guarded.visit(30), "tenant-caller").rounds({2: REPLIES[2]}, "m")


ROUND_KEY = f"tenant-caller/rounds/{LINKS[2].hex()}-{hashlib.sha256(b'm').hexdigest()[:8]}"


@DAMAGE
@settings(max_examples=3 * settings.default.max_examples)
def test_a_sealed_round_is_whole_or_absent(laid: Found, where: float, bits: int | None) -> None:
    laid.lay(ROUND_KEY, damaged(sealed(ROUND_KEY, ROUND), where, bits))
    laid.memory.forget(ROUND_KEY)
    before = len(laid.counted)
    assert asyncio.run(read_round(laid)) == {}
    assert laid.counted[before:] == ["rounds"]
    assert not (laid.folder / ROUND_KEY).exists(), "or it would keep a good one from being put"


@DAMAGE
def test_a_sealed_snapshot_is_whole_or_absent(laid: Found, where: float, bits: int | None) -> None:
    key = "tenant-caller/snapshots/a"
    laid.lay(key, damaged(sealed(key, STORED), where, bits))
    laid.memory.forget(key)

    async def read() -> None:
        records = Records(laid.visit(30), "tenant-caller")
        assert await records.snapshots(["a"]) == [None]
        assert await records.keep_snapshot("a", SNAPSHOT) == SNAPSHOT
        assert await records.snapshots(["a"]) == [SNAPSHOT]

    asyncio.run(read())
    assert (laid.folder / key).read_bytes() == sealed(key, STORED)


async def test_a_record_under_another_records_key_is_damaged(laid: Found) -> None:
    """As after a restore that mixed up files, or from someone who can write to the store."""
    other = ROUND_KEY.replace("tenant-caller", "tenant-another")
    laid.lay(ROUND_KEY, sealed(ROUND_KEY, ROUND))
    laid.memory.forget(ROUND_KEY)
    assert await read_round(laid) == {2: TURN}
    laid.lay(ROUND_KEY, sealed(other, ROUND))
    laid.memory.forget(ROUND_KEY)
    assert await read_round(laid) == {}
    assert ROUND_KEY in laid.warned[-1]


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"\xff{",
        b'{"text":"\xff","tokens":1,"model":"m"}',
        b'{"text":"a","tokens":1,"model":"m","x":' + b"[" * 100_000,
        b'{"text":"a","tokens":1,"model":"m","x":1}',
    ],
)
async def test_what_is_no_snapshot(laid: Found, value: bytes) -> None:
    laid.lay("tenant-caller/snapshots/b", value)
    assert await Records(laid.visit(), "tenant-caller").snapshots(["b"]) == [None]
    assert "tenant-caller/snapshots/b" in laid.warned[-1]


async def test_a_whole_record_of_a_later_version_is_left_alone(laid: Found) -> None:
    value = sealed("tenant-caller/snapshots/later", b'{"words":["other"]}')
    laid.lay("tenant-caller/snapshots/later", value)
    before = len(laid.counted)
    assert await Records(laid.visit(), "tenant-caller").snapshots(["later"]) == [None]
    assert (laid.folder / "tenant-caller/snapshots/later").read_bytes() == value
    assert len(laid.counted) == before


# --- originals ----------------------------------------------------------------------------------------------------


async def at_once(work: Callable[[], bytes]) -> bytes:
    return work()


async def test_originals_are_kept_with_half_surrogate_pairs(records: Records, tmp_path: Path) -> None:
    await records.keep_originals("these", {"x.txt": lambda: "a\ud83d"}, at_once)
    assert _bytes_of(tmp_path, "x.txt").startswith("a\ud83d".encode("utf-8", "surrogatepass"))
    assert await records.original("x.txt") == "a\ud83d"


def _spoil(folder: Path, one: str, other: str) -> None:
    """Give the first file the second one's content, and change that."""
    [file], [another] = (list(folder.rglob(f"*{name}*")) for name in (one, other))
    file.write_bytes(another.read_bytes())
    another.write_bytes(another.read_bytes().replace(b"ho", b"no"))


async def test_messages_behind_a_summary_that_were_changed_are_not_read(records: Records, tmp_path: Path) -> None:
    """Neither are those of another summary under this name."""
    one, other = (f"compressed_group_{number:016x}.txt" for number in (1, 2))
    await records.keep_originals("these", {one: lambda: "### 1 user\nhi\n", other: lambda: "### 1 user\nho"}, at_once)
    assert await records.original(one) == "### 1 user\nhi\n"
    _spoil(tmp_path, one, other)
    later = Records(Guarded(open_store(str(tmp_path)), warn=lambda *_: None).visit(), "tenant-caller")
    assert [await later.original(name) for name in (one, other)] == [None, None]


async def test_originals_are_looked_at_again_until_all_are_kept(store: Guarded) -> None:
    broken, records = Records(store.visit(0), "tenant-caller"), Records(store.visit(), "tenant-caller")
    await broken.keep_originals("these", {"x.txt": lambda: "a"}, at_once)
    assert not records.has_originals("these")
    await records.keep_originals("these", {"x.txt": lambda: "a"}, at_once)
    assert records.has_originals("these") and not records.has_originals("others")


async def test_a_store_that_is_broken_is_empty_and_counted(store: Guarded) -> None:
    records = Records(store.visit(0), "tenant-caller")
    assert await records.snapshots(["a"]) == [None]
    assert await records.rounds(REPLIES, "m") == {}
    assert await records.keep_snapshot("a", SNAPSHOT) == SNAPSHOT, "this process keeps it"
    assert set(records.errors) == {"get:budget", "put:budget"}


def _bytes_of(folder: Path, name: str) -> bytes:
    [found] = [path for path in folder.rglob(name) if path.is_file()]
    return found.read_bytes()
