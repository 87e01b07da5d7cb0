"""What we look into of a request, and what stops us from changing it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec import Raw

from proxy import rawjson
from proxy.dialects import Dialect
from proxy.dialects.chat import CHAT
from proxy.dialects.messages import MESSAGES
from proxy.dialects.request import LEAST_REPLY, glanced, lowered
from proxy.dialects.responses import RESPONSES
from proxy.plan.turn import Continuation, Unplannable
from proxy.rawjson import NotJson
from proxy.tools.definitions import NAMES, OTHER_NAMES, definitions

Json = dict[str, Any]

USER = {"role": "user", "content": "hi"}
FIELDS = {CHAT: "messages", RESPONSES: "input", MESSAGES: "messages"}


def parsed(dialect: Dialect, **members: Any) -> Any:
    return dialect.parse(json.dumps({"model": "m", FIELDS[dialect]: [USER], **members}).encode())


def test_what_is_read() -> None:
    body = b'{"messages":[{"role": "user"}],"stream":true,"max_tokens":7,"max_completion_tokens":90,"x":1.50}'
    asked = CHAT.parse(body)
    assert [bytes(raw) for raw in asked.entries] == [b'{"role": "user"}']
    assert (asked.model, asked.stream, asked.reply_tokens) == ("", True, 90)
    assert bytes(asked.members["x"]) == b"1.50"


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'{"FIELD":1}', b'{"FIELD":{}}', b'{"FIELD":[],"model":1}', b'{"model": 1}'],
)
@pytest.mark.parametrize("dialect", FIELDS, ids=lambda dialect: dialect.name)
def test_what_is_no_request_is_left_to_upstream(dialect: Dialect, body: bytes) -> None:
    with pytest.raises(Unplannable):
        dialect.parse(body.replace(b"FIELD", FIELDS[dialect].encode()))


@pytest.mark.parametrize(
    ("dialect", "body"),
    [
        (CHAT, b"{}"),
        (MESSAGES, b'{"messages": [1]}'),
        (RESPONSES, b'{"input": [1]}'),
        (RESPONSES, b'{"input": [[]]}'),
    ],
)
def test_nor_is_what_cannot_be_divided(dialect: Dialect, body: bytes) -> None:
    with pytest.raises(Unplannable):
        dialect.parse(body)


STRICT = {"name": "look", "strict": True}
SCHEMA = {"type": "object", "properties": {"strict": {"const": True}}}
TOOL_LISTS: list[tuple[Dialect, bool, list[Any]]] = [
    (CHAT, True, [{"type": "function", "function": {**STRICT, "parameters": SCHEMA}}]),
    (CHAT, True, [{"type": "function", "function": STRICT}, {"type": "custom", "custom": {}}]),
    (CHAT, False, [{"function": STRICT}, {"function": {"name": "see", "strict": False}}]),
    (CHAT, False, [{"function": STRICT}, {"function": {"name": "see", "parameters": SCHEMA}}]),
    (CHAT, False, []),
    (CHAT, False, ["strict", 1]),
    (MESSAGES, True, [{**STRICT, "input_schema": SCHEMA}, {"type": "bash_20250124"}]),
    (MESSAGES, False, [{**STRICT, "input_schema": SCHEMA}, {"input_schema": SCHEMA}]),
    (MESSAGES, False, [{"name": "look", "input_schema": SCHEMA}]),
    (
        RESPONSES,
        True,
        [{"type": "function", **STRICT, "parameters": SCHEMA}, {"type": "web_search"}],
    ),
    (RESPONSES, False, [{"type": "function", "strict": False, "parameters": SCHEMA}]),
]


@pytest.mark.parametrize(("dialect", "strict", "tools"), TOOL_LISTS)
def test_whether_all_of_the_clients_tools_are_strict(
    dialect: Dialect, strict: bool, tools: list[Any]
) -> None:
    assert dialect.requests.all_strict(Raw(json.dumps(tools).encode())) is strict


@pytest.mark.parametrize("dialect", FIELDS, ids=lambda dialect: dialect.name)
def test_a_strict_tool_of_ours_is_strict_in_each_api(dialect: Dialect) -> None:
    ours = map(dialect.requests.tool, definitions(NAMES, "/store", strict=True))
    assert dialect.requests.all_strict(Raw(rawjson.array(ours)))


@pytest.mark.parametrize(
    ("dialect", "runs", "more"),
    [
        (CHAT, False, {}),
        (CHAT, False, {"tools": None}),
        (CHAT, False, {"tools": [{"type": "function", "function": {"name": "look"}}]}),
        (CHAT, True, {"tools": [{"type": "web_search"}]}),
        (MESSAGES, False, {"tools": [{"name": "look", "input_schema": {}}]}),
        (MESSAGES, False, {"tools": [{"type": "bash_20250124"}, {"type": "custom", "name": "a"}]}),
        (MESSAGES, True, {"tools": [{"type": "code_execution_20250825", "name": "code"}]}),
        (MESSAGES, True, {"mcp_servers": [{"type": "url", "url": "https://a.example"}]}),
        (RESPONSES, False, {"tools": [{"type": "local_shell"}, {"type": "function", "name": "a"}]}),
        (RESPONSES, True, {"tools": [{"type": "mcp", "server_label": "a"}]}),
    ],
)
def test_whether_upstream_runs_tools_of_its_own(
    dialect: Dialect, runs: bool, more: dict[str, Any]
) -> None:
    history = (
        {"input": "Hi."}
        if dialect is RESPONSES
        else {"messages": [{"role": "user", "content": "Hi."}]}
    )
    body = {"model": "m", "max_tokens": 9, **history, **more}
    request = dialect.parse(json.dumps(body).encode())
    assert dialect.requests.upstream_runs(request) is runs


NO_UTF8 = (b"\x9e", b"\xed\xa0\x80", b"\xc3")
"""A byte from the middle of a character, half a surrogate pair, and a character without its end."""


@pytest.mark.parametrize("dialect", FIELDS, ids=lambda dialect: dialect.name)
def test_a_request_that_is_not_utf8_is_left_to_upstream(dialect: Dialect) -> None:
    """msgspec checks only the strings that it decodes. Such a role was once answered with 500."""
    body = json.dumps({"model": "m", "system": "s", FIELDS[dialect]: [USER], "user": "u"}).encode()
    assert dialect.parse(body).model == "m"
    for place in range(len(body)):
        for odd in NO_UTF8:
            with pytest.raises(Unplannable):
                dialect.parse(body[:place] + odd + body[place + 1 :])


@pytest.mark.parametrize("size", [0, 1, 1 << 20, (1 << 20) + 1])
def test_a_character_across_two_pieces_is_whole(size: int) -> None:
    rawjson.check_utf8(b"x" * size + "é".encode())
    for odd in NO_UTF8:
        with pytest.raises(NotJson):
            rawjson.check_utf8(b"x" * size + odd)


def chat_tool(name: str) -> Json:
    return {"type": "function", "function": {"name": name}}


KEEP_THINKING = {"type": "clear_thinking_20251015", "keep": "all"}
"""What Claude Code sends with every request."""


@pytest.mark.parametrize(
    ("dialect", "members", "obstacle"),
    [
        (CHAT, {"functions": []}, "functions"),
        (CHAT, {"functions": None, "n": None, "max_tokens": "many"}, ""),
        (CHAT, {"function_call": "auto"}, "function_call"),
        (CHAT, {"audio": {}}, "audio"),
        (CHAT, {"web_search_options": {}}, "web_search_options"),
        (CHAT, {"prediction": {}}, "prediction"),
        (CHAT, {"n": 1}, ""),
        (CHAT, {"n": 2}, "n"),
        (CHAT, {"logprobs": True}, "logprobs"),
        (CHAT, {"modalities": ["text"]}, ""),
        (CHAT, {"modalities": ["text", "audio"]}, "modalities"),
        (CHAT, {"tools": [chat_tool(str(number)) for number in range(1_000)]}, ""),
        # A client that has upstream keep, edit or compact the history is left alone.
        (MESSAGES, {"context_management": {}}, ""),
        (MESSAGES, {"context_management": {"edits": [KEEP_THINKING]}}, ""),
        (
            MESSAGES,
            {"context_management": {"edits": [{"type": "compact_20260112"}]}},
            "context_management",
        ),
        (
            MESSAGES,
            {"context_management": {"edits": [KEEP_THINKING, {"type": "clear_tools"}]}},
            "context_management",
        ),
        (MESSAGES, {"context_management": {"edits": [1]}}, "context_management"),
        (MESSAGES, {"thread": {"type": "continue", "previous_message_id": "msg_1"}}, "thread"),
        (MESSAGES, {"thread": None}, ""),
        (RESPONSES, {"background": False, "conversation": None}, ""),
        (RESPONSES, {"background": True}, "background"),
        (RESPONSES, {"previous_response_id": "r"}, "previous_response_id"),
        (RESPONSES, {"conversation": {"id": "c"}}, "conversation"),
        (RESPONSES, {"prompt": {"id": "p"}}, "prompt"),
        (RESPONSES, {"context_management": []}, "context_management"),
        (RESPONSES, {"input": [USER, {"type": "compaction_trigger"}]}, "compaction_trigger"),
    ],
)
def test_obstacles(dialect: Dialect, members: Json, obstacle: str) -> None:
    assert parsed(dialect, **members).obstacle == obstacle


@pytest.mark.parametrize(
    ("members", "unsent"),
    [
        ({"input": "Hello"}, True),
        ({"store": None}, True),
        ({"input": [USER, {"role": "developer", "content": "Briefly."}], "store": True}, True),
        ({"input": [USER, {"role": "assistant", "content": "Hi."}, USER], "store": True}, False),
        (
            {
                "input": [
                    USER,
                    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                ]
            },
            False,
        ),
        ({"input": [{"type": "compaction", "encrypted_content": "x"}, USER]}, False),
        ({"store": False}, False),
    ],
)
def test_a_beginning_that_upstream_keeps_may_be_all_that_a_client_sends(
    members: Json, unsent: bool
) -> None:
    assert parsed(RESPONSES, **members).unsent is unsent


def test_a_request_goes_on_from_the_last_round() -> None:
    result = {"type": "function_call_output", "call_id": "c1", "output": "x"}
    before = parsed(RESPONSES, input="hi", previous_response_id="r1")
    body = RESPONSES.continued(
        before, Continuation("r1", ("r1", "r2"), (json.dumps(result).encode(),))
    )
    assert json.loads(body) == {"model": "m", "previous_response_id": "r2", "input": [result, USER]}
    body = RESPONSES.continued(
        parsed(RESPONSES, previous_response_id="r1"), Continuation("r1", ("r1", "r2"), ())
    )
    assert json.loads(body)["input"] == [USER]


# -- what our tools are called ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dialect", "tools", "names"),
    [
        (CHAT, None, NAMES),
        (CHAT, [], NAMES),
        (CHAT, [chat_tool("bash")], NAMES),
        (CHAT, [chat_tool("grep")], OTHER_NAMES),
        (CHAT, [{"type": "custom", "custom": {"name": "read_file"}}], OTHER_NAMES),
        (CHAT, [{"type": "web_search"}, {"function": {"name": "grep"}}], OTHER_NAMES),
        (CHAT, [chat_tool("grep"), chat_tool("offload_grep")], None),
        (RESPONSES, [{"type": "custom", "name": "grep"}], OTHER_NAMES),
        (RESPONSES, [{"type": "web_search"}], NAMES),
    ],
)
def test_our_names_give_way_to_the_clients(
    dialect: Dialect, tools: Any, names: tuple[str, str] | None
) -> None:
    assert parsed(dialect, tools=tools).names == names


def named(*names: str) -> list[Json]:
    return [{"type": "function", "name": name, "parameters": {"type": "object"}} for name in names]


def test_our_names_give_way_to_tools_in_groups_and_in_items() -> None:
    """Codex defines each MCP server as a group, and others once it has searched for them."""
    group = {"type": "namespace", "name": "mcp__files__", "tools": named("read_file")}
    for tools in ([group], named("read_file")):
        assert parsed(RESPONSES, tools=[group]).names == OTHER_NAMES
        for found in (
            {"type": "additional_tools", "role": "developer", "tools": tools},
            {"type": "tool_search_output", "execution": "client", "call_id": "c1", "tools": tools},
            {"type": "tool_search_output", "execution": "server", "call_id": None, "tools": tools},
        ):
            assert parsed(RESPONSES, input=[USER, found]).names == OTHER_NAMES
            assert parsed(RESPONSES, input=[USER, found], tools=named("fetch")).names == OTHER_NAMES
    others = parsed(RESPONSES, tools=[{**group, "tools": named("write", "Grep")}])
    assert (others.names, others.theirs) == (NAMES, {"grep"})
    assert (
        parsed(
            RESPONSES, input=[USER, {"type": "message", "role": "user", "content": "grep"}]
        ).names
        == NAMES
    )


# -- the limit of the reply is lowered to what the window leaves, in every round -------------------

LIMITS = ("max_tokens", "max_completion_tokens")


def members(**values: Any) -> dict[str, Raw]:
    return rawjson.members(json.dumps(values).encode())


def changed(left: int | None, added: int = 0, **values: Any) -> dict[str, int]:
    found = lowered(members(**values), LIMITS, left, [b"x" * added])
    return {key: int(bytes(raw)) for key, raw in found.items()}


@pytest.mark.parametrize(
    ("left", "values", "expected"),
    [
        (5_000, {"max_tokens": 9_000}, {"max_tokens": 5_000}),
        (5_000, {"max_tokens": 5_000}, {}),
        (5_000, {"max_tokens": 9_000, "max_completion_tokens": 4_000}, {"max_tokens": 5_000}),
        (5_000, {}, {}),
        (None, {"max_tokens": 9_000}, {}),
        (-300, {"max_tokens": 9_000}, {"max_tokens": LEAST_REPLY}),
        (-300, {"max_tokens": 500}, {}),
        (
            2_000,
            {"max_tokens": 9_000, "thinking": {"type": "enabled", "budget_tokens": 4_000}},
            {"max_tokens": 4_001},
        ),
        (2_000, {"max_tokens": 9_000, "reasoning": {"max_tokens": 4_000}}, {"max_tokens": 4_001}),
        (2_000, {"max_tokens": 9_000, "thinking_budget": 4_000}, {"max_tokens": 4_001}),
        (
            2_000,
            {"max_tokens": 9_000, "thinking": "on", "reasoning": None, "extra_body": [1]},
            {"max_tokens": 2_000},
        ),
        (2_000, {"max_tokens": "many"}, {}),
    ],
)
def test_a_limit_is_lowered_to_what_is_left(
    left: int | None, values: dict[str, Any], expected: dict[str, int]
) -> None:
    assert changed(left, **values) == expected


def test_what_a_later_round_adds_leaves_less() -> None:
    assert changed(5_000, 6_000, max_tokens=9_000) == {"max_tokens": 3_000}


LIMIT = {
    "chat": "max_completion_tokens",
    "responses": "max_output_tokens",
    "messages": "max_tokens",
}


@pytest.mark.parametrize("dialect", FIELDS, ids=lambda dialect: dialect.name)
def test_every_dialect_lowers_its_own_limit_and_nothing_else(dialect: Dialect) -> None:
    field, entries = LIMIT[dialect.name], FIELDS[dialect]
    sent = {
        "model": "m",
        entries: [{"role": "user", "content": "hi"}],
        field: 9_000,
        "odd": {"a": 1},
    }
    asked = dialect.parse(json.dumps(sent).encode())
    assert dialect.reply_limit(asked, 5_000) == 5_000
    assert dialect.reply_limit(asked, 9_000) is None
    assert json.loads(dialect.with_lower_limit(asked, 5_000)) == sent | {field: 5_000}
    for left, expected in ((5_000, 5_000), (None, 9_000), (20_000, 9_000)):
        assert (
            json.loads(dialect.turn(asked, asked.entries, [], 8, left=left).request())[field]
            == expected
        )


@pytest.mark.parametrize(
    ("body", "model"),
    [
        (b'{"model": "m", "messages": {"not": "read"}}', "m"),
        (b'{"messages": [{"model": "nested"}], "model": "m\\u00e9"}', "mé"),
        (b'{"model": "first", "model": "last"}', "last"),
        (b'{"messages": []}', ""),
        (b'{"model": "m", "messages": ["\\ud83d"]}', "m"),
        (b'{"model": 1}', None),
        (b'{"model": "\\ud83d"}', None),
        (b'{"model": "m"', None),
        (b'{"model": "m"} {}', None),
        (b'["m"]', None),
        (b'{"model": "%b"}' % (b"m" * 2_000), None),
        (b'{"model": "m", "one_of_ours": null}', "m"),
        (b'{"model": "m", "one_of_ours": "1"}', None),
    ],
)
def test_a_glance_finds_the_model_or_leaves_the_body_to_be_read(
    body: bytes, model: str | None
) -> None:
    found = glanced(body, ("one_of_ours",))
    assert (None if found is None else found.model) == model
    assert found is None or (found.body == body and not found.stream and not found.entries)


@pytest.mark.parametrize("dialect", FIELDS)
def test_members_that_refer_to_records_are_read_of_a_request(dialect: Dialect) -> None:
    for name in dialect.refers:
        asked = parsed(dialect, **{name: "1"})
        assert "1" in (asked.continues, asked.credit)
    assert bool(dialect.refers) == (dialect is not CHAT)
