"""Checks requests as OpenAI's chat completions do, with a pure function of the request: `check(body, rules)`.

Lenient fakes hide a proxy's worst bugs, so this module refuses what the real API refuses, and in its words if they are
known (https://platform.openai.com/docs/api-reference/chat/create and the API's error replies).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

PARAMETERS = frozenset(
    """
    audio frequency_penalty function_call functions logit_bias logprobs max_completion_tokens max_tokens messages
    metadata modalities model n parallel_tool_calls prediction presence_penalty prompt_cache_key
    prompt_cache_retention reasoning_effort response_format safety_identifier seed service_tier stop store stream
    stream_options temperature tool_choice tools top_logprobs top_p user verbosity web_search_options
    """.split()  # noqa: SIM905 - a list of 35 strings is 35 lines
)
MESSAGE_FIELDS = {
    "system": frozenset({"role", "content", "name"}),
    "developer": frozenset({"role", "content", "name"}),
    "user": frozenset({"role", "content", "name"}),
    "assistant": frozenset({"role", "content", "name", "refusal", "audio", "tool_calls", "function_call"}),
    "tool": frozenset({"role", "content", "tool_call_id"}),
    "function": frozenset({"role", "content", "name"}),
}
PARTS = {
    "system": frozenset({"text"}),
    "developer": frozenset({"text"}),
    "user": frozenset({"text", "image_url", "input_audio", "file"}),
    "assistant": frozenset({"text", "refusal"}),
    "tool": frozenset({"text"}),
}
TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
MAX_TOOLS = 128
MAX_STOPS = 4
KINDS: dict[str, tuple[type, ...]] = {
    "model": (str,),
    "messages": (list,),
    "tools": (list,),
    "functions": (list,),
    "stream": (bool,),
    "store": (bool,),
    "logprobs": (bool,),
    "parallel_tool_calls": (bool,),
    "stream_options": (dict,),
    "metadata": (dict,),
    "response_format": (dict,),
    "temperature": (int, float),
    "top_p": (int, float),
    "user": (str,),
    "seed": (int,),
}

Json = dict[str, Any]


class Refused(Exception):
    """The API would not accept the request. `body()` returns the reply in OpenAI's error shape."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.message, self.param, self.code, self.status = message, param, code, status

    def body(self) -> Json:
        return {
            "error": {
                "message": self.message,
                "type": "invalid_request_error",
                "param": self.param,
                "code": self.code,
            }
        }


def approximate_tokens(text: str) -> int:
    """Count four bytes as a token, which is close enough to compare requests and the same on every machine."""
    return (len(text.encode("utf-8", "surrogatepass")) + 3) // 4


@dataclass(frozen=True)
class Rules:
    """How upstreams differ. `extra_fields` are accepted at the top level, in messages, parts, calls and tools."""

    extra_fields: Collection[str] = frozenset()
    context_window: int | None = None
    """Most tokens of a request and its `max_tokens` together. None means no limit."""
    count: Callable[[str], int] = approximate_tokens


def parse(body: bytes) -> Json:
    """Return the body as an object. Raises `Refused` if it is not a JSON object."""
    try:
        parsed = json.loads(body)
    except ValueError as broken:
        message = f"We could not parse the JSON body of your request. ({broken})"
        raise Refused(message) from broken
    if not isinstance(parsed, dict):
        raise Refused("We expected an object as the JSON body of your request.")
    return parsed


def check(body: Json, rules: Rules | None = None) -> None:
    """Raise `Refused` for the first thing in `body` that the API would not accept."""
    rules = rules or Rules()
    _check_parameters(body, rules)
    _check_numbers(body)
    _check_stream_options(body)
    _check_tools(body, rules)
    _check_tool_choice(body)
    _check_messages(body["messages"], rules)
    _check_pairing(body["messages"])
    _check_window(body, rules)


class Segment(NamedTuple):
    """A part of the prompt that the cache has in full, in part or not at all: its text and its tokens."""

    text: str
    tokens: int


def prompt_segments(body: Json, count: Callable[[str], int]) -> list[Segment]:
    """Return the prompt in upstream's order: a segment for the tools, then one for each message."""
    tools = body.get("tools")
    segments = [_segment(tools, count(json.dumps(tools)))] if tools else []
    return segments + [_segment(message, 4 + count(_text(message))) for message in body["messages"]]


