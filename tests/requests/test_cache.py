"""Every message is decoded and counted once, whoever sends it again."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from proxy import rawjson
from proxy.dialects import Dialect
from proxy.dialects.chat import CHAT
from proxy.dialects.render import originals_of
from proxy.plan.history import History, Naming, Terms, Transcript
from proxy.plan.plan import Message, Reading, Room
from proxy.plan.preview import Shape
from proxy.plan.summary import Mentions, Section, mentions
from proxy.plan.turn import Unplannable
from proxy.requests.cache import MessageCache
from proxy.threads import NEW, SMALL
from tests import written

READING = Reading(Shape("/s", 5), 100)
INLINE_BYTES = SMALL // NEW


def same(history: History) -> History:
    return history


async def history(reader: MessageCache, raws: Sequence[Raw], terms: Terms | None = None) -> History:
    """The history of a request with these messages."""
    body = b'{"model":"m","messages":%b}' % rawjson.array(raws)
    request = reader.request(CHAT, body)
    history, _ = await reader.history(CHAT, request, terms or TERMS, then=same)
    return history


class Counting:
    """A token for each character, and which texts it was asked for."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.threads: set[int] = set()

    def count(self, text: str, model: str = "") -> int:
        self.texts.append(text)
        self.threads.add(threading.get_ident())
        return len(text)

    def taken(self) -> set[str]:
        taken, self.texts = {text for text in self.texts if text}, []
        return taken


def raw(text: str, role: str = "user", **members: str) -> Raw:
    return Raw(json.dumps({"role": role, "content": text, **members}).encode())


async def test_only_what_is_new_is_counted() -> None:
    tokens = Counting()
    reader = MessageCache(tokens)
    first = await reader.read(CHAT, [raw("one"), raw("two"), raw("one")], READING, "m")
    assert [message.tokens for message in first] == [7, 7, 7]
    assert tokens.taken() == {"one", "two"}
    again = await reader.read(CHAT, [raw("one"), raw("three")], READING, "m")
    assert (again[0], again[1].tokens) == (first[0], 9)
    assert tokens.taken() == {"three"}
    assert reader.caches()["histories"]()[0] == 3


@pytest.mark.parametrize(
    ("reading", "model"),
    [(READING, "other"), (Reading(Shape("/t", 5), 100), "m"), (Reading(READING.shape, 9), "m")],
)
async def test_another_model_or_shape_is_read_anew(reading: Reading, model: str) -> None:
    tokens = Counting()
    reader = MessageCache(tokens)
    for how, which in ((READING, "m"), (reading, model)):
        await reader.read(CHAT, [raw("one")], how, which)
        assert tokens.taken() == {"one"}


async def test_a_little_is_read_at_once() -> None:
    tokens = Counting()
    await MessageCache(tokens).read(CHAT, [raw("one")], READING, "m")
    assert tokens.threads == {threading.get_ident()}


WORDS = st.sampled_from(["", "a", "bb " * 40, "word " * 400])
OFFLOAD = written.offload(max_total_tokens=500, max_tool_message_tokens=100, keep_views=1)
TERMS = Terms("m", OFFLOAD, Room(), 400)


@st.composite
def steps(draw: st.DrawFn) -> list[Raw]:
    """A user message and its answer, a call and its result, or a part of these that fits into no
    pair."""
    kind = draw(st.sampled_from("acbd"))
    if kind == "d":
        odd = (
            b'{"role":"function","name":"f"}',
            b'{"role":"user","content":7}',
            b'{"role":"assistant","content":{}}',
        )
        return [Raw(draw(st.sampled_from(odd)))]
    if kind == "a":
        return [raw(draw(WORDS)), raw(draw(WORDS), "assistant")]
    call = {
        "id": draw(st.sampled_from("cd")),
        "type": "function",
        "function": {"name": "look", "arguments": "{}"},
    }
    asks = Raw(
        json.dumps({"role": "assistant", "tool_calls": [call] * draw(st.integers(1, 2))}).encode()
    )
    result = raw(draw(WORDS), "tool", tool_call_id="c")
    return (
        [asks, result]
        if kind == "c"
        else draw(st.sampled_from([[asks], [result], [asks, raw("Oh."), result]]))
    )


