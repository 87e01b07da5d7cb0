"""The formats of other tools that `replay` reads, told apart by the members of a record.

Session files of agents are in `sessions`; exports, which hold one request in each record, are here. Shapes as these
versions write them: LiteLLM 1.106 (`StandardLoggingPayload`, `LiteLLM_SpendLogs`), Langfuse SDK 5.0, LangSmith SDK
0.15, and OpenTelemetry's GenAI conventions (`gen_ai.input.messages`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from msgspec import Raw

from proxy.cli.records import (
    CHAT,
    MESSAGES,
    Exported,
    Json,
    RecordReader,
    anthropic_usage,
    call,
    inside,
    loaded,
    number,
)
from proxy.cli.sessions import ClaudeCode, Codex, Opencode
from proxy.dialects.usage import Reported
from proxy.rawjson import text_of

Members = Mapping[str, Raw]


class Format(NamedTuple):
    """A format that we recognise."""

    name: str
    """As `replay` names it."""
    sees: Callable[[Members], bool]
    reader: Callable[[], RecordReader]


# -- exports: one request in each record -------------------------------------------------------------------------------


class Each:
    """A reader of records that have nothing to do with each other."""

    def __init__(self, read: Callable[[Json], Iterator[Exported]]) -> None:
        self._read = read

    def take(self, record: Json) -> Iterator[Exported]:
        return self._read(record)

    def end(self) -> Iterator[Exported]:
        yield from ()


def litellm(record: Json) -> Iterator[Exported]:
    """A row of LiteLLM's spend logs, or a `StandardLoggingPayload`."""
    usage = inside(record, "response", "usage")
    caller = str(record.get("api_key") or inside(record, "metadata", "user_api_key_hash") or "")
    request = loaded(record.get("proxy_server_request"))
    body = inside(request, "body") or request
    if not (isinstance(body, dict) and ("messages" in body or "input" in body)):
        history, parameters = loaded(record.get("messages")), loaded(record.get("model_parameters"))
        key = "input" if "responses" in str(record.get("call_type")) else "messages"
        body = {**(parameters if isinstance(parameters, dict) else {}), "model": record.get("model"), key: history}
        if not isinstance(history, list) or not history:
            yield Exported(None, why="LiteLLM kept no messages; `store_prompts_in_spend_logs: true` keeps them")
            return
    api = MESSAGES if record.get("call_type") == "anthropic_messages" else ""
    yield Exported(body, api, _any_usage(usage), caller)


def langfuse(record: Json) -> Iterator[Exported]:
    """An observation, as Langfuse exports it from its pages, its API, or to a blob storage."""
    if str(record.get("type")).upper() != "GENERATION":
        return
    given = loaded(record.get("input"))
    model = next((record[key] for key in _LANGFUSE_MODELS if record.get(key)), "")
    yield _from_input(given, str(model), inside(record, "usageDetails") or inside(record, "usage_details"), "Langfuse")


_LANGFUSE_MODELS = ("model", "provided_model_name", "providedModelName", "internal_model")


def langsmith(record: Json) -> Iterator[Exported]:
    """A run of LangSmith: of a wrapped SDK, or of LangChain, whose messages are constructors."""
    if record.get("run_type") != "llm":
        return
    inputs, parameters = record.get("inputs") or {}, inside(record, "extra", "invocation_params") or {}
    history = loaded(inputs.get("messages"))
    if isinstance(history, list) and history and isinstance(history[0], list):
        history = history[0]
    if isinstance(history, list):
        history = [_langchain(one) if isinstance(one, dict) and "lc" in one else one for one in history]
    model = inputs.get("model") or parameters.get("model") or inside(record, "extra", "metadata", "ls_model_name")
    given = {"tools": parameters.get("tools"), **inputs, "messages": history} if history else inputs
    usage = inside(record, "outputs", "usage_metadata") or inside(record, "extra", "metadata", "usage_metadata")
    yield _from_input(given, str(model or ""), usage, "LangSmith")


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


def helicone(record: Json) -> Iterator[Exported]:
    """A request that Helicone exports, with its bodies."""
    body = loaded(record.get("request_body"))
    if not isinstance(body, dict) or not ("messages" in body or "input" in body):
        yield Exported(None, why="Helicone exported no body; export again with --include-body")
        return
    usage = inside(record, "response_body", "usage")
    api = MESSAGES if str(record.get("request_path")).rstrip("/").endswith("/messages") else ""
    yield Exported(body, api, _any_usage(usage), str(record.get("request_user_id") or ""))


