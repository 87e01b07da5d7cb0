"""Whatever the newest SDKs know of replies is on a list here. What is new fails with its name: say
who answers it."""

from __future__ import annotations

import json
import typing
from typing import Any

import pytest

from proxy.dialects.chat.reply import STOPPED
from proxy.dialects.messages.reply import DELTA, UNFINISHED
from proxy.dialects.responses.items import is_answered
from proxy.dialects.responses.reply import BEGINNINGS, ENDINGS
from tests.dialects.messages import turns as messages
from tests.dialects.responses import api as responses_api
from tests.dialects.responses import turns as responses
from tests.dialects.scripted import encoded
from tests.dialects.turning import run
from tests.sdks import Lazy

anthropic, openai_beta = Lazy("anthropic.types.beta"), Lazy("openai.types.beta")
openai, chunks = Lazy("openai.types.responses"), Lazy("openai.types.chat.chat_completion_chunk")

CLIENT, UPSTREAM, NOBODY = "the client answers it", "upstream does that itself", "it is said"

BLOCKS = {
    CLIENT: "tool_use",
    UPSTREAM: "server_tool_use mcp_tool_use advisor_tool_result bash_code_execution_tool_result"
    " code_execution_tool_result mcp_tool_listing mcp_tool_result text_editor_code_execution_tool_result"
    " tool_search_tool_result web_fetch_tool_result web_search_tool_result container_upload compaction",
    NOBODY: "text thinking redacted_thinking fallback",
}
DELTAS = {
    "citations_delta",
    "compaction_delta",
    "input_json_delta",
    "signature_delta",
    "text_delta",
    "thinking_delta",
}
STOPS = {
    True: {"end_turn", "stop_sequence", "tool_use"},
    False: {"max_tokens", "pause_turn", "compaction", "refusal", "model_context_window_exceeded"},
}
"""Why a message stops, by whether the model is done."""

ITEMS = {
    CLIENT: "function_call custom_tool_call local_shell_call shell_call apply_patch_call computer_call"
    " mcp_approval_request",
    UPSTREAM: "additional_tools apply_patch_call_output code_interpreter_call computer_call_output"
    " custom_tool_call_output file_search_call function_call_output image_generation_call local_shell_call_output"
    " mcp_approval_response mcp_call mcp_list_tools multi_agent_call multi_agent_call_output program program_output"
    " shell_call_output tool_search_call tool_search_output web_search_call",
    NOBODY: "message reasoning agent_message compaction",
}
"""Items of a response. Which of them the client answers may also be told by a member, as for
`tool_search_call`."""
EVENTS_OF_ITEMS = (
    "response.code_interpreter_call", "response.compaction.", "response.content_part.",
    "response.custom_tool_call_input.", "response.file_search_call.", "response.function_call_arguments.",
    "response.image_generation_call.", "response.mcp_call", "response.mcp_list_tools.", "response.output_item.",
    "response.output_text.", "response.reasoning_summary_part.", "response.reasoning_summary_text.",
    "response.reasoning_text.", "response.refusal.", "response.shell_call_", "response.web_search_call.",
)  # fmt: skip
"""How the names of events begin that tell with `output_index` which item they are about."""
OTHER_EVENTS = {"error"} | {
    f"response.audio.{kind}" for kind in ("delta", "done", "transcript.delta", "transcript.done")
}
ANSWER = messages.stream(messages.message({"type": "text", "text": "So."}, number=2))
CHAT_DELTA = {"audio", "content", "function_call", "refusal", "role", "tool_calls"}
CHAT_FINISHES = {True: {"stop", "tool_calls", "function_call"}, False: {"length", "content_filter"}}


def members(union: Any) -> list[Any]:
    """The models of a union, those of unions within it included."""
    found = typing.get_args(union)
    return [
        one
        for part in found
        for one in ([part] if hasattr(part, "model_fields") else members(part))
    ]


def names(*unions: Any) -> set[str]:
    return {
        name for union in unions for one in members(union) for name in typing.get_args(_type(one))
    }


def _type(model: Any) -> Any:
    return model.model_fields["type"].annotation


def listed(table: dict[str, str]) -> set[str]:
    return {name for said in table.values() for name in said.split()}


def test_blocks_of_a_message_are_known() -> None:
    assert names(anthropic.BetaContentBlock) == listed(BLOCKS)
    assert names(anthropic.BetaRawContentBlockDelta) == DELTAS
    assert (
        set(typing.get_args(anthropic.BetaStopReason)) == STOPS[True] | STOPS[False]
        and STOPS[False] == UNFINISHED
    )


