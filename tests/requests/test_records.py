"""What a request finds of what others wrote, in a real store."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.dialects.entries import marks
from proxy.errors import StoreFault
from proxy.plan.history import extend
from proxy.plan.plan import ToolCall
from proxy.plan.recognise import Hidden, Reply, Visible
from proxy.requests.records import PLACES, Records, sealed
from proxy.requests.summary_writer import Snapshot
from proxy.stores import open_store
from proxy.stores.guarded import CHANGES, Guarded

MODEL = "m"
BEFORE, LINK = b"before the reply", b"rewritten"
NOTHING = Visible("")
SNAPSHOT = Snapshot("the record", 3, MODEL)


@pytest.fixture
def store(tmp_path: Path) -> Guarded:
    return Guarded(open_store(str(tmp_path), lambda _: None), warn=lambda *_: None)


@pytest.fixture
def records(store: Guarded) -> Records:
    return Records(store.visit(), "tenant-caller")


def hidden(number: int, instead: bytes | None = None, model: str = MODEL) -> Hidden:
    return Hidden((b'{"n" : %d}' % number,), instead, (b'{"after":1}',), (number, 0), "chat", model)


def link(number: int) -> bytes:
    return bytes([number]) * 16


def reply(
    visible: Visible = NOTHING, link: bytes = LINK, before: bytes = BEFORE, preceding: str = ""
) -> Reply:
    """A reply; `preceding` is the id of the call before it."""
    ids = tuple(call.id for call in visible.calls if call.id)
    last = marks([ToolCall(preceding, "look", ARGUMENTS)])
    return Reply(before, link, lambda: visible, ids, marks(visible.calls), last[0] if last else b"")


async def rounds_of(
    records: Records, replies: Mapping[int, Reply], model: str
) -> dict[int, list[Hidden]]:
    """The hidden rounds of a history's replies, of which nothing was sought before."""
    found, _ = await records.rounds(replies, model, records.still_there(None))
    return found


async def keep(records: Records, number: int, of: Reply, model: str = MODEL) -> None:
    places = [link(number), of.before, *of.anchors()]
    await records.remember(hidden(number, model=model), places, of.visible())


async def test_a_round_is_found_as_it_was_by_its_caller_alone(
    records: Records, store: Guarded
) -> None:
    mixed = hidden(5, b'{"role" : "assistant","x":1.50}')
    await records.remember(mixed, [link(5)], NOTHING)
    await keep(records, 8, reply())
    asked = {index: reply(before=b"%d" % index, link=link(index)) for index in (2, 5, 8, 11)}
    assert await rounds_of(records, asked, MODEL) == {5: [mixed], 8: [hidden(8)]}
    assert await rounds_of(records, {}, MODEL) == {}
    assert await rounds_of(Records(store.visit(), "tenant-other"), asked, MODEL) == {}


async def test_half_a_surrogate_pair_beside_backslashes_changes_nothing(records: Records) -> None:
    """A client that rewrites its history sends the reply as it saw it."""
    mixed = Hidden((rb'{"n":"\ud800 \\ C:"}',), None, (), (1,), "chat", r"C:\models\m")
    visible = seen(r"It is in C:\temp.", "call_0", arguments=r'{"path":"C:\\temp\n"}')
    places = reply(visible)
    await records.remember(mixed, [link(1), places.before], visible)
    asked = {1: reply(visible)}
    assert await rounds_of(records, asked, MODEL) == {1: [mixed]}


async def test_the_first_snapshot_wins(records: Records) -> None:
    first, second = (Snapshot(text, 1, MODEL) for text in ("first", "second"))
    assert await records.keep_snapshot("a", first) == first
    assert await records.keep_snapshot("a", second) == first
    assert [one and one.text for one in await records.read(Snapshot, ["a", "b"])] == ["first", None]


# --- replies that their clients have rewritten ----------------------------------------------------