def _segment(value: Any, tokens: int) -> Segment:
    return Segment(json.dumps(value, ensure_ascii=False), tokens)


def _text(message: Json) -> str:
    """Return a message's text: its content, reasoning, and its calls' names and arguments."""
    content = message.get("content") or ""
    parts = [content] if isinstance(content, str) else [part.get(part["type"]) for part in content]
    parts.append(message.get("reasoning_content"))
    for call in message.get("tool_calls") or ():
        parts += call[call["type"]].values()
    return "".join(part for part in parts if isinstance(part, str))


# Top level


def _check_parameters(body: Json, rules: Rules) -> None:
    for name in body:
        if name not in PARAMETERS and name not in rules.extra_fields:
            raise Refused(f"Unrecognized request argument supplied: {name}")
    for name in ("model", "messages"):
        if body.get(name) is None:
            raise Refused(f"Missing required parameter: '{name}'.", name, "missing_required_parameter")
    for name, kinds in KINDS.items():
        if body.get(name) is not None and not _is_a(body[name], kinds):
            raise _wrong_type(name, body[name], kinds[0].__name__)


def _check_numbers(body: Json) -> None:
    for name in ("max_tokens", "max_completion_tokens", "n"):
        value = body.get(name)
        if value is not None and not _is_a(value, (int,)):
            raise _wrong_type(name, value, "integer")
        if value is not None and value < 1:
            message = f"Invalid '{name}': integer below minimum value. Expected a value >= 1, but got {value} instead."
            raise Refused(message, name, "integer_below_min_value")
    if body.get("max_tokens") is not None and body.get("max_completion_tokens") is not None:
        raise Refused("Setting 'max_tokens' and 'max_completion_tokens' at the same time is not supported.")
    stop = body.get("stop")
    if isinstance(stop, list) and len(stop) > MAX_STOPS:
        raise Refused(f"Invalid 'stop': array too long. Expected at most {MAX_STOPS}.", "stop")


def _check_stream_options(body: Json) -> None:
    options = body.get("stream_options")
    if options is None:
        return
    if not body.get("stream"):
        raise Refused("The 'stream_options' parameter is only allowed when 'stream' is enabled.", "stream_options")
    _only(options, {"include_usage", "include_obfuscation"}, "stream_options", ())


def _check_window(body: Json, rules: Rules) -> None:
    if rules.context_window is None:
        return
    prompt = sum(segment.tokens for segment in prompt_segments(body, rules.count))
    reply = body.get("max_completion_tokens") or body.get("max_tokens") or 0
    if prompt + reply > rules.context_window:
        raise Refused(_window_message(rules.context_window, prompt, reply), "messages", "context_length_exceeded")


def _window_message(window: int, prompt: int, reply: int) -> str:
    said = f"However, you requested {prompt + reply} tokens ({prompt} in the messages, {reply} in the completion)."
    if not reply:
        said = f"However, your messages resulted in {prompt} tokens."
    return f"This model's maximum context length is {window} tokens. {said} Please reduce the length of the messages."


# Tools


def _check_tools(body: Json, rules: Rules) -> None:
    tools = body.get("tools")
    if tools is None:
        if body.get("parallel_tool_calls") is not None:
            raise Refused("'parallel_tool_calls' is only allowed when 'tools' are specified.", "parallel_tool_calls")
        return
    if not tools:
        raise Refused("Invalid 'tools': empty array. Expected at least 1.", "tools", "empty_array")
    if len(tools) > MAX_TOOLS:
        message = f"Invalid 'tools': array too long. Expected at most {MAX_TOOLS}, but got {len(tools)} instead."
        raise Refused(message, "tools", "array_above_max_length")
    for index, tool in enumerate(tools):
        _check_tool(tool, f"tools[{index}]", rules)
    names = [_tool_name(tool) for tool in tools]
    if len(set(names)) < len(names):
        raise Refused("Invalid 'tools': function names must be unique.", "tools")


