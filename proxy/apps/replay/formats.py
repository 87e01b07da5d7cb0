"""The formats of other tools that `replay` reads, told apart by the members of a record.

Exports, which hold one request in each record, are read here; `sessions` reads the files of agents.
Shapes as these versions write them: HAR 1.2, LiteLLM 1.106 (`StandardLoggingPayload`,
`LiteLLM_SpendLogs`), Langfuse SDK 5.0, LangSmith SDK 0.15, and OpenTelemetry's GenAI conventions
(`gen_ai.input.messages`).
"""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from math import inf
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

from proxy import rawjson
from proxy.apps.replay.sessions import (
    BARE,
    CHAT,
    MESSAGES,
    Exported,
    Json,
    RecordedSession,
    bare,
    call,
    claude_code,
    codex,
    inside,
    loaded,
    opencode,
    opencode_export,
    opencode_older,
    unread,
    usage_of,
)
from proxy.dialects import for_request
from proxy.dialects.usage import Reported, reported

HAR = "HAR entry"
ADDRESSED = "request with its address"
LIST = "list of messages"
ANTHROPIC_BATCH = "Anthropic's batch"

# -- requests with their address: batches, captures and HAR ----------------------------------------


def addressed(record: Json, text: bytes) -> Iterator[Exported]:
    """A request of a batch or a capture, whose record is this text."""
    try:
        said = msgspec.convert(record.get("usage"), Reported | None)
    except msgspec.ValidationError:
        said = None
    method = record.get("method") if isinstance(record.get("method"), str) else "POST"
    body = bytes(rawjson.members(text)["body"])
    caller = str(record.get("namespace") or "")
    beta = record.get("beta")
    sent = _sent(method, record["url"], body, said, caller)
    yield sent._replace(beta=beta) if isinstance(beta, str) else sent


def har(record: Json, session: RecordedSession) -> Iterator[Exported]:
    """An entry of a HAR. What else a browser loaded says nothing of a model."""
    asked = record["request"]
    reply = record.get("response")
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
    text = inside(content, "text")
    if not isinstance(text, str):
        return b""
    if str(inside(content, "encoding")).lower() != "base64":
        return text.encode("utf-8", "surrogatepass")
    try:
        return b64decode(text)
    except ValueError:
        return b""


# -- exports: one request in each record -----------------------------------------------------------


class Export(NamedTuple):
    """Where an export keeps a request: for each part, the paths at which it may stand, with dots
    and spaces between."""

    body: str
    """A whole body, or the list of its messages."""
    missing: str
    """Why there may be none, and what to do about that."""
    model: str = "model"
    tools: str = ""
    usage: str = "usage"
    caller: str = ""
    wanted: tuple[str, str] | None = None
    """A member and its value, without which a record asks no model."""

    def read(self, record: Json, session: RecordedSession) -> Iterator[Exported]:
        """The request of an export's record."""
        if self.wanted and str(record.get(self.wanted[0])).upper() != self.wanted[1]:
            return

        def all_of(paths: str) -> Iterator[Any]:
            found = (inside(record, *path.split(".")) for path in paths.split())
            return (one for one in found if one is not None)

        body = next(filter(None, map(_as_body, all_of(self.body))), None)
        if body is None:
            yield Exported(None, why=self.missing)
            return
        if "responses" in str(record.get("call_type")) and "messages" in body:
            # LiteLLM calls the history of every API its messages
            body["input"] = body.pop("messages")
        own = {"model": str(next(all_of(self.model), "")), "tools": next(all_of(self.tools), None)}
        whole = {key: value for key, value in (own | body).items() if value is not None}
        anthropic = record.get("call_type") == "anthropic_messages" or "/messages" in str(
            record.get("request_path")
        )
        said = usage_of(next(all_of(self.usage), None))
        yield Exported(
            whole, MESSAGES if anthropic else "", said, str(next(all_of(self.caller), ""))
        )


LANGFUSE = Export(
    body="input",
    missing="Langfuse kept no list of messages as the input",
    model="model provided_model_name providedModelName internal_model",
    usage="usageDetails usage_details",
    wanted=("type", "GENERATION"),
)
LITELLM = Export(
    body="proxy_server_request.body proxy_server_request messages",
    missing="LiteLLM kept no messages; `store_prompts_in_spend_logs: true` keeps them",
    tools="model_parameters.tools",
    usage="response.usage",
    caller="api_key metadata.user_api_key_hash",
)
BATCH = Export(body="params", missing="the batch's request has no `params`")
LANGSMITH = Export(
    body="inputs",
    missing="LangSmith kept no list of messages as the input",
    model="extra.invocation_params.model extra.metadata.ls_model_name",
    tools="extra.invocation_params.tools",
    usage="outputs.usage_metadata extra.metadata.usage_metadata",
    wanted=("run_type", "LLM"),
)
HELICONE = Export(
    body="request_body",
    missing="Helicone exported no body; export again with --include-body",
    usage="response_body.usage",
    caller="request_user_id",
)
STORED = Export(
    body="messages input",
    missing="a stored completion has no messages; add those of GET /chat/completions/ID/messages as `messages`",
    tools="tools",
)