IDS = (
    "call_8fj3k2l9dkf0aXz71mQe",
    "toolu_9dkf03jfk2l8bYw52nRf1q",
    "0f8fad5b-d9cb-469f-a165-70867728950e",
)
SHORT = ("call_8fj3k2l9dkf0", "call_9dkf03jfk2l8")
POOR = ("call_0", "call_00000000000000000023", "functions.look:0", "D681PevKs", "")
ARGUMENTS = '{"a":1}'


def seen(text: str, *ids: str, arguments: str = ARGUMENTS) -> Visible:
    """A reply with calls of `look`."""
    return Visible(text, tuple(ToolCall(id, "look", arguments) for id in ids))


FIRST, SECOND, DROPPED = seen("Hm.", "call_0"), seen("Well.", "call_0"), seen("", "call_0")

Case = tuple[list[Visible], Visible, list[int]]
"""The replies with rounds, one that a client sends, and the numbers of the rounds that it gets."""
BY_HISTORY: dict[str, Case] = {
    "its text is gone": ([FIRST], DROPPED, [1]),
    "another reply to the same history": ([FIRST], SECOND, []),
    "two samples that look alike once rewritten": ([FIRST, SECOND], DROPPED, []),
    "the first of two samples": ([FIRST, SECOND], FIRST, [1]),
    "the second of two samples": ([FIRST, SECOND], SECOND, [2]),
    "the same reply twice": ([FIRST] * 6, DROPPED, [1]),
    "a sample with an id of its own": ([seen("Hm.", id) for id in SHORT], seen("", SHORT[1]), [2]),
    "more samples than places": (
        [seen("", f"call_{n}") for n in range(PLACES)],
        seen("", "call_0"),
        [],
    ),
}
BY_ITSELF: dict[str, Case] = {
    **{f"by {id}": ([seen("Hm.", id)], seen("", id), [1]) for id in IDS},
    **{f"not by {id} alone": ([seen("Hm.", id)], seen("Hm.", id), []) for id in POOR},
    "a default was added": (
        [seen("", IDS[0])],
        seen("", IDS[0], arguments='{"a": 1, "all": true}'),
        [1],
    ),
    "another call": ([seen("", IDS[0])], seen("", IDS[0], arguments='{"a":2}'), []),
    "several replies in one": ([seen("Hm.", id) for id in IDS], seen("", *IDS), [1, 2, 3]),
    "fewer calls": ([seen("", *IDS)], seen("", IDS[1]), [1]),
    "two conversations with equal ids": (
        [seen("", IDS[0]), seen("Hm.", IDS[0])],
        seen("", IDS[0]),
        [],
    ),
}


@pytest.mark.parametrize("name", [*BY_HISTORY, *BY_ITSELF])
async def test_a_rewritten_reply_gets_its_own_round_or_none(name: str, records: Records) -> None:
    same = name in BY_HISTORY
    kept, asked, found = (BY_HISTORY | BY_ITSELF)[name]
    for place, visible in enumerate(kept):
        await keep(
            records,
            kept.index(visible) + 1,
            reply(visible, before=BEFORE if same else b"before %d" % place),
        )
    rounds = await rounds_of(records, {2: reply(asked)}, MODEL)
    assert rounds == ({2: list(map(hidden, found))} if found else {})
    assert await rounds_of(records, {2: reply(asked)}, "other") == rounds, (
        "another model gets it, too"
    )
    assert await rounds_of(records, {2: reply(asked, link(1))}, MODEL) == {2: [hidden(1)]}, (
        "as it was"
    )


@pytest.mark.parametrize("first", ["the round", "the reply without one"])
async def test_a_reply_that_hid_nothing_never_gets_the_round_of_another(
    first: str, records: Records
) -> None:
    if first == "the round":
        await keep(records, 1, reply(FIRST))
    await records.contest([BEFORE], SECOND)
    if first != "the round":
        await keep(records, 1, reply(FIRST))
    assert await rounds_of(records, {2: reply(DROPPED)}, MODEL) == {}
    assert await rounds_of(records, {2: reply(SECOND)}, MODEL) == {}
    assert await rounds_of(records, {2: reply(DROPPED, link(1))}, MODEL) == {2: [hidden(1)]}, (
        "as it was"
    )


