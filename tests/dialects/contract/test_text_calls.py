"""Calls of our tools that a model wrote as text: any form, in any API, split anywhere, wherever it
stands.

The forms are those that the parsers of vLLM and SGLang read; `proxy.dialects.grammars` names each
one's source.
"""

from __future__ import annotations

import json
from textwrap import indent
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy import sse
from proxy.dialects.turn import Turn
from proxy.plan.turn import State
from tests.dialects.contract.apis import APIS, Api, Block, Round, text, theirs, think
from tests.dialects.turning import receive, run

Json = dict[str, Any]

CALL = '{"name": "grep", "arguments": {"pattern": "x{1}"}}'
ARGUMENTS = '{"pattern": "x{1}"}'
FORMS = {
    "Hermes": f"<tool_call>\n{CALL}\n</tool_call>",
    "Hermes, twice": f"<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{CALL}\n</tool_call>",
    "Qwen3-Coder": (
        "<tool_call>\n<function=grep>\n<parameter=pattern>\nx{1}\n</parameter>\n</function>\n</tool_call>"
    ),
    "Qwen3-Coder, half a tag": "<function=grep>\n<parameter=pattern>\nx{1}\n</parameter>\n</function>\n</tool_call>",
    "Seed OSS": "<seed:tool_call><function=grep><parameter=pattern>x{1}</parameter></function></seed:tool_call>",
    "GLM": "<tool_call>grep\n<arg_key>pattern</arg_key>\n<arg_value>x{1}</arg_value>\n</tool_call>",
    "Kimi K2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.grep:0<|tool_call_argument_begin|>"
        f"{ARGUMENTS}<|tool_call_end|><|tool_calls_section_end|>"
    ),
    "MiniMax M2": (
        '<minimax:tool_call>\n<invoke name="grep">\n<parameter name="pattern">x{1}</parameter>\n</invoke>\n'
        "</minimax:tool_call>"
    ),
    "MiniMax M1": f"<tool_calls>\n{CALL}\n</tool_calls>",
    "DeepSeek V3": (
        "<\uff5ctool\u2581calls\u2581begin\uff5c><\uff5ctool\u2581call\u2581begin\uff5c>function"
        f"<\uff5ctool\u2581sep\uff5c>grep\n```json\n{ARGUMENTS}\n```<\uff5ctool\u2581call\u2581end\uff5c>"
        "<\uff5ctool\u2581calls\u2581end\uff5c>"
    ),
    "DeepSeek V3.1": (
        "<\uff5ctool\u2581calls\u2581begin\uff5c><\uff5ctool\u2581call\u2581begin\uff5c>grep<\uff5ctool\u2581sep\uff5c>"
        f"{ARGUMENTS}<\uff5ctool\u2581call\u2581end\uff5c><\uff5ctool\u2581calls\u2581end\uff5c>"
    ),
    "DeepSeek V3.2": (
        '<\uff5cDSML\uff5cfunction_calls>\n<\uff5cDSML\uff5cinvoke name="grep">\n'
        '<\uff5cDSML\uff5cparameter name="pattern" string="true">x{1}</\uff5cDSML\uff5cparameter>\n'
        "</\uff5cDSML\uff5cinvoke>\n</\uff5cDSML\uff5cfunction_calls>"
    ),
    "Mistral": f"[TOOL_CALLS][{CALL}]",
    "Mistral, newer": f"[TOOL_CALLS]grep[ARGS]{ARGUMENTS}",
    "Mistral, with an id": f"[TOOL_CALLS]grep[CALL_ID]abc123def[ARGS]{ARGUMENTS}",
    "Mistral, without marks between": f"[TOOL_CALLS]grep{ARGUMENTS}",
    "harmony": f"<|channel|>commentary to=functions.grep <|constrain|>json<|message|>{ARGUMENTS}<|call|>",
    "harmony, its recipient first": (
        f"<|start|>assistant to=functions.grep<|channel|>commentary<|constrain|>json<|message|>{ARGUMENTS}<|call|>"
    ),
    "Llama": '<|python_tag|>{"name": "grep", "parameters": {"pattern": "x{1}"}}<|eom_id|>',
    "Llama, a function": f"<function=grep>{ARGUMENTS}</function>",
    "Llama 4": '<|python_start|>[grep(pattern="x{1}")]<|python_end|>',
    "LFM2": '<|tool_call_start|>[grep(pattern="x{1}")]<|tool_call_end|>',
    "Olmo 3": '<function_calls>\ngrep(pattern="x{1}")\n</function_calls>',
    "Gemma 4": '<|tool_call>call:grep{pattern:<|"|>x{1}<|"|>}<tool_call|>',
    "Nemotron": f"<TOOLCALL>[{CALL}]</TOOLCALL>",
    "Granite": f"<|tool_call|>[{CALL}]",
    "Command": (
        '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "grep", "parameters": {"pattern": "x{1}"}}]<|END_ACTION|>'
    ),
    "JSON": CALL,
    "Python": '[grep(pattern="x{1}")]',
}
PROSE = ["", "I will look it up.\n", "See <b> and [1].\n\n", "1 < 2: "]
ALONE = ("JSON", "Python")
"""Forms without a mark of their own, which count on a line of their own only."""