@given(st.lists(st.lists(steps(), max_size=6), min_size=2, max_size=6), st.data())
def test_a_history_that_goes_on_is_what_it_were_read_at_once(
    parts: list[list[list[Raw]]], data: st.DataObject
) -> None:
    """Whatever came before: it goes on, begins anew, is cut short, or differs in the middle."""

    async def run() -> None:
        reader, raws = (
            MessageCache(Counting()),
            [raw("You are." * 600), raw("Begin."), raw("Yes?", "assistant")],
        )
        for part in parts:
            kept = data.draw(st.integers(3, len(raws)))
            raws = [*raws[:kept], *[one for step in part for one in step]]
            found = await history(reader, raws)
            assert seen(found) == seen(await history(MessageCache(Counting()), raws))

    def seen(past: History) -> tuple[object, ...]:
        return (
            past.messages,
            past.tools,
            past.links,
            past.items,
            past.irregular,
            past.tokens,
            past.plan(),
        )

    asyncio.run(run())


async def test_of_a_history_that_goes_on_only_the_new_is_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reader = MessageCache(Counting())
    raws = [
        raw(f"message {number} " * 99, "user" if number % 2 else "assistant")
        for number in range(101)
    ]
    read: list[int] = []
    measure = reader.read

    async def counted(
        dialect: Dialect, some: Sequence[Raw], reading: Reading, model: str, caller: str
    ) -> list[Message]:
        read.append(len(some))
        return await measure(dialect, some, reading, model, caller)

    monkeypatch.setattr(reader, "read", counted)
    for size in (3, 99, 99, 101, 100):
        await history(reader, raws[:size])
    await history(reader, raws, msgspec.structs.replace(TERMS, model="other"))
    await history(reader, raws)
    assert read == [3, 99, 0, 2, 100, 101, 0]


async def test_a_history_of_8_mb_is_known_again(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, grown = MessageCache(Counting()), list[int]()
    raws = [raw("x" * 2_000, "assistant" if number % 2 else "user") for number in range(4_000)]
    extended = History.extended

    def counted(history: History, messages: Sequence[Message]) -> History:
        grown.append(len(messages))
        return extended(history, messages)

    monkeypatch.setattr(History, "extended", counted)
    for size in (3_999, 4_000):
        await history(reader, raws[:size])
    assert grown == [3_999, 0, 1, 0]


@pytest.mark.parametrize("length", [1, INLINE_BYTES + 1])
async def test_what_is_no_message(length: int) -> None:
    with pytest.raises(Unplannable):
        await MessageCache(Counting()).read(CHAT, [Raw(b'"%b"' % (b"x" * length))], READING, "m")


async def test_a_compacted_message_is_made_once() -> None:
    reader = MessageCache(Counting())
    tool = raw("0123456789" * 50, "tool", tool_call_id="c")
    call = Raw(
        b'{"role":"assistant","tool_calls":[{"id":"c","type":"function","function":{"name":"f"}}]}'
    )
    [asked, message], _ = Naming().named(await reader.read(CHAT, [call, tool], READING, "m"))
    make = reader.previews(
        CHAT, Transcript([call, tool], [asked, message], ["", "f"]), READING.shape
    )
    made = make(1, False)
    assert json.loads(made)["content"].startswith("01234... (detailed result is stored in /s/f.")
    assert make(1, False) is made
    assert make(1, True) != made


async def test_tool_definitions_are_counted_once() -> None:
    tokens = Counting()
    reader = MessageCache(tokens)
    assert await reader.tool_tokens(None, "m") == 0
    for _ in range(2):
        assert await reader.tool_tokens(Raw(b"[{}]"), "m") == 4
    assert tokens.texts == ["[{}]"]


async def test_what_an_earlier_summary_read_is_not_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The newest texts count, up to a bound; each is read once, for one caller."""
    reader = MessageCache(Counting())
    raws = [raw(f"the code is alpha-100{number} {'x' * 1_000}") for number in range(9)]
    transcript = (await history(reader, raws)).transcript(raws)
    read: list[str] = []

    def counted(text: Section, breathe: Callable[[], None]) -> Mentions:
        read.append(text.text[12:22])
        return mentions(text, breathe)

    monkeypatch.setattr("proxy.requests.cache.mentions", counted)
    found = reader.mentions(CHAT, transcript, range(3), "acme-1")
    assert [dict(one.details)["alpha-1002"] for one in found[2:]] == ["the code is alpha-1002"]
    assert read == ["alpha-1002", "alpha-1001", "alpha-1000"]
    longer = reader.mentions(CHAT, transcript, range(5), "acme-1")
    assert (longer[:3], read[3:]) == (found, ["alpha-1004", "alpha-1003"])
    monkeypatch.setattr("proxy.requests.cache.READ_CHARS", 2_000)
    assert reader.mentions(CHAT, transcript, range(9), "acme-1") == [
        mentions(one) for index in (7, 8) for one in originals_of(CHAT, transcript, index)
    ]
    assert len(read) == 7
    assert reader.mentions(CHAT, transcript, range(1), "acme-2") == found[:1]
    assert len(read) == 8