def _check_tool(tool: Any, where: str, rules: Rules) -> None:
    if not isinstance(tool, dict):
        raise _wrong_type(where, tool, "object")
    kind = tool.get("type")
    if kind not in ("function", "custom"):
        raise Refused(f"Invalid value: {kind!r}. Supported values are: 'function' and 'custom'.", f"{where}.type")
    _only(tool, {"type", str(kind)}, where, rules.extra_fields)
    definition = tool.get(kind)
    if not isinstance(definition, dict):
        raise Refused(f"Missing required parameter: '{where}.{kind}'.", where, "missing_required_parameter")
    fields = {"name", "description", "format"} if kind == "custom" else {"name", "description", "parameters", "strict"}
    _only(definition, fields, f"{where}.{kind}", rules.extra_fields)
    _check_name(definition.get("name"), f"{where}.{kind}.name")
    for field, wanted in (("description", str), ("parameters", dict), ("strict", bool)):
        if definition.get(field) is not None and not isinstance(definition[field], wanted):
            raise _wrong_type(f"{where}.{kind}.{field}", definition[field], wanted.__name__)


def _check_tool_choice(body: Json) -> None:
    choice = body.get("tool_choice")
    if choice is None:
        return
    if not body.get("tools"):
        raise Refused("'tool_choice' is only allowed when 'tools' are specified.", "tool_choice")
    if isinstance(choice, str):
        if choice not in ("none", "auto", "required"):
            raise Refused(f"Invalid value: {choice!r}.", "tool_choice", "invalid_value")
        return
    present = {_tool_name(tool) for tool in body["tools"]}
    for name in _chosen(choice):
        if name not in present:
            raise Refused(f"Tool choice '{name}' not found in 'tools' parameter.", "tool_choice")


def _chosen(choice: Any) -> list[str]:
    """Return the tools' names in a `tool_choice` object."""
    match choice:
        case {"type": "function", "function": {"name": str(name)}} | {"type": "custom", "custom": {"name": str(name)}}:
            return [name]
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required", "tools": list(tools)}}:
            return [_tool_name(tool) for tool in tools]
    raise Refused("Invalid type for 'tool_choice'.", "tool_choice", "invalid_type")


def _tool_name(tool: Json) -> str:
    name: str = tool[tool["type"]]["name"]
    return name


def _check_name(name: Any, where: str) -> None:
    if not isinstance(name, str) or not TOOL_NAME.fullmatch(name):
        message = f"Invalid '{where}': string does not match pattern. Expected '^[a-zA-Z0-9_-]{{1,64}}$'."
        raise Refused(message, where, "invalid_value")


# Messages


def _check_messages(messages: list[Any], rules: Rules) -> None:
    if not messages:
        raise Refused("Invalid 'messages': empty array. Expected at least 1.", "messages", "empty_array")
    for index, message in enumerate(messages):
        _check_message(message, f"messages[{index}]", rules)


def _check_message(message: Any, where: str, rules: Rules) -> None:
    if not isinstance(message, dict):
        raise _wrong_type(where, message, "object")
    role = message.get("role")
    if role not in MESSAGE_FIELDS:
        supported = ", ".join(MESSAGE_FIELDS)
        raise Refused(f"Invalid value: {role!r}. Supported values are: {supported}.", f"{where}.role", "invalid_value")
    _only(message, MESSAGE_FIELDS[role], where, rules.extra_fields)
    if role == "assistant":
        _check_assistant(message, where, rules)
    elif role == "tool" and not isinstance(message.get("tool_call_id"), str):
        raise Refused(f"Missing required parameter: '{where}.tool_call_id'.", where, "missing_required_parameter")
    if message.get("content") is not None:
        _check_content(message["content"], role, f"{where}.content", rules)
    elif role not in ("assistant", "function"):
        raise _wrong_type(f"{where}.content", None, "string or array")


def _check_content(content: Any, role: str, where: str, rules: Rules) -> None:
    if isinstance(content, str):
        return
    if not isinstance(content, list):
        raise _wrong_type(where, content, "string or array")
    if not content:
        raise Refused(f"Invalid '{where}': empty array.", where, "empty_array")
    for index, part in enumerate(content):
        _check_part(part, role, f"{where}[{index}]", rules)