def stands(form: str, before: str) -> bool:
    return form not in ALONE or before == "" or before.endswith("\n")


FINAL = text("It is 42.")


def conversation(api: Api, blocks: list[Block], way: str) -> tuple[Turn, bytes, list[Json]]:
    """A turn whose first reply has these blocks; upstream then answers."""
    rounds = [blocks] if theirs() in blocks else [blocks, [FINAL]]
    said = [api.reply(Round(one), number) for number, one in enumerate(rounds, 1)]
    turn = api.turn(stream=way != "whole")
    encode = api.whole if way == "whole" else api.encodings[way]
    out, requests = run(turn, *map(encode, said))
    return turn, out, requests


def of_client(api: Api, out: bytes, way: str) -> list[Block]:
    """What the client has in the end, by its SDK."""
    reply = json.loads(out) if way == "whole" else api.assembled(out)
    return [one for one in api.blocks(reply) if one.text.strip()]


def words(blocks: list[Block], kind: str) -> str:
    return " ".join("".join(one.text for one in blocks if one.kind == kind).split())


def check(
    api: Api, form: str, before: str, way: str, *, kind: str = "text", client: bool = False
) -> None:
    blocks = [Block(kind, before + FORMS[form]), *([theirs()] if client else [])]
    turn, out, requests = conversation(api, blocks, way)
    seen = of_client(api, out, way)
    if kind == "text":
        assert words(seen, "text") == " ".join(
            " ".join([before, "" if client else FINAL.text]).split()
        )
    else:
        assert words(seen, "text") == ("" if client else FINAL.text)
        assert "grep" not in words(seen, "think")
    assert [one for one in seen if one.kind == "theirs"] == ([theirs()] if client else [])
    assert not [one for one in seen if one.kind == "ours"]
    assert b"grep" not in out
    number = 2 if "twice" in form else 1
    if client:
        assert turn.hidden is not None
        assert len(turn.hidden.after) == number
    else:
        called = [one for one in api.entries(asked(requests[1])) if one.kind == "ours"]
        assert called == [Block("ours", "x{1}")] * number


def asked(request: Json) -> list[Json]:
    """The model's entries in a request."""
    if "input" in request:
        return [one for one in request["input"] if one.get("type") == "function_call"]
    entries = [one for one in request["messages"] if one["role"] == "assistant"]
    if not isinstance(entries[0]["content"], list):
        return entries
    return [one for entry in entries for one in entry["content"]]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", APIS)
def test_a_call_in_a_text_is_answered(name: str, form: str) -> None:
    api = APIS[name]
    for way in ("whole", *api.encodings):
        check(api, form, "", way)
    check(api, form, PROSE[1], "own")
    check(api, form, PROSE[1], "own", client=True)
    check(api, form, PROSE[1], "own", kind="think")


@given(
    st.sampled_from(sorted(APIS)),
    st.sampled_from(sorted(FORMS)),
    st.sampled_from(PROSE),
    st.sampled_from(["text", "think"]),
    st.booleans(),
    st.data(),
)
def test_any_call_in_any_text(
    name: str, form: str, before: str, kind: str, client: bool, data: st.DataObject
) -> None:
    api = APIS[name]
    if stands(form, before):
        way = data.draw(st.sampled_from(["whole", *sorted(api.encodings)]))
        check(api, form, before, way, kind=kind, client=client)


QUOTED = ["{} And so on.", "```\n{}\n```", "So:\n```xml\n{}\n```\n", "`{}`"]


@given(
    st.sampled_from(sorted(APIS)),
    st.sampled_from([form for form in sorted(FORMS) if form not in ALONE]),
    st.sampled_from(QUOTED),
    st.data(),
)
def test_a_quoted_call_stays_text(name: str, form: str, around: str, data: st.DataObject) -> None:
    api = APIS[name]
    way = data.draw(st.sampled_from(["whole", *sorted(api.encodings)]))
    said = "For example: " + around.format(FORMS[form].replace("{}", ""))
    turn = api.turn(stream=way != "whole")
    reply = api.reply(Round([text(said)]), 1)
    out, requests = run(turn, (api.whole if way == "whole" else api.encodings[way])(reply))
    assert len(requests) == 1
    assert of_client(api, out, way) == [text(said)]


