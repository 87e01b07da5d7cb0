"""What each round asks: the client's members as they came, but for what a turn has to ask
differently."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.dialects.chat import CHAT
from proxy.dialects.chat.reply import ChatRoundRequest
from tests.dialects.chat.turns import GREP, READ, SEARCH, asked


def first(asked: ChatRoundRequest) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(asked.first())
    return body


def later(asked: ChatRoundRequest, last: bool = False, bare: bool = False) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(asked.later(asked.entries, last=last, bare=bare))
    return body


def test_what_is_not_ours_keeps_its_bytes_and_its_place() -> None:
    body = b'{"n": 1e0,"tools": [ {"a":1.50} ],"messages":[],"x":"\\u00e9","stream":true,"seed":123456789012345678901}'
    ours = ChatRoundRequest(CHAT.parse(body), [b'{"role": "user"}'], [b'{"b":2}'], 8)
    assert ours.first() == (
        b'{"n":1e0,"tools":[{"a":1.50},{"type":"function","function":{"b":2}}],"messages":[{"role": "user"}],'
        b'"x":"\\u00e9","stream":true,'
        b'"seed":123456789012345678901,"stream_options":{"include_usage":true}}'
    )
    plain = CHAT.parse(b'{"model":"m","messages":[],"seed":1e2}')
    assert (
        ChatRoundRequest(plain, [b'{"a": 1}'], [], 8).first()
        == b'{"model":"m","messages":[{"a": 1}],"seed":1e2}'
    )


@pytest.mark.parametrize("tools", [None, [], [SEARCH]])
def test_our_tools_stand_behind_the_clients(tools: Any) -> None:
    assert first(asked(tools=tools))["tools"] == [*(tools or []), GREP, READ]
    assert first(asked(tools=tools, injected=False)).get("tools") == tools


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        (None, {"include_usage": True}),
        ({}, {"include_usage": True}),
        ({"include_usage": False, "x": 1}, {"include_usage": True, "x": 1}),
        ({"include_usage": True, "x": 1}, {"include_usage": True, "x": 1}),
        (7, 7),
        ([], []),
    ],
)
def test_usage_is_asked_for_in_streams(given: Any, sent: Any) -> None:
    assert first(asked(stream_options=given))["stream_options"] == sent
    assert first(asked(stream=False, stream_options=given)).get("stream_options") == given


def test_null_options_are_none() -> None:
    request = CHAT.parse(b'{"messages":[],"stream":true,"stream_options":null}')
    assert first(ChatRoundRequest(request, [], [], 8))["stream_options"] == {"include_usage": True}


def allowed(mode: str, *tools: Any) -> Any:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}}


OURS = [{"type": "function", "function": {"name": name}} for name in ("grep", "read_file")]


@pytest.mark.parametrize(
    ("choice", "sent"),
    [
        ("auto", "auto"),
        ("none", "none"),
        ("required", "required"),
        (SEARCH, SEARCH),
        (allowed("auto", SEARCH), allowed("auto", SEARCH, *OURS)),
        (allowed("auto"), allowed("auto")),
        (7, 7),
        (None, None),
    ],
)
def test_the_model_may_call_our_tools_beside_what_the_client_chose(choice: Any, sent: Any) -> None:
    """In every round but the one without our tools: what it is forced to call, it has not called
    yet."""
    request = asked(tool_choice=choice)
    assert first(request).get("tool_choice") == sent
    assert later(request).get("tool_choice") == sent
    assert later(request, last=True).get("tool_choice") == sent
    assert later(request, last=True, bare=True).get("tool_choice") == choice
    assert first(asked(tool_choice=choice, injected=False)).get("tool_choice") == choice


@pytest.mark.parametrize("tools", [None, []])
@pytest.mark.parametrize("choice", [None, "auto", "required"])
def test_in_the_last_round_nothing_can_be_called_where_all_tools_are_ours(
    tools: Any, choice: Any
) -> None:
    request = asked(tools=tools, tool_choice=choice)
    assert later(request).get("tool_choice") == choice
    assert later(request, last=True)["tool_choice"] == "none"


@pytest.mark.parametrize("tools", [None, [], [SEARCH]])
def test_our_tools_stay_in_the_last_round_and_are_left_out_if_the_model_calls_them_nevertheless(
    tools: Any,
) -> None:
    request = asked(tools=tools, tool_choice="auto", parallel_tool_calls=False)
    assert later(request)["tools"] == [*(tools or []), GREP, READ]
    assert later(request, last=True)["tools"] == later(request)["tools"], (
        "the prompt begins as before"
    )
    bare = later(request, last=True, bare=True)
    members = ("tools", "tool_choice", "parallel_tool_calls")
    assert [bare.get(key) for key in members] == (
        [tools, "auto", False] if tools else [None, None, None]
    )


def test_every_round_gets_the_clients_own_limits() -> None:
    limits = {"max_tokens": 50, "max_completion_tokens": 20}
    request = asked(**limits)
    for body in (
        first(request),
        later(request),
        later(request, last=True),
        later(request, last=True, bare=True),
    ):
        assert {key: body[key] for key in limits} == limits


@pytest.mark.parametrize(
    ("format", "json_wanted"),
    [
        (None, False),
        ({"type": "text"}, False),
        ({"type": "json_object"}, True),
        ({"type": "json_schema"}, True),
        ("x", False),
    ],
)
def test_who_wants_json(format: Any, json_wanted: bool) -> None:
    assert asked(response_format=format).wants_json is json_wanted