async def test_a_text_is_found_by_the_call_before_it(records: Records) -> None:
    await keep(
        records, 2, reply(seen("<think>Hm.</think>Done it."), before=b"other", preceding=IDS[0])
    )
    assert await rounds_of(records, {2: reply(seen("Done  it.\n"), preceding=IDS[0])}, MODEL) == {
        2: [hidden(2)]
    }
    for text, preceding in (("Done that.", IDS[0]), ("Done it.", IDS[1]), ("Done it.", "")):
        assert await rounds_of(records, {2: reply(seen(text), preceding=preceding)}, MODEL) == {}
    await keep(records, 3, reply(seen("Done."), before=b"third", preceding="call_0"))
    assert await rounds_of(records, {2: reply(seen("Done."), preceding="call_0")}, MODEL) == {
        2: [hidden(3)]
    }
    await keep(records, 4, reply(seen("Done."), before=b"fourth", preceding="call_0"))
    assert await rounds_of(records, {2: reply(seen("Done."), preceding="call_0")}, MODEL) == {}, (
        "two fit"
    )


async def test_no_round_is_put_back_twice(records: Records) -> None:
    await keep(records, 2, reply(seen("", IDS[0])))
    both = {index: reply(seen("", IDS[0]), before=b"another", link=link(index)) for index in (3, 5)}
    assert await rounds_of(records, both, MODEL) == {3: [hidden(2)]}


CALLS = st.lists(
    st.tuples(st.sampled_from([*IDS, "call_0", "call_1"]), st.sampled_from(["{}", ARGUMENTS])),
    max_size=3,
)