@pytest.mark.parametrize("before", ["> ", "    ", "\t"])
@pytest.mark.parametrize("name", APIS)
def test_calls_on_lines_that_quote_or_are_code_stay_text(name: str, before: str) -> None:
    api = APIS[name]
    for form in FORMS:
        said = "For example:\n\n" + indent(FORMS[form], before)
        out, requests = run(api.turn(), api.encodings["large"](api.reply(Round([text(said)]), 1)))
        assert len(requests) == 1, form
        assert of_client(api, out, "large") == [text(said)]


DEEP = "[" * 30_000 + "]" * 30_000
"""More levels than Python reads."""
STRANGE = {
    "ellipsis": "[grep(pattern=..., path=...)]",
    "bytes": '[grep(pattern=b"x")]',
    "a set": '[grep(pattern={"x"})]',
    "a complex number": "[grep(pattern=1j)]",
    "a complex number that is too large": f"[grep(pattern=1{400 * '0'} + 1j)]",
    "a tuple as a key": '[grep(pattern={("x", 1): "y"})]',
    "a list as a key": '[grep(pattern={["x"]: "y"})]',
    "no Python": "[grep(pattern=x y)]",
    "deep Python": f"[grep(pattern={DEEP})]",
    "deep JSON": f'{{"name": "grep", "arguments": {{"pattern": {DEEP}}}}}',
    "deep JSON in a string": f'{{"name": "grep", "arguments": "{{\\"pattern\\": {DEEP}}}"}}',
    "deep JSON of Gemma 4": f"<|tool_call>call:grep{{pattern:{DEEP}}}<tool_call|>",
    "deep JSON of DeepSeek V3.2": (
        '<\uff5cDSML\uff5cinvoke name="grep">\n'
        f'<\uff5cDSML\uff5cparameter name="pattern" string="false">{DEEP}</\uff5cDSML\uff5cparameter>\n'
        "</\uff5cDSML\uff5cinvoke>"
    ),
}


@pytest.mark.parametrize("form", STRANGE)
@pytest.mark.parametrize("name", APIS)
def test_a_call_with_arguments_that_no_tool_takes_stays_text(name: str, form: str) -> None:
    api = APIS[name]
    said = text(STRANGE[form])
    for way in ("whole",) if DEEP in said.text else ("whole", "own"):
        encode = api.whole if way == "whole" else api.encodings[way]
        out, requests = run(api.turn(stream=way != "whole"), encode(api.reply(Round([said]), 1)))
        assert len(requests) == 1
        assert of_client(api, out, way) == [said]


@pytest.mark.parametrize("name", APIS)
def test_where_upstream_calls_our_tools_a_call_in_a_text_is_a_quotation(name: str) -> None:
    api = APIS[name]
    said = text(f"It writes: {FORMS['Hermes']}")
    rounds = [
        api.reply(Round(one), number)
        for number, one in enumerate(([Block("ours", "x")], [said]), 1)
    ]
    turn = api.turn()
    out, requests = run(turn, *map(api.encodings["own"], rounds))
    assert len(requests) == 2
    assert of_client(api, out, "own") == [said]


@pytest.mark.parametrize("name", APIS)
def test_a_text_passes_event_by_event(name: str) -> None:
    """Only what may begin a call waits, and only for the next event."""
    api = APIS[name]
    said = (
        "Plain words, then a < b, <b>bold</b>, [a](b) and {x}.\n```\n<tool_call>\n{}\n```\nThe end."
    )
    raw = api.encodings["own"](api.reply(Round([text(said)]), 1))
    turn = api.turn()
    turn.request()
    arrived, shown = "", ""
    for event in sse.EventDecoder().feed(raw):
        arrived += piece(event.data or b"")
        passed = sse.EventDecoder().feed(turn.receive(event))
        shown += "".join(piece(one.data or b"") for one in passed)
        assert arrived.startswith(shown)
        assert len(arrived) - len(shown) <= len("<tool_call>"), arrived
        if not set(arrived[-12:]) & set("<[{`"):
            assert arrived == shown
    turn.end()
    assert turn.state is State.DONE


def piece(data: bytes) -> str:
    """The text that an event brings."""
    if data in (b"", b"[DONE]"):
        return ""
    event = json.loads(data)
    if "choices" in event:
        return "".join((one["delta"].get("content") or "") for one in event["choices"])
    if event["type"] == "response.output_text.delta":
        return str(event["delta"])
    return str(event["delta"].get("text", "")) if event["type"] == "content_block_delta" else ""


@pytest.mark.parametrize("name", APIS)
def test_without_our_tools_every_byte_passes(name: str) -> None:
    api = APIS[name]
    raw = api.encodings["own"](api.reply(Round([think(FORMS["GLM"]), text(FORMS["Hermes"])]), 1))
    turn = api.turn(injected=False)
    turn.request()
    assert receive(turn, raw) + turn.end() + turn.close() == raw