def stored_completion(record: Json) -> Iterator[Exported]:
    """A chat completion that OpenAI stored. Its messages are a list of their own in the API."""
    history = record.get("messages") or record.get("input")
    if not isinstance(history, list):
        why = "a stored completion has no messages; add those of GET /chat/completions/ID/messages as `messages`"
        yield Exported(None, why=why)
        return
    body = {"model": record.get("model"), "messages": history, "tools": record.get("tools")}
    yield Exported({key: value for key, value in body.items() if value}, CHAT, _any_usage(record.get("usage")))


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
    if found.get("langfuse.observation.type") == "generation":
        usage = loaded(found.get("langfuse.observation.usage_details"))
        yield _from_input(loaded(found.get("langfuse.observation.input")), model, usage, "Langfuse's span")
        return
    if not any(key.startswith("gen_ai.") for key in found):
        return
    history = loaded(found.get("gen_ai.input.messages"))
    if not isinstance(history, list):
        yield Exported(None, why="the span has no `gen_ai.input.messages`; have your instrumentation capture content")
        return
    system = loaded(found.get("gen_ai.system_instructions")) or []
    opening = [{"role": "system", "content": _contents(system)}] if system else []
    tools = loaded(found.get("gen_ai.tool.definitions"))
    body = {"model": model, "messages": [*opening, *(each for one in history for each in _parts(one))]}
    prompt, cached = found.get("gen_ai.usage.input_tokens"), found.get("gen_ai.usage.cache_read.input_tokens")
    said = Reported(number(prompt), number(found.get("gen_ai.usage.output_tokens")), number(cached) or None)
    body |= {"tools": tools} if isinstance(tools, list) and tools else {}
    yield Exported(body, CHAT, said if said.prompt else None)


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
        yield {
            "role": message.get("role", "user"),
            "content": text or None,
            **({"tool_calls": said} if said else {}),
        }
    for one in results:
        answer = one.get("response", one.get("result", ""))
        content = answer if isinstance(answer, str) else json.dumps(answer)
        yield {"role": "tool", "tool_call_id": one.get("id") or "", "content": content}


def _from_input(given: Any, model: str, usage: Any, whose: str) -> Exported:
    """The request of what a tracer calls its input: messages, or a body with them."""
    body = given if isinstance(given, dict) else {"messages": given}
    if not any(isinstance(body.get(key), list) and body[key] for key in ("messages", "input")):
        return Exported(None, why=f"{whose} kept no list of messages as the input")
    body = {key: value for key, value in body.items() if value is not None}
    return Exported({"model": model, **body}, "", _any_usage(usage))


# -- what a reply cost -------------------------------------------------------------------------------------------------


def _any_usage(usage: Any) -> Reported | None:
    """Usage in OpenAI's names or LangChain's; None if it does not say how many tokens were cached."""
    if inside(usage, "cache_read_input_tokens") is not None:
        return anthropic_usage(usage)
    prompt = number(inside(usage, "prompt_tokens")) or number(inside(usage, "input_tokens"))
    completion = number(inside(usage, "completion_tokens")) or number(inside(usage, "output_tokens"))
    for details, cached in (
        ("prompt_tokens_details", "cached_tokens"),
        ("input_tokens_details", "cached_tokens"),
        ("input_token_details", "cache_read"),
    ):
        if (tokens := inside(usage, details, cached)) is not None:
            return Reported(prompt, completion, min(number(tokens), prompt)) if prompt else None
    return None


# -- the table ---------------------------------------------------------------------------------------------------------


def _has(*names: str) -> Callable[[Members], bool]:
    return lambda members: all(name in members for name in names)


def _each(read: Callable[[Json], Iterator[Exported]]) -> Callable[[], RecordReader]:
    return lambda: Each(read)


def _is_claude(members: Members) -> bool:
    return "type" in members and ("sessionId" in members or "leafUuid" in members or "isSnapshotUpdate" in members)


FORMATS = (
    Format("Claude Code's session", _is_claude, ClaudeCode),
    Format("Codex's session", _has("timestamp", "type", "payload"), Codex),
    Format("opencode's session", _has("session", "message", "parts"), Opencode),
    Format("LiteLLM's log", lambda one: "call_type" in one and ("messages" in one or "spend" in one), _each(litellm)),
    Format("LangSmith's run", _has("run_type", "inputs"), _each(langsmith)),
    Format("Helicone's request", lambda one: "request_id" in one and "request_model" in one, _each(helicone)),
    Format("OpenTelemetry's spans", lambda one: "resourceSpans" in one or "resource_spans" in one, _each(otlp)),
    Format("OpenTelemetry's span", _has("attributes", "context", "kind"), _each(span)),
    Format(
        "Langfuse's observation",
        lambda one: "type" in one and "input" in one and ("traceId" in one or "trace_id" in one),
        _each(langfuse),
    ),
    Format(
        "OpenAI's stored completion",
        lambda one: text_of(one.get("object")) == "chat.completion",
        _each(stored_completion),
    ),
)
"""In the order in which they are tried. A record of none of them is a request's body."""

LISTS = ("data", "observations", "runs", "spans", "entries", "requests", "conversations")
"""Members of one JSON document whose list holds its records."""