@pytest.mark.parametrize("kind", sorted(listed(BLOCKS)))
def test_a_block_keeps_its_place_and_the_client_answers_what_is_its(kind: str) -> None:
    ours = {"type": "tool_use", "name": "grep", "input": {"pattern": "x"}}
    block = {"type": kind, "name": "x", "input": {}, "text": "t", "thinking": "t", "data": "d"}
    turn = messages.turn()
    first = messages.stream(messages.message({"type": "text", "text": "a"}, block, ours))
    rounds = [first] if kind in BLOCKS[CLIENT].split() else [first, ANSWER]
    out, asked = run(turn, *rounds)
    if kind != "fallback":
        assert turn.mixed == (kind in BLOCKS[CLIENT].split())
    shown = messages.accumulated(out)["content"]
    assert [one["type"] for one in shown][:2] == ["text", kind]
    assert len(asked) == len(rounds)


@pytest.mark.parametrize("kind", sorted(DELTAS))
def test_what_a_delta_brings_goes_back(kind: str) -> None:
    """Of whatever name it is, if it is a text."""
    key = {
        "citations_delta": "citation",
        "input_json_delta": "partial_json",
        "compaction_delta": "content",
    }.get(kind)
    key = key or kind.removesuffix("_delta")
    brought: Any = {"type": "page_location"} if key == "citation" else '{"a":1}'
    first = messages.message(
        {"type": "new", "id": "b"}, {"type": "tool_use", "name": "grep", "input": {}}
    )
    raw = messages.stream(first)
    delta = encoded({"type": DELTA, "index": 0, "delta": {"type": kind, key: brought}})
    at = raw.index(b"event: content_block_stop")
    _, asked = run(messages.turn(), raw[:at] + delta + raw[at:], ANSWER)
    block = asked[1]["messages"][1]["content"][0]
    kept = {"citation": ("citations", [brought]), "partial_json": ("input", {"a": 1})}.get(
        key, (key, brought)
    )
    assert block[kept[0]] == kept[1]


def test_items_of_a_response_are_known() -> None:
    assert names(openai.ResponseOutputItem, openai_beta.BetaResponseOutputItem) == listed(ITEMS)
    answered = {kind for kind in listed(ITEMS) if is_answered(kind, {})}
    assert answered == set(ITEMS[CLIENT].split())


def test_events_of_a_response_are_known() -> None:
    """Those of an item name its place, which changes where something before it is hidden."""
    known = names(openai.ResponseStreamEvent, openai_beta.BetaResponseStreamEvent)
    others = {name for name in known if not name.startswith(EVENTS_OF_ITEMS)}
    assert others == OTHER_EVENTS | set(BEGINNINGS) | set(ENDINGS)
    for one in members(openai.ResponseStreamEvent):
        [name] = typing.get_args(_type(one))
        assert ("output_index" in one.model_fields) == name.startswith(EVENTS_OF_ITEMS), name


@pytest.mark.parametrize("kind", sorted(listed(ITEMS)))
def test_an_item_keeps_its_place(kind: str) -> None:
    item = {
        **responses_api.say("t"),
        "type": kind,
        "call_id": "c",
        "summary": [],
        "arguments": "{}",
        "name": "x",
    }
    ours = responses_api.call("grep", {"pattern": "x"})
    mixed = kind in ITEMS[CLIENT].split()
    rounds = [responses.response(item, responses_api.say("a"), ours)]
    rounds += [] if mixed else [responses.response(responses_api.say("So."), number=2)]
    turn = responses.turn()
    out, _ = run(turn, *(json.dumps(one).encode() for one in rounds))
    assert [one["type"] for one in json.loads(out)["output"]][:2] == [kind, "message"]
    assert turn.mixed == mixed


def test_what_chat_streams_is_known() -> None:
    assert set(chunks.ChoiceDelta.model_fields) == CHAT_DELTA
    finishes = typing.get_args(
        typing.get_args(chunks.Choice.model_fields["finish_reason"].annotation)[0]
    )
    assert set(finishes) == CHAT_FINISHES[True] | CHAT_FINISHES[False]
    assert CHAT_FINISHES[False] <= STOPPED and not CHAT_FINISHES[True] & STOPPED
