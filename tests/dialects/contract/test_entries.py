"""What a reply means and says when the client sends it back, in all three APIs."""

from __future__ import annotations

import pytest
from msgspec import Raw

from proxy.plan.plan import Message, Reading
from proxy.plan.preview import Shape
from tests.dialects.contract.apis import APIS, Api, Block, Round, text, theirs, think

READING = Reading(Shape(store_dir="/context_store", preview_chars=100), 20_000)


def read(api: Api, *blocks: Block) -> tuple[bytes, Message]:
    entry = api.entry(api.reply(Round(blocks), 1))
    return entry, api.dialect.read(entry, READING, len)


@pytest.mark.parametrize("api", APIS.values(), ids=APIS)
def test_a_reply_means_its_text_and_its_calls(api: Api) -> None:
    """In no two APIs the same: a record of one would be put into requests of the other."""
    _, reply = read(api, think(), text("So."), theirs("a"))
    _, same = read(api, think("on"), text("So. "), theirs("a"))
    assert same.meaning == reply.meaning
    others = [(text("No."), theirs("a")), (text("So."), theirs("b")), (text("So."),)]
    assert reply.meaning not in [read(api, think(), *blocks)[1].meaning for blocks in others]
    assert len({one.dialect.reply_meaning("x", []) for one in APIS.values()}) == len(APIS)


@pytest.mark.parametrize("api", APIS.values(), ids=APIS)
def test_a_reply_is_readable_block_by_block(api: Api) -> None:
    entry, reply = read(api, think("Hm."), text("So."), theirs("1"))
    [(id, tool)] = reply.calls
    assert [
        (section.title, section.text) for section in api.dialect.sections(entry, 3, reply, "")
    ] == [
        ("4 assistant reasoning", "Hm."),
        ("4 assistant", "So."),
        (f"4 assistant calls {tool} {id}", '{"q": "1"}'),
    ]


@pytest.mark.parametrize(
    "form", ['{"role":"user","content":7}', '{"role":"narrator","content":"x"}']
)
@pytest.mark.parametrize("api", APIS.values(), ids=APIS)
def test_an_entry_that_cannot_be_read_stays_and_readers_see_it_as_it_is(
    api: Api, form: str
) -> None:
    entry = Raw(form.encode())
    message = api.dialect.read(entry, READING, len)
    assert message.sealed and message.pieces == ()
    assert [section.text for section in api.dialect.sections(entry, 0, message, "")] == [
        bytes(entry).decode()
    ]
