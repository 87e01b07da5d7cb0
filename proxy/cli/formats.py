"""The formats of other tools that `replay` reads, told apart by the members of a record.

Session files of agents are in `sessions`; exports, which hold one request in each record, are here. Shapes as these
versions write them: HAR 1.2, LiteLLM 1.106 (`StandardLoggingPayload`, `LiteLLM_SpendLogs`), Langfuse SDK 5.0,
LangSmith SDK 0.15, and OpenTelemetry's GenAI conventions (`gen_ai.input.messages`).
"""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

from proxy.cli.records import (
    CHAT,
    MESSAGES,
    Exported,
    Json,
    RecordReader,
    anthropic_usage,
    call,
    cost,
    inside,
    loaded,
)
from proxy.cli.sessions import ClaudeCode, Codex, Opencode
from proxy.dialects import for_request
from proxy.dialects.usage import Reported, reported

HAR, ADDRESSED = "HAR entry", "request with its address"

# -- requests with their address: batches, captures and HAR ------------------------------------------------------------


def addressed(record: Json, body: bytes) -> Exported:
    """A request of a batch or a capture, of which `body` has the bytes."""
    try:
        said = msgspec.convert(record.get("usage"), Reported | None)
    except msgspec.ValidationError:
        said = None
    method = record.get("method") if isinstance(record.get("method"), str) else "POST"
    return _sent(str(method), record["url"], body, said, str(record.get("namespace") or ""))


def har(record: Json) -> Iterator[Exported]:
    """An entry of a HAR. What else a browser loaded says nothing of a model."""
    asked, reply = record["request"], record.get("response")
    said = reported(_content(inside(reply, "content"))) if inside(reply, "status") == 200 else None
    yield _sent(asked.get("method"), asked["url"], _content(asked.get("postData")), said)


def _sent(method: Any, url: Any, body: bytes, said: Reported | None, caller: str = "") -> Exported:
    try:
        path = urlsplit(url).path.encode("utf-8", "surrogatepass")
    except (ValueError, TypeError, AttributeError):
        path = b""
    dialect = for_request(str(method), path)
    if dialect is None or dialect.counts:
        return Exported(None)
    return Exported(body, dialect.name, said, caller)


def _content(content: Any) -> bytes:
    """The bytes of a request or a reply in a HAR; empty if there are none."""
    text, encoding = inside(content, "text"), inside(content, "encoding")
    if not isinstance(text, str):
        return b""
    if str(encoding).lower() != "base64":
        return text.encode("utf-8", "surrogatepass")
    try:
        return b64decode(text)
    except ValueError:
        return b""


# -- exports: one request in each record -------------------------------------------------------------------------------

Path = tuple[str, ...]


class Export(NamedTuple):
    """Where an export keeps a request: for each part, the paths at which it may stand."""

    body: Sequence[Path]
    """A whole body, or the list of its messages."""
    missing: str
    """Why there may be none, and what to do about that."""
    model: Sequence[Path] = (("model",),)
    tools: Sequence[Path] = ()
    usage: Sequence[Path] = (("usage",),)
    caller: Sequence[Path] = ()
    wanted: tuple[str, str] | None = None
    """A member and its value, without which a record asks no model."""


LITELLM = Export(
    body=(("proxy_server_request", "body"), ("proxy_server_request",), ("messages",)),
    missing="LiteLLM kept no messages; `store_prompts_in_spend_logs: true` keeps them",
    tools=(("model_parameters", "tools"),),
    usage=(("response", "usage"),),
    caller=(("api_key",), ("metadata", "user_api_key_hash")),
)
LANGFUSE = Export(
    body=(("input",),),
    missing="Langfuse kept no list of messages as the input",
    model=(("model",), ("provided_model_name",), ("providedModelName",), ("internal_model",)),
    usage=(("usageDetails",), ("usage_details",)),
    wanted=("type", "GENERATION"),
)
LANGSMITH = Export(
    body=(("inputs",),),
    missing="LangSmith kept no list of messages as the input",
    model=(("extra", "invocation_params", "model"), ("extra", "metadata", "ls_model_name")),
    tools=(("extra", "invocation_params", "tools"),),
    usage=(("outputs", "usage_metadata"), ("extra", "metadata", "usage_metadata")),
    wanted=("run_type", "LLM"),
)
HELICONE = Export(
    body=(("request_body",),),
    missing="Helicone exported no body; export again with --include-body",
    usage=(("response_body", "usage"),),
    caller=(("request_user_id",),),
)
STORED = Export(
    body=(("messages",), ("input",)),
    missing="a stored completion has no messages; add those of GET /chat/completions/ID/messages as `messages`",
    tools=(("tools",),),
)


