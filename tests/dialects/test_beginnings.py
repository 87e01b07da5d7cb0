"""A body whose beginning is known is read as if it had been parsed whole."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy import rawjson
from proxy.dialects import DIALECTS, NAMED, Dialect, beginnings
from proxy.dialects.beginnings import LEAST, STAND_IN, coming, parsed
from proxy.plan.history import Beginning
from proxy.plan.turn import Request, Unplannable
from tests import steps

Json = dict[str, Any]
LONG = 'line one\n\tline "two" \\ ü €\n' * 160
MARK = {"cache_control": {"type": "ephemeral"}}
HEADS: Mapping[str, Json] = {
    "chat": {},
    "messages": {"max_tokens": 99, "system": [{"type": "text", "text": "You are.", **MARK}]},
    "responses": {"instructions": "You are."},
}
ODD = {
    "chat": [
        {"role": "user", "content": "half \ud83d of a pair"},
        {"role": "user", "content": "\x7f"},
        {"role": "assistant", "content": None},
        {"role": "function", "name": "f", "content": "[]"},
    ],
    "messages": [
        {"role": "user", "content": "half \ud83d of a pair"},
        {"role": "user", "content": "\x7f"},
        {"role": "system", "content": [], "output_config": {"effort": "low"}},
        {"role": "user", "content": [{"type": "text", "text": "a", **MARK}]},
        {"role": "user", "content": [], "more": {"type": "tool_definition", "name": "grep"}},
    ],
    "responses": [
        "half \ud83d of a pair",
        {"role": "user", "content": "\x7f"},
        {"role": "assistant", "content": "One"},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"type": "tool_search_output", "tools": [{"type": "function", "name": "grep"}]},
        {"type": "compaction", "encrypted_content": "x"},
        {"type": "compaction_trigger"},
    ],
}


def written(
    dialect: Dialect,
    history: list[Any],
    members: Json,
    ascii: bool = False,
    indent: int | None = None,
) -> bytes:
    listed = {dialect.listing: history}
    body = {"model": "m", **HEADS[dialect.name], **listed, **members}
    text = json.dumps(body, ensure_ascii=ascii or "\\ud83d" in json.dumps(history), indent=indent)
    return text.encode()


def fields(request: Request) -> dict[str, object]:
    """All that is known of a request, but for how it was found out."""
    found = {name: getattr(request, name) for name in request.__struct_fields__}
    del found["known"], found["fresh"]
    members = {name: bytes(raw) for name, raw in request.members.items()}
    entries = [bytes(entry) for entry in request.entries]
    more = {"members": members, "entries": entries, "tools": bytes(request.tools)}
    return {**found, **more, "preamble": bytes(request.preamble), "unsent": request.unsent}


def outcome(dialect: Dialect, body: bytes, known: Beginning | None = None) -> object:
    try:
        return fields(parsed(dialect, body, known))
    except Unplannable as error:
        return str(error), error.reason


def begun(dialect: Dialect, body: bytes) -> Beginning:
    made = coming(dialect, dialect.parse(body))
    assert made is not None
    return made


def turn(api: str, number: int) -> list[Json]:
    return steps.STEP[api](f"call_{number}", f"{number} {LONG}", "read", path="/a")


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
@given(data=st.data())
def test_a_body_that_goes_on_is_what_it_were_parsed_whole(
    dialect: Dialect, data: st.DataObject
) -> None:
    api = dialect.name
    ascii = data.draw(st.booleans())
    indent = data.draw(st.sampled_from([None, 0, 2]))
    history: list[Any] = [{"role": "user", "content": f"Go. {LONG}"}]
    known: Beginning | None = None
    for number in range(data.draw(st.integers(2, 5))):
        kind = data.draw(st.sampled_from(["turn", "turn", "odd", "marked", "again"]))
        history += turn(api, number) if kind in ("turn", "marked") else []
        history += [data.draw(st.sampled_from(ODD[api]))] if kind == "odd" else []
        sent = list(history)
        if kind == "marked" and api == "messages":
            last = sent[-1]
            sent[-1] = {**last, "content": [*last["content"][:-1], last["content"][-1] | MARK]}
        members = data.draw(
            st.sampled_from(
                [{}, {"stream": True}, {"tools": []}, {"store": False}, {"store": True}]
            )
        )
        body = written(dialect, sent, members, ascii, indent)
        if known is not None:
            start = beginnings.place_in(dialect, body)
            known = known if start is not None and body.startswith(known.text, start) else None
        assert outcome(dialect, body, known) == outcome(dialect, body)
        try:
            made = coming(dialect, parsed(dialect, body, known))
        except Unplannable:
            made = None
        if made is not None and not isinstance(outcome(dialect, body), tuple):
            start = beginnings.place_in(dialect, body)
            assert start is not None
            assert body.startswith(made.text, start)
            cold = coming(dialect, dialect.parse(body))
            assert cold is not None
            assert [bytes(one) for one in made.entries] == [bytes(one) for one in cold.entries]
            assert (made.text, made.count, made.replied) == (cold.text, cold.count, cold.replied)
        known = made


@pytest.mark.parametrize("api", sorted(steps.STEP))
def test_only_what_is_new_is_parsed(api: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dialect = NAMED[api]
    history = [{"role": "user", "content": "Go."}]
    for number in range(30):
        history += turn(api, number)
    known = begun(dialect, written(dialect, history, {}))
    body = written(dialect, [*history, *turn(api, 30)], {})
    looked_at: list[int] = []
    decode = rawjson.decode

    def counted(decoder: Any, raw: Any) -> Any:
        looked_at.append(len(memoryview(raw)))
        return decode(decoder, raw)

    monkeypatch.setattr(rawjson, "decode", counted)
    request = parsed(dialect, body, known)
    assert request.known is known
    longer = coming(dialect, request)
    assert longer is not None
    assert len(longer.entries) == len(request.entries)
    assert sum(looked_at) < 12 * len(LONG) * 1.2 < len(body)


@pytest.mark.parametrize("api", sorted(steps.STEP))
def test_a_beginning_ends_before_the_breakpoints_at_the_end(api: str) -> None:
    dialect = NAMED[api]
    history: list[Any] = [{"role": "user", "content": "Go."}]
    for number in range(9):
        history += turn(api, number)
    marked = {"role": "user", "content": [{"type": "text", "text": "a", **MARK}]}
    for place, stays in ((1, True), (-2, False)):
        body = written(dialect, [*history[:place], marked, *history[place:]], {})
        made = begun(dialect, body)
        assert (b"cache_control" in made.text) is stays
        assert made.text.endswith(b"}")
        assert made.count == (len(history) + 1 if stays else len(history) - 2)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param((b'"content": "Go', b'"content": "No'), id="another beginning"),
        pytest.param((b"}]", b"}}]"), id="no JSON"),
        pytest.param((b'"model"', b'"messages": [], "model"'), id="two lists, the last one counts"),
        pytest.param((b', "seed": 1}', b', "messages": [], "seed": 1}'), id="another list at last"),
        pytest.param((b', "seed": 1}', b', "seed": 1} {}'), id="two bodies"),
        pytest.param((b', "seed": 1}', b', "user": "\x7f"}'), id="what masks backslashes"),
        pytest.param(
            (b', "seed": 1}', b', "messages": [' + STAND_IN + b"]}"), id="what stands in for others"
        ),
    ],
)
def test_what_is_unusual_is_parsed_whole(change: tuple[bytes, bytes]) -> None:
    chat = NAMED["chat"]
    history = [{"role": "user", "content": f"Go. {LONG}"}, *turn("chat", 1)]
    body = written(chat, history, {"seed": 1})
    known = begun(chat, body)
    other = body.replace(*change)
    assert other != body
    start = beginnings.place_in(chat, other)
    assert start is not None
    begins = other.startswith(known.text, start)
    assert outcome(chat, other, known if begins else None) == outcome(chat, other)


def test_more_messages_than_are_planned_are_refused_however_many_are_known() -> None:
    chat = NAMED["chat"]
    small = [{"role": "user", "content": "a"}] * (rawjson.MAX_ELEMENTS - 1)
    known = begun(chat, written(chat, small, {}))
    assert len(known.text) > LEAST
    assert outcome(chat, written(chat, [*small, small[0]], {}), known) == outcome(
        chat, written(chat, [*small, small[0]], {})
    )
    with pytest.raises(Unplannable):
        parsed(chat, written(chat, [*small, *small[:2]], {}), known)


def test_a_short_history_is_parsed_whole() -> None:
    chat = NAMED["chat"]
    assert coming(chat, chat.parse(written(chat, [{"role": "user", "content": "Hi"}], {}))) is None