def _check_part(part: Any, role: str, where: str, rules: Rules) -> None:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in PARTS.get(role, ()):
        raise Refused(f"Invalid value: {kind!r} as a content part of role {role}.", f"{where}.type", "invalid_value")
    _only(part, {"type", str(kind)}, where, rules.extra_fields)
    wanted = str if kind in ("text", "refusal") else dict
    if not isinstance(part.get(kind), wanted):
        raise _wrong_type(f"{where}.{kind}", part.get(kind), wanted.__name__)


def _check_assistant(message: Json, where: str, rules: Rules) -> None:
    if all(message.get(field) is None for field in ("content", "tool_calls", "function_call", "refusal", "audio")):
        raise Refused(f"Invalid '{where}': expected 'content' or 'tool_calls'.", where)
    calls = message.get("tool_calls")
    if calls is None:
        return
    if not isinstance(calls, list) or not calls:
        raise Refused(f"Invalid '{where}.tool_calls': expected a non-empty array.", f"{where}.tool_calls")
    for index, call in enumerate(calls):
        _check_call(call, f"{where}.tool_calls[{index}]", rules)
    ids = [call["id"] for call in calls]
    if len(set(ids)) < len(ids):
        raise Refused(f"Duplicate value for 'tool_call_id' in {where}.", f"{where}.tool_calls")


def _check_call(call: Any, where: str, rules: Rules) -> None:
    if not isinstance(call, dict) or not isinstance(call.get("id"), str) or not call["id"]:
        raise Refused(f"Missing required parameter: '{where}.id'.", where, "missing_required_parameter")
    kind = call.get("type")
    if kind not in ("function", "custom"):
        raise Refused(f"Invalid value: {kind!r} for '{where}.type'.", f"{where}.type", "invalid_value")
    _only(call, {"id", "type", str(kind)}, where, rules.extra_fields)
    text = "arguments" if kind == "function" else "input"
    called = call.get(kind)
    if not isinstance(called, dict):
        raise Refused(f"Missing required parameter: '{where}.{kind}'.", where, "missing_required_parameter")
    _only(called, {"name", text}, f"{where}.{kind}", rules.extra_fields)
    _check_name(called.get("name"), f"{where}.{kind}.name")
    if not isinstance(called.get(text), str):
        raise _wrong_type(f"{where}.{kind}.{text}", called.get(text), "string")


def _check_pairing(messages: list[Json]) -> None:
    """Check that every call is answered once, directly after its message, and that nothing else is answered."""
    open_calls: list[str] = []
    for index, message in enumerate(messages):
        if message["role"] == "tool":
            if message["tool_call_id"] not in open_calls:
                raise _orphan(index)
            open_calls.remove(message["tool_call_id"])
            continue
        if open_calls:
            raise _unanswered(index, open_calls)
        open_calls = [call["id"] for call in message.get("tool_calls") or ()]
    if open_calls:
        raise _unanswered(len(messages), open_calls)


def _orphan(index: int) -> Refused:
    message = (
        "Invalid parameter: messages with role 'tool' must be a response to a preceeding message with 'tool_calls'."
    )
    return Refused(message, f"messages.[{index}].role")


def _unanswered(index: int, ids: list[str]) -> Refused:
    message = (
        "An assistant message with 'tool_calls' must be followed by tool messages responding to each 'tool_call_id'. "
        f"The following tool_call_ids did not have response messages: {', '.join(ids)}"
    )
    return Refused(message, f"messages.[{index}].role")


# Helpers that several checks share


def _only(value: Json, fields: Collection[str], where: str, extra: Collection[str]) -> None:
    unknown: Iterator[str] = (field for field in value if field not in fields and field not in extra)
    if (field := next(unknown, None)) is not None:
        raise Refused(f"Unknown parameter: '{where}.{field}'.", f"{where}.{field}", "unknown_parameter")


def _is_a(value: Any, kinds: tuple[type, ...]) -> bool:
    """Return what `isinstance` does, except that JSON's true is not a number."""
    return isinstance(value, kinds) and (not isinstance(value, bool) or bool in kinds)


def _wrong_type(where: str, value: Any, wanted: str) -> Refused:
    got = "null" if value is None else type(value).__name__
    return Refused(f"Invalid type for '{where}': expected {wanted}, but got {got} instead.", where, "invalid_type")