def exported(record: Json, shape: Export) -> Iterator[Exported]:
    if shape.wanted and str(record.get(shape.wanted[0])).upper() != shape.wanted[1]:
        return
    found = (loaded(inside(record, *path)) for path in shape.body)
    body = next((made for made in map(_as_body, found) if made), None)
    if body is None:
        yield Exported(None, why=shape.missing)
        return
    if "responses" in str(record.get("call_type")) and "messages" in body:
        body["input"] = body.pop("messages")  # LiteLLM calls the history of every API its messages
    own = {"model": str(_first(record, shape.model) or ""), "tools": _first(record, shape.tools)}
    whole = {key: value for key, value in (own | body).items() if value is not None}
    anthropic = record.get("call_type") == "anthropic_messages" or "/messages" in str(record.get("request_path"))
    caller = str(_first(record, shape.caller) or "")
    yield Exported(whole, MESSAGES if anthropic else "", _usage(_first(record, shape.usage)), caller)


def _as_body(given: Any) -> Json | None:
    """The body of what may be one, or its messages, some of which are LangChain's."""
    body = dict(given) if isinstance(given, dict) else {"messages": given}
    for key in ("messages", "input"):
        history = loaded(body.get(key))
        if isinstance(history, list) and history:
            history = history[0] if isinstance(history[0], list) else history
            body[key] = [_langchain(one) if isinstance(one, dict) and "lc" in one else one for one in history]
            return body
    return None


def _first(record: Json, paths: Sequence[Path]) -> Any:
    return next((found for path in paths if (found := inside(record, *path))), None)


_LANGCHAIN = {"SystemMessage": "system", "HumanMessage": "user", "AIMessage": "assistant", "ToolMessage": "tool"}


def _langchain(message: Json) -> Json:
    """A chat message of LangChain's constructor of one."""
    said = message.get("kwargs") or {}
    role = _LANGCHAIN.get(str((message.get("id") or [""])[-1]).removesuffix("Chunk"), "user")
    made: Json = {"role": role, "content": said.get("content")}
    if role == "assistant" and said.get("tool_calls"):
        calls = [call(one.get("id") or "", one.get("name") or "", one.get("args")) for one in said["tool_calls"]]
        made |= {"content": said.get("content") or None, "tool_calls": calls}
    if role == "tool":
        made["tool_call_id"] = said.get("tool_call_id") or ""
    return made


def _usage(usage: Any) -> Reported | None:
    """Usage in the names of OpenAI, Anthropic or LangChain; None if it does not say how many tokens were cached."""
    if inside(usage, "cache_read_input_tokens") is not None:
        return anthropic_usage(usage)
    for details, cached in (
        ("prompt_tokens_details", "cached_tokens"),
        ("input_tokens_details", "cached_tokens"),
        ("input_token_details", "cache_read"),
    ):
        if (tokens := inside(usage, details, cached)) is not None:
            prompt = inside(usage, "prompt_tokens") or inside(usage, "input_tokens")
            return cost(prompt, inside(usage, "completion_tokens") or inside(usage, "output_tokens"), tokens)
    return None


# -- OpenTelemetry -----------------------------------------------------------------------------------------------------


def otlp(record: Json) -> Iterator[Exported]:
    """Spans in OTLP's JSON: `resourceSpans`, each with `scopeSpans`."""
    for resource in record.get("resourceSpans") or record.get("resource_spans") or []:
        for scope in resource.get("scopeSpans") or resource.get("scope_spans") or []:
            for one in scope.get("spans") or []:
                yield from span(one)