def _as_body(given: Any) -> Json | None:
    """The body of what may be one, or its messages, some of which are LangChain's."""
    given = loaded(given)
    body = dict(given) if isinstance(given, dict) else {"messages": given}
    for key in ("messages", "input"):
        history = loaded(body.get(key))
        if isinstance(history, list) and history:
            history = history[0] if isinstance(history[0], list) else history
            body[key] = [
                _langchain(one) if isinstance(one, dict) and "lc" in one else one for one in history
            ]
            return body
    return None


_LANGCHAIN = {
    "SystemMessage": "system",
    "HumanMessage": "user",
    "AIMessage": "assistant",
    "ToolMessage": "tool",
}


def _langchain(message: Json) -> Json:
    """A chat message of LangChain's constructor of one."""
    said = message.get("kwargs") or {}
    role = _LANGCHAIN.get(str((message.get("id") or [""])[-1]).removesuffix("Chunk"), "user")
    made: Json = {"role": role, "content": said.get("content")}
    if role == "assistant" and said.get("tool_calls"):
        calls = [
            call(one.get("id") or "", one.get("name") or "", one.get("args"))
            for one in said["tool_calls"]
        ]
        made |= {"content": said.get("content") or None, "tool_calls": calls}
    if role == "tool":
        made["tool_call_id"] = said.get("tool_call_id") or ""
    return made


# -- OpenTelemetry ---------------------------------------------------------------------------------


OPERATIONS = ("chat", "generate_content", "text_completion")
"""Those that ask a model. The span of an agent has the messages of its requests once more."""


def otlp(record: Json, session: RecordedSession) -> Iterator[Exported]:
    """Spans in OTLP's JSON: `resourceSpans`, each with `scopeSpans`."""
    for resource in record.get("resourceSpans") or record.get("resource_spans") or []:
        for scope in resource.get("scopeSpans") or resource.get("scope_spans") or []:
            for one in scope.get("spans") or []:
                yield from span(one, session)


def span(record: Json, session: RecordedSession) -> Iterator[Exported]:
    """One span with GenAI attributes, of OTLP or as the SDK prints it. Spans of anything else say
    nothing."""
    found = _plain(record.get("attributes") or {})
    for event in record.get("events") or []:  # where contents may stand as well
        found = _plain(event.get("attributes") or {}) | found
    model = str(
        found.get("gen_ai.request.model") or found.get("langfuse.observation.model.name") or ""
    )
    if kind := found.get("langfuse.observation.type"):
        given = found.get("langfuse.observation.input")
        usage = found.get("langfuse.observation.usage_details")
        shown = {"type": kind, "model": model, "input": given, "usage_details": usage}
        yield from LANGFUSE.read(shown, session)
        return
    operation = found.get("gen_ai.operation.name", "chat")
    if operation not in OPERATIONS or not any(key.startswith("gen_ai.") for key in found):
        return
    history = loaded(found.get("gen_ai.input.messages"))
    if not isinstance(history, list):
        yield Exported(
            None,
            why="the span has no `gen_ai.input.messages`; have your instrumentation capture content",
        )
        return
    system = loaded(found.get("gen_ai.system_instructions"))
    tools = loaded(found.get("gen_ai.tool.definitions"))
    opening = [{"role": "system", "content": _contents(system)}] if system else []
    body = {
        "model": model,
        "messages": [*opening, *(each for one in history for each in _messages(one))],
    }
    body |= {"tools": tools} if isinstance(tools, list) and tools else {}
    spent = {name: found.get(f"gen_ai.usage.{name}") for name in ("input_tokens", "output_tokens")}
    yield Exported(
        body,
        CHAT,
        usage_of(spent | {"cached_tokens": found.get("gen_ai.usage.cache_read.input_tokens")}),
    )


def _plain(attributes: Any) -> Json:
    """Attributes as an object. In OTLP's JSON, each value has its type beside it, and whole numbers
    are texts."""
    if isinstance(attributes, dict):
        return attributes
    return {one["key"]: _value(one.get("value") or {}) for one in attributes}


def _value(typed: Json) -> Any:
    value: Any
    kind, value = next(iter(typed.items()), ("", None))
    match kind:
        case "intValue":
            return int(value)
        case "arrayValue":
            return [_value(one) for one in value.get("values") or []]
        case "kvlistValue":
            return _plain(value.get("values") or [])
    return value


