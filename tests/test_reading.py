"""Every message is decoded and counted once, whoever sends it again."""

from __future__ import annotations

import json

import pytest
from msgspec import Raw

from proxy.core.compact import Shape
from proxy.core.transcript import Reading, Transcript, Unplannable
from proxy.reading import INLINE_BYTES, Reader

READING = Reading(Shape("/s", 5, 0), 100)


class Counting:
    """A token for each character, and which texts it was asked for."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def count(self, text: str, model: str = "") -> int:
        self.texts.append(text)
        return len(text)

    def taken(self) -> set[str]:
        taken, self.texts = {text for text in self.texts if text}, []
        return taken


def raw(text: str, role: str = "user", **members: str) -> Raw:
    return Raw(json.dumps({"role": role, "content": text, **members}).encode())


async def test_only_what_is_new_is_counted() -> None:
    tokens = Counting()
    reader = Reader(tokens)
    first = await reader.read([raw("one"), raw("two"), raw("one")], READING, "m")
    assert [message.tokens for message in first] == [7, 7, 7]
    assert tokens.taken() == {"one", "two"}
    again = await reader.read([raw("one"), raw("three")], READING, "m")
    assert (again[0], again[1].tokens) == (first[0], 9)
    assert tokens.taken() == {"three"}
    assert reader.sizes()["messages"][0] == 3


@pytest.mark.parametrize(
    ("reading", "model"), [(READING, "other"), (Reading(Shape("/t", 5, 0), 100), "m"), (Reading(READING.shape, 9), "m")]
)
async def test_another_model_or_shape_is_read_anew(reading: Reading, model: str) -> None:
    tokens = Counting()
    reader = Reader(tokens)
    for how, which in ((READING, "m"), (reading, model)):
        await reader.read([raw("one")], how, which)
        assert tokens.taken() == {"one"}


async def test_much_of_it_is_read_in_a_thread_to_the_same_end() -> None:
    large = raw("x" * (INLINE_BYTES + 1))
    [message] = await Reader(Counting()).read([large], READING, "m")
    assert message.tokens == INLINE_BYTES + 1 + 4


@pytest.mark.parametrize("length", [1, INLINE_BYTES + 1])
async def test_what_is_no_message(length: int) -> None:
    with pytest.raises(Unplannable):
        await Reader(Counting()).read([raw("x" * length, role="narrator")], READING, "m")


async def test_a_compacted_message_is_made_once() -> None:
    reader = Reader(Counting())
    tool = raw("0123456789" * 50, "tool", tool_call_id="c")
    call = Raw(b'{"role":"assistant","tool_calls":[{"id":"c","type":"function","function":{"name":"f"}}]}')
    asked, message = await reader.read([call, tool], READING, "m")
    make = reader.compactor(Transcript([call, tool], [asked, message]), READING.shape)
    made = make(1, False)
    assert json.loads(made)["content"].startswith("01234... (detailed result is stored in /s/tool_call_c_")
    assert make(1, False) is made
    assert reader.sizes()["compacted"] == (1, len(made))
    assert make(1, True) != made


async def test_tool_definitions_are_counted_once() -> None:
    tokens = Counting()
    reader = Reader(tokens)
    assert await reader.tool_tokens(None, "m") == 0
    for _ in range(2):
        assert await reader.tool_tokens(Raw(b"[{}]"), "m") == 4
    assert tokens.texts == ["[{}]"]