def span(record: Json) -> Iterator[Exported]:
    """One span with GenAI attributes, of OTLP or as the SDK prints it. Spans of anything else say nothing."""
    found = record.get("attributes") or {}
    if isinstance(found, list):
        found = {one["key"]: _plain(one.get("value") or {}) for one in found if "key" in one}
    model = str(found.get("gen_ai.request.model") or found.get("langfuse.observation.model.name") or "")
    if kind := found.get("langfuse.observation.type"):
        given, usage = found.get("langfuse.observation.input"), found.get("langfuse.observation.usage_details")
        yield from exported({"type": kind, "model": model, "input": given, "usage_details": loaded(usage)}, LANGFUSE)
        return
    if not any(key.startswith("gen_ai.") for key in found):
        return
    history = loaded(found.get("gen_ai.input.messages"))
    if not isinstance(history, list):
        yield Exported(None, why="the span has no `gen_ai.input.messages`; have your instrumentation capture content")
        return
    system, tools = loaded(found.get("gen_ai.system_instructions")), loaded(found.get("gen_ai.tool.definitions"))
    opening = [{"role": "system", "content": _contents(system)}] if system else []
    body = {"model": model, "messages": [*opening, *(each for one in history for each in _parts(one))]}
    spent = [found.get(f"gen_ai.usage.{name}") for name in ("input_tokens", "output_tokens", "cache_read.input_tokens")]
    said = cost(*spent) if spent[2] else None
    yield Exported(body | ({"tools": tools} if isinstance(tools, list) and tools else {}), CHAT, said)


def _plain(value: Json) -> Any:
    """The value of an attribute in OTLP's JSON. Whole numbers are texts there."""
    if "intValue" in value:
        return int(value["intValue"])
    return next(iter(value.values()), None)


def _contents(parts: Sequence[Any]) -> str:
    texts = (part if isinstance(part, str) else part.get("content") for part in parts)
    return "\n".join(text for text in texts if isinstance(text, str))


def _parts(message: Json) -> Iterator[Json]:
    """The chat messages of one message of the GenAI conventions: its texts and calls, and each result by itself."""
    parts = [part for part in message.get("parts") or [] if isinstance(part, dict)]
    calls = [part for part in parts if part.get("type") == "tool_call"]
    results = [part for part in parts if part.get("type") == "tool_call_response"]
    said = [call(one.get("id") or "", one.get("name") or "", one.get("arguments")) for one in calls]
    text = _contents([part for part in parts if part.get("type") in ("text", "reasoning")])
    if said or text or not results:
        made = {"role": message.get("role", "user"), "content": text or None}
        yield {**made, "tool_calls": said} if said else made
    for one in results:
        answer = one.get("response", one.get("result", ""))
        content = answer if isinstance(answer, str) else json.dumps(answer)
        yield {"role": "tool", "tool_call_id": one.get("id") or "", "content": content}


# -- the table ---------------------------------------------------------------------------------------------------------


class Format(NamedTuple):
    name: str
    """As `replay` names it."""
    sees: Callable[[Json], bool]
    reader: Callable[[], RecordReader]


class Each(RecordReader):
    """A reader of records that have nothing to do with each other."""

    def __init__(self, read: Callable[[Json], Iterator[Exported]]) -> None:
        self._read = read

    def take(self, record: Json) -> Iterator[Exported]:
        return self._read(record)


def _has(*names: str, one_of: Sequence[str] = ()) -> Callable[[Json], bool]:
    """Whether a record has all of these members, and one of the others if there are some."""
    return lambda record: record.keys() >= set(names) and (not one_of or not record.keys().isdisjoint(one_of))


def _each(read: Callable[[Json], Iterator[Exported]]) -> Callable[[], RecordReader]:
    return lambda: Each(read)


def _of(shape: Export) -> Callable[[], RecordReader]:
    return lambda: Each(lambda record: exported(record, shape))


FORMATS = (
    Format(HAR, lambda record: inside(record, "request", "url") is not None, _each(har)),
    Format("Claude Code's session", _has("type", one_of=("sessionId", "leafUuid", "isSnapshotUpdate")), ClaudeCode),
    Format("Codex's session", _has("timestamp", "type", "payload"), Codex),
    Format("opencode's session", _has("session", "message", "parts"), Opencode),
    Format("LiteLLM's log", _has("call_type", one_of=("messages", "spend")), _of(LITELLM)),
    Format("LangSmith's run", _has("run_type", "inputs"), _of(LANGSMITH)),
    Format("Helicone's request", _has("request_id", "request_model"), _of(HELICONE)),
    Format("OpenTelemetry's spans", _has(one_of=("resourceSpans", "resource_spans")), _each(otlp)),
    Format("OpenTelemetry's span", _has("attributes", "context", "kind"), _each(span)),
    Format("Langfuse's observation", _has("type", "input", one_of=("traceId", "trace_id")), _of(LANGFUSE)),
    Format("OpenAI's stored completion", lambda record: record.get("object") == "chat.completion", _of(STORED)),
)
"""In the order in which they are tried. A record of none of them is a request's body."""

LISTS = ("data", "observations", "runs", "spans", "entries", "requests", "conversations")
"""Members of one JSON document whose list holds its records."""
