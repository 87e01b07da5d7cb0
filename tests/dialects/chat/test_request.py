"""What we look into of a request, and what stops us from changing it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.dialects.chat import CHAT
from proxy.plan.turn import Request, Unplannable


def request(**members: Any) -> Request:
    return CHAT.parse(json.dumps({"model": "m", "messages": [], **members}).encode())


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def test_what_is_read() -> None:
    body = b'{"messages":[{"role": "user"}],"stream":true,"max_tokens":7,"max_completion_tokens":90,"x":1.50}'
    asked = CHAT.parse(body)
    assert [bytes(raw) for raw in asked.entries] == [b'{"role": "user"}']
    assert (asked.model, asked.stream, asked.reply_tokens) == ("", True, 90)
    assert bytes(asked.members["x"]) == b"1.50"


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"messages":1}', b'{"messages":[],"model":1}'])
def test_what_is_no_chat_request(body: bytes) -> None:
    with pytest.raises(Unplannable):
        CHAT.parse(body)


@pytest.mark.parametrize(
    ("member", "value", "obstacle"),
    [
        ("functions", [], "functions"),
        ("functions", None, ""),
        ("function_call", "auto", "function_call"),
        ("audio", {}, "audio"),
        ("web_search_options", {}, "web_search_options"),
        ("prediction", {}, "prediction"),
        ("n", 1, ""),
        ("n", None, ""),
        ("n", 2, "n"),
        ("logprobs", True, "logprobs"),
        ("modalities", ["text"], ""),
        ("modalities", ["text", "audio"], "modalities"),
        ("tools", [tool(str(number)) for number in range(126)], ""),
        ("tools", [tool(str(number)) for number in range(127)], "tools"),
        ("max_tokens", "many", ""),
    ],
)
def test_obstacles(member: str, value: Any, obstacle: str) -> None:
    assert request(**{member: value}).obstacle == obstacle


@pytest.mark.parametrize(
    ("tools", "names"),
    [
        (None, ("grep", "read_file")),
        ([], ("grep", "read_file")),
        ([tool("bash")], ("grep", "read_file")),
        ([tool("grep")], ("offload_grep", "offload_read_file")),
        ([{"type": "custom", "custom": {"name": "read_file"}}], ("offload_grep", "offload_read_file")),
        ([{"type": "web_search"}, {"function": {"name": "grep"}}], ("offload_grep", "offload_read_file")),
        ([tool("grep"), tool("offload_grep")], None),
    ],
)
def test_what_our_tools_are_called(tools: Any, names: tuple[str, str] | None) -> None:
    assert request(tools=tools).names == names