@settings(max_examples=25)
@given(
    kept=st.lists(st.tuples(CALLS, st.sampled_from(["", "Done."])), max_size=5),
    asked=st.tuples(CALLS, st.sampled_from(["", "Done."])),
    preceding=st.sampled_from(["", "call_0", IDS[0]]),
)
async def test_a_round_belongs_to_a_reply_that_shares_what_nobody_else_has(
    kept: list[Any], asked: Any, preceding: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whatever is kept, forks with equal ids included: what is put back was hidden by a reply with
    the same call, or with the same text behind the same call, and no other reply with it hid
    anything else."""

    def made(text: str, calls: list[Any]) -> Visible:
        return Visible(text, tuple(ToolCall(id, "look", arguments) for id, arguments in calls))

    store = Guarded(
        open_store(str(tmp_path_factory.mktemp("store")), lambda _: None), warn=lambda *_: None
    )
    records = Records(store.visit(), "tenant-caller")
    for number, (calls, text) in enumerate(kept):
        await keep(
            records,
            number,
            reply(made(text, calls), before=b"before %d" % number, preceding=preceding),
        )
    found = await rounds_of(
        records, {2: reply(made(asked[1], asked[0]), preceding=preceding)}, MODEL
    )
    numbers = {
        int(json.loads(raw)["n"]) for ones in found.values() for one in ones for raw in one.before
    }
    anchors = [set(reply(made(text, calls), preceding=preceding).anchors()) for calls, text in kept]
    wanted = set(reply(made(asked[1], asked[0]), preceding=preceding).anchors())
    for number in numbers:
        others = set[bytes]().union(*anchors[:number], *anchors[number + 1 :])
        assert anchors[number] & wanted - others


# --- damage ---------------------------------------------------------------------------------------

ASSISTANT = (
    b'{"role" : "assistant","content":"caf\xc3\xa9","tool_calls":[{"id":"c-1","type":"function",'
    b'"function":{"name":"grep","arguments":"{}"}}]}'
)
ANSWER = b'{"role":"tool","tool_call_id":"c-1","content":"found"}'
TURN = Hidden((ASSISTANT, ANSWER), None, (), (3, 4), "chat", MODEL)
ROUND = (
    b'{"before":[%b,%b],"instead":null,"after":[],"sizes":[3,4],"visible":{"text":"","calls":[]},'
    b'"api":"chat","model":"m"}' % (ASSISTANT, ANSWER)
)


class Found(Guarded):
    """A folder as a store, into which damage is laid, and what was said of it."""

    def __init__(self, folder: Path) -> None:
        self.counted: list[str] = []
        self.warned: list[str] = []
        store = open_store(str(folder))
        super().__init__(
            store, warn=lambda _, text: self.warned.append(text), count_damaged=self.counted.append
        )
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


async def read_round(guarded: Guarded) -> dict[int, list[Hidden]]:
    return await rounds_of(
        Records(guarded.visit(30), "tenant-caller"), {2: reply(link=link(2))}, MODEL
    )


ROUND_KEY = f"tenant-caller/rounds/{extend(link(2), b'place 0').hex()}"


@given(where=st.floats(0, 1), bits=st.none() | st.integers(1, 255))
def test_a_sealed_round_is_whole_or_absent(laid: Found, where: float, bits: int | None) -> None:
    laid.lay(ROUND_KEY, damaged(sealed(ROUND_KEY, ROUND), where, bits))
    laid.memory.forget(ROUND_KEY)
    before = len(laid.counted)
    assert asyncio.run(read_round(laid)) == {}
    assert laid.counted[before:] == ["rounds"]
    assert not (laid.folder / ROUND_KEY).exists(), "or it would keep a good one from being put"


async def test_a_record_under_another_records_key_is_damaged(laid: Found) -> None:
    """As after a restore that mixed up files, or from someone who can write to the store."""
    other = ROUND_KEY.replace("tenant-caller", "tenant-another")
    laid.lay(ROUND_KEY, sealed(ROUND_KEY, ROUND))
    laid.memory.forget(ROUND_KEY)
    assert await read_round(laid) == {2: [TURN]}
    laid.lay(ROUND_KEY, sealed(other, ROUND))
    laid.memory.forget(ROUND_KEY)
    assert await read_round(laid) == {}
    assert ROUND_KEY in laid.warned[-1]


async def test_a_whole_record_of_a_later_version_is_left_alone(laid: Found) -> None:
    value = sealed("tenant-caller/snapshots/later", b'{"words":["other"]}')
    laid.lay("tenant-caller/snapshots/later", value)
    before = len(laid.counted)
    assert await Records(laid.visit(), "tenant-caller").read(Snapshot, ["later"]) == [None]
    assert (laid.folder / "tenant-caller/snapshots/later").read_bytes() == value
    assert len(laid.counted) == before


# --- originals ------------------------------------------------------------------------------------


async def at_once(work: Callable[[], bytes]) -> bytes:
    return work()


async def test_originals_are_kept_with_half_surrogate_pairs(
    records: Records, tmp_path: Path
) -> None:
    await records.keep_originals("these", {"x.txt": lambda: "a\ud83d"}, at_once)
    assert _bytes_of(tmp_path, "x.txt").startswith("a\ud83d".encode("utf-8", "surrogatepass"))
    assert await records.original("x.txt") == "a\ud83d"


def _spoil(folder: Path, one: str, other: str) -> None:
    """Give the first file the second one's content, and change that."""
    [file], [another] = (list(folder.rglob(f"*{name}*")) for name in (one, other))
    file.write_bytes(another.read_bytes())
    another.write_bytes(another.read_bytes().replace(b"ho", b"no"))


async def test_messages_behind_a_summary_that_were_changed_are_not_read(
    records: Records, tmp_path: Path
) -> None:
    """Neither are those of another summary under this name."""
    one, other = (f"compressed_group_{number:016x}.txt" for number in (1, 2))
    await records.keep_originals(
        "these", {one: lambda: "### 1 user\nhi\n", other: lambda: "### 1 user\nho"}, at_once
    )
    assert await records.original(one) == "### 1 user\nhi\n"
    _spoil(tmp_path, one, other)
    later = Records(
        Guarded(open_store(str(tmp_path)), warn=lambda *_: None).visit(), "tenant-caller"
    )
    assert [await later.original(name) for name in (one, other)] == [None, None]


async def test_originals_are_looked_at_again_until_all_are_kept(
    store: Guarded, records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store.store, "put", AsyncMock(side_effect=StoreFault("full")))
    assert not await records.keep_originals("these", {"x.txt": lambda: "a"}, at_once)
    assert not records.has_originals("these")
    monkeypatch.undo()
    assert await records.keep_originals("these", {"x.txt": lambda: "a"}, at_once)
    assert records.has_originals("these") and not records.has_originals("others")


async def test_a_store_that_is_broken_is_empty_and_counted(store: Guarded) -> None:
    records = Records(store.visit(0), "tenant-caller")
    assert await records.read(Snapshot, ["a"]) == [None]
    assert await rounds_of(records, {2: reply()}, MODEL) == {}
    assert await records.keep_snapshot("a", SNAPSHOT) == SNAPSHOT, "this process keeps it"
    assert set(records.errors) == {"get:budget", "put:budget"}


def _bytes_of(folder: Path, name: str) -> bytes:
    [found] = [path for path in folder.rglob(name) if path.is_file()]
    return found.read_bytes()


# -- what was sought before ------------------------------------------------------------------------


async def test_what_was_sought_holds_until_this_process_puts_what_was_looked_for(
    store: Guarded,
) -> None:
    records = Records(store.visit(), "tenant-caller")
    asked = {1: reply(link=link(1), before=link(0)), 3: reply(link=link(3), before=link(2))}
    _, sought = await records.rounds(asked, MODEL, records.still_there(None))
    sought = sought.ending(4, {})
    others = Records(store.visit(), "tenant-other")
    await keep(others, 3, asked[3])
    await keep(records, 5, reply(link=link(5), before=link(4)))
    again = records.still_there(sought)
    assert (again.upto, again.wanted) == (4, sought.wanted)
    assert others.still_there(sought).upto == 0, "another caller's"
    await keep(records, 3, asked[3])
    anew = records.still_there(again)
    assert (anew.upto, anew.wanted, anew.rounds) == (0, set(), {})
    found, _ = await records.rounds(asked, MODEL, anew)
    assert found == {3: [hidden(3)]}


async def test_what_was_sought_before_too_many_records_is_sought_anew(store: Guarded) -> None:
    records = Records(store.visit(), "tenant-caller")
    _, sought = await records.rounds({1: reply()}, MODEL, records.still_there(None))
    sought = sought.ending(2, {})
    for number in range(CHANGES):
        store.memory.changed(f"tenant-caller/rounds/{number}")
    assert records.still_there(sought).upto == 2
    store.memory.changed("tenant-caller/rounds/one more")
    assert records.still_there(sought).upto == 0
    assert records.still_there(records.still_there(None)).upto == 0


async def test_a_reply_that_its_history_does_not_identify_is_sought_each_time(
    records: Records,
) -> None:
    """More records may be found of it later, by whatever process."""
    for number, model in ((1, MODEL), (3, "other")):
        await keep(records, number, reply(link=link(number), before=link(number - 1)), model)
    asked = {at: reply(link=link(at), before=link(at - 1)) for at in (1, 3, 5)}
    found, sought = await records.rounds(asked, MODEL, records.still_there(None))
    assert found == {1: [hidden(1)], 3: [hidden(3, model="other")]}
    assert sought.upto == 3
    kept = sought.ending(3, {1: hidden(1)})
    assert list(kept.used.values()) == [1]
    again, _ = await records.rounds({3: asked[3]}, MODEL, kept)
    assert again == {3: [hidden(3, model="other")]}
    twice, _ = await records.rounds({7: asked[1]}, MODEL, kept)
    assert twice == {}, "each is put back once"