def _contents(parts: list[Any]) -> str:
    texts = (part if isinstance(part, str) else part.get("content") for part in parts)
    return "\n".join(text for text in texts if isinstance(text, str))


def _messages(message: Json) -> Iterator[Json]:
    """The chat messages of one message of the GenAI conventions: its texts and calls, and each
    result by itself."""
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


# -- when it was asked -----------------------------------------------------------------------------

_TIMES = (
    "timestamp", "time", "startTime", "start_time", "startedDateTime", "message.time.created", "info.time.created",
    "created_at", "created", "request_created_at",
)  # fmt: skip
"""Where records have the time of their request: as text (ISO 8601), or in seconds or parts of them."""
_LARGEST = 1e11
"""A number above this is in milliseconds or less, until the year 5138."""


def when(record: Json) -> float:
    """Return when a record was written, in seconds since the epoch; 0 if it does not say."""
    for path in _TIMES:
        if seconds := _seconds(inside(record, *path.split("."))):
            return seconds
    return 0.0


def _seconds(said: Any) -> float:
    try:
        if isinstance(said, str) and not said.isdecimal():
            found = datetime.fromisoformat(said)
            said = (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()
        number = float(said)
    except (TypeError, ValueError, OverflowError):
        return 0.0
    while _LARGEST < number < inf:
        number /= 1_000
    return number if 0 < number < _LARGEST else 0.0


# -- the table -------------------------------------------------------------------------------------


class Format(NamedTuple):
    name: str
    """As `replay` names it."""
    sees: Callable[[Json], bool]
    read: Callable[[Json, RecordedSession], Iterator[Exported]]


def _has(*names: str, one_of: tuple[str, ...] = ()) -> Callable[[Json], bool]:
    """Whether a record has all of these members, and one of the others if there are some."""
    return lambda record: (
        record.keys() >= set(names) and (not one_of or not record.keys().isdisjoint(one_of))
    )


def _exports_opencode(record: Json) -> bool:
    """Whether this is what `opencode export` writes (anomalyco/opencode#25688)."""
    messages = record.get("messages")
    first = messages[0] if isinstance(messages, list) and messages else None
    return isinstance(record.get("info"), dict) and inside(first, "info", "role") is not None


def _kimi(record: Json) -> bool:
    """Whether this is a line of Kimi Code's `wire.jsonl`, or of the older `context.jsonl`."""
    kind = str(record.get("type"))
    said = kind == "metadata" and "protocol_version" in record
    return said or kind.startswith("context.") or record.get("role") in ("_checkpoint", "_usage")


FORMATS = (
    Format(HAR, lambda record: inside(record, "request", "url") is not None, har),
    Format(
        "Claude Code's session",
        _has("type", one_of=("sessionId", "leafUuid", "isSnapshotUpdate")),
        claude_code,
    ),
    Format("Codex's session", _has("timestamp", "type", "payload"), codex),
    Format("opencode's session", _has("session", "message", "parts"), opencode),
    Format("opencode's export", _exports_opencode, opencode_export),
    Format(LIST, _has(BARE), bare),
    Format("Gemini CLI's session", _has("sessionId", "projectHash"), unread),
    Format("Gemini CLI's session", lambda record: record.get("type") == "gemini", unread),
    Format("Kimi Code's session", _kimi, unread),
    Format(
        "opencode's older storage",
        _has("sessionID", "id", one_of=("role", "messageID")),
        opencode_older,
    ),
    Format(ANTHROPIC_BATCH, _has("custom_id", "params"), BATCH.read),
    Format("LiteLLM's log", _has("call_type", one_of=("messages", "spend")), LITELLM.read),
    Format("LangSmith's run", _has("run_type", "inputs"), LANGSMITH.read),
    Format("Helicone's request", _has("request_id", "request_model"), HELICONE.read),
    Format("OpenTelemetry's spans", _has(one_of=("resourceSpans", "resource_spans")), otlp),
    Format("OpenTelemetry's span", _has("attributes", "context", "kind"), span),
    Format(
        "Langfuse's observation",
        _has("type", "input", one_of=("traceId", "trace_id")),
        LANGFUSE.read,
    ),
    Format(
        "OpenAI's stored completion",
        lambda record: record.get("object") == "chat.completion",
        STORED.read,
    ),
)
"""In the order in which they are tried. A record of none of them is a request's body."""

SESSIONS = frozenset(
    one.name for one in FORMATS if one.read in (claude_code, codex, opencode, opencode_export)
)
"""Those whose records are put together to what was sent."""

LISTS = ("data", "observations", "runs", "spans", "entries", "requests", "conversations")
"""Members of one JSON document whose list holds its records."""
