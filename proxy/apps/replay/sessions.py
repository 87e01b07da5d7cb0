"""The session files of agents, which are read record after record, and what all readers of `replay`
share.

Shapes as these versions write them: Claude Code 2.1, Codex 0.169, and opencode's database of
November 2026.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from msgspec import Raw

from proxy import rawjson
from proxy.dialects.usage import Reported, reported

Json = dict[str, Any]
CHAT = "chat"
RESPONSES = "responses"
MESSAGES = "messages"


class Exported(NamedTuple):
    """A request that is complete with a record."""

    body: Json | bytes | None
    """None: there is none, and `why` says so."""
    api: str = ""
    """The dialect's name; empty: the body shows it."""
    reported: Reported | None = None
    caller: str = ""
    why: str = ""
    beta: str = ""
    """What the client wanted beyond its API."""


@dataclass
class RecordedSession:
    """What the records of one file have said so far."""

    histories: dict[str, list[Json]] = field(default_factory=lambda: defaultdict(list))
    """Of the main agent (""), of each other one, or of the session of this name."""
    replies: dict[str, tuple[Any, Json]] = field(default_factory=dict)
    """A history's name → the id of its newest reply, and that reply, to which blocks are added as
    they come."""
    model: str = "unknown"
    system: Any = None
    tools: Any = None
    used: dict[str, Json] = field(default_factory=dict)
    """A name → a tool that was called."""
    replied: set[str] = field(default_factory=set)
    """The replies that this or another file had."""
    places: dict[str, int] = field(default_factory=dict)
    """A record's id → how long the history is with it."""
    agents: dict[str, str] = field(default_factory=dict)
    """The id of another agent's record → that agent."""
    waiting: Json | None = None
    """A request whose cost has not been said yet."""

    def answered(self, usage: Any = None) -> Iterator[Exported]:
        if self.waiting is not None:
            yield Exported(self.waiting, RESPONSES, usage_of(usage))
            self.waiting = None


def inside(value: Any, *names: str) -> Any:
    """Return what stands at a path of names, or None. Databases keep JSON as text, which is read on
    the way."""
    for name in names:
        value = loaded(value)
        value = value.get(name) if isinstance(value, dict) else None
    return value


def loaded(value: Any) -> Any:
    """Return what a text of JSON says, and any other value as it is."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def is_reply(entry: Any) -> bool:
    """Whether the model wrote this entry of a history, in any API."""
    if not isinstance(entry, dict):
        return False
    kind = str(entry.get("type", "message"))
    return entry.get("role") == "assistant" or kind == "reasoning" or kind.endswith("_call")


def call(name: str, function: str, arguments: Any) -> Json:
    """A call of a chat message."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": name, "type": "function", "function": {"name": function, "arguments": text}}


def usage_of(usage: Any) -> Reported | None:
    """What a reply cost, in the words of OpenAI, Anthropic, Codex or LangChain; None without what
    was cached."""
    text = rawjson.encode(loaded(usage))
    for theirs in (b'"cached_input_tokens"', b'"cache_read"'):
        text = text.replace(theirs, b'"cached_tokens"')
    said = reported(text)
    return said if said and said.cached is not None else None


# -- the agents ------------------------------------------------------------------------------------


def claude_code(record: Json, session: RecordedSession) -> Iterator[Exported]:
    """`~/.claude/projects/*/*.jsonl`: a line for each block of a reply, each result, and much that
    is only shown."""
    agent = _agent(record, session)
    before = str(record.get("parentUuid"))
    history = session.histories[agent]
    match record.get("type"):
        case "system" if record.get("subtype") == "compact_boundary":
            history.clear()
        case "api-request-shape":
            session.system = inside(record, "shape", "system") or session.system
            session.tools = inside(record, "shape", "tools") or session.tools
        case "attachment":  # what the client adds to the user's words
            if session.system is None and inside(record, "attachment", "type") == "prompt_snapshot":
                session.system = (
                    "\n".join(inside(record, "attachment", "systemPrompt") or []) or None
                )
            role = record.get("renderedRole") or "user"
            history += [
                {"role": role, "content": one.get("content")}
                for one in record.get("rendered") or []
            ]
        case "user":
            message = record["message"]
            blocks = message.get("content")
            if not record.get("isMeta") and not (
                isinstance(blocks, list) and any(map(_is_result, blocks))
            ):
                # the user has gone back to an earlier message
                del history[session.places.get(before, len(history)) :]
            history.append(
                {"role": message.get("role", "user"), "content": message.get("content", "")}
            )
        case "assistant" if inside(record, "message", "model") != "<synthetic>":
            yield from _block(record, session, agent)
    if record.get("uuid"):
        session.places[record["uuid"]] = len(history)


def _agent(record: Json, session: RecordedSession) -> str:
    """Return whose record this is: empty for the main agent. Some versions name others by their
    first record alone."""
    if not record.get("isSidechain"):
        return ""
    own = str(record.get("uuid"))
    session.agents[own] = str(
        record.get("agentId") or session.agents.get(str(record.get("parentUuid"))) or own
    )
    return session.agents[own]


def _is_result(block: Any) -> bool:
    return isinstance(block, dict) and block.get("type") == "tool_result"


def _block(record: Json, session: RecordedSession, agent: str) -> Iterator[Exported]:
    """A block of a reply. The first one completes the request before it, unless another file had
    it."""
    message = record["message"]
    history = session.histories[agent]
    name, reply = session.replies.get(agent, (None, {}))
    if not reply or name != message.get("id"):
        body = {"model": message.get("model", ""), "max_tokens": 8192, "messages": [*history]}
        more = {"system": session.system, "tools": session.tools or list(session.used.values())}
        body |= {name: value for name, value in more.items() if value}
        written = f"{message.get('id')} {record.get('timestamp') or record.get('uuid')}"
        if history and written not in session.replied:
            yield Exported(body, MESSAGES, usage_of(message.get("usage")), agent)
        session.replied.add(written)
        reply = {"role": "assistant", "content": []}
        session.replies[agent] = message.get("id"), reply
        history.append(reply)
    blocks = message.get("content") or []
    for block in blocks if isinstance(blocks, list) else [{"type": "text", "text": str(blocks)}]:
        if block.get("type") == "tool_use":
            session.used[block["name"]] = {
                "name": block["name"],
                "input_schema": {"type": "object"},
            }
        reply["content"].append(block)


def codex(record: Json, session: RecordedSession) -> Iterator[Exported]:
    """`~/.codex/sessions/**/rollout-*.jsonl`: items of the Responses API, with what a reply cost
    after it."""
    payload = record["payload"] if isinstance(record.get("payload"), dict) else {}
    items = session.histories[""]
    match record.get("type"):
        case "session_meta":
            session.system = inside(payload, "base_instructions", "text")
        case "turn_context":
            session.model = payload.get("model") or session.model
        case "compacted":
            yield from session.answered()
            summary = {"type": "message", "role": "user", "content": payload.get("message") or ""}
            items[:] = payload.get("replacement_history") or [summary]
        case "token_usage_record":
            yield from session.answered(payload.get("usage"))
        case "event_msg" if usage := inside(payload, "info", "last_token_usage"):
            yield from session.answered(usage)
        case "event_msg" if payload.get("type") == "thread_rolled_back":
            asked = [place for place, item in enumerate(items) if _is_prompt(item)]
            del items[asked[-min(payload["num_turns"], len(asked))] if asked else 0 :]
        case "response_item" if payload.get("type") != "ghost_snapshot":
            item = {key: value for key, value in payload.items() if not key.startswith("internal_")}
            if is_reply(item) and items and not is_reply(items[-1]):
                yield from session.answered()
                session.waiting = {"model": session.model, "store": False, "input": [*items]}
                session.waiting["tools"] = [*session.used.values()]
                session.waiting |= {"instructions": session.system} if session.system else {}
            if isinstance(name := item.get("name"), str):
                session.used[name] = {
                    "type": "function",
                    "name": name,
                    "parameters": {"type": "object"},
                }
            items.append(item)


def _is_prompt(item: Json) -> bool:
    """Whether the user wrote this; what Codex itself adds in the user's name is in tags."""
    text = inside((item.get("content") or [None])[0], "text")
    return item.get("role") == "user" and not str(text).startswith("<")


def opencode(record: Json, session: RecordedSession) -> Iterator[Exported]:
    """`opencode.db`: a message with its session and its parts, as `recordings` reads them from the
    database."""
    name = record["session"]
    message = record["message"]
    parts = record["parts"]
    if name not in session.histories:
        session.histories.clear()
        session.used.clear()
    history = session.histories[name]
    found = (
        part["text"]
        for part in parts
        if part.get("type") == "text" and isinstance(part.get("text"), str)
    )
    text = "\n".join(found)
    if message.get("role") == "user":
        history.append({"role": "user", "content": text})
        return
    tokens = message.get("tokens")
    spent = {"input_tokens": inside(tokens, "input"), "output_tokens": inside(tokens, "output")}
    spent["cache_read_input_tokens"] = inside(tokens, "cache", "read")
    spent["cache_creation_input_tokens"] = inside(tokens, "cache", "write")
    body = {
        "model": message.get("modelID", ""),
        "messages": [*history],
        "tools": [*session.used.values()],
    }
    yield Exported(body, CHAT, usage_of(spent), name)
    if message.get("summary") is True:
        # only the summary goes on
        history[:] = [{"role": "user", "content": "What did we do so far?"}]
    calls = []
    results = []
    for one in parts:
        if one.get("type") == "tool":
            function = {"name": one["tool"], "parameters": {"type": "object"}}
            session.used[one["tool"]] = {"type": "function", "function": function}
            calls.append(call(one["callID"], one["tool"], inside(one, "state", "input") or {}))
            output = inside(one, "state", "output") or inside(one, "state", "error") or ""
            results.append({"role": "tool", "tool_call_id": one["callID"], "content": output})
    history += [
        {"role": "assistant", "content": text or None, **({"tool_calls": calls} if calls else {})},
        *results,
    ]


def opencode_export(record: Json, session: RecordedSession) -> Iterator[Exported]:
    """`opencode export ID`: a session with all its messages, each with its parts."""
    name = str(inside(record, "info", "id") or "")
    for one in record["messages"]:
        message = one["info"]
        parts = one["parts"]
        yield from opencode({"session": name, "message": message, "parts": parts}, session)


KEPT = ("role", "content", "tool_calls", "tool_call_id", "reasoning_content", "reasoning")
"""The members of a message that Cline and Roo Code send; `ts` and others are theirs alone."""


def bare(record: Json, session: RecordedSession) -> Iterator[Exported]:
    """A list of messages without a request around it, as Cline and Roo Code keep a task's
    (`api_conversation_history.json`)."""
    found = [{key: one[key] for key in KEPT if key in one} for one in record[BARE]]
    contents = (one.get("content") for one in found)
    blocks = (block for content in contents if isinstance(content, list) for block in content)
    kinds = {inside(block, "type") for block in blocks}
    api = MESSAGES if kinds & {"tool_use", "tool_result"} else CHAT
    yield Exported({"model": "unknown", "messages": found}, api)


BARE = "a bare list"
"""The member under which `recordings` gives such a list to its reader."""


def is_message(entry: Raw) -> bool:
    """Whether this may be an entry of a bare list of messages."""
    members = rawjson.object_of(entry)
    return rawjson.text_of(members.get("role")) in ROLES and members.keys().isdisjoint(
        ("parts", "messages")
    )


ROLES = frozenset(("system", "developer", "user", "assistant", "tool"))


def unread(record: Json, session: RecordedSession) -> Iterator[Exported]:
    yield from ()
    raise ValueError(
        "replay does not read these; what the proxy captures itself, it reads (docs/observe.md)"
    )


def opencode_older(record: Json, session: RecordedSession) -> Iterator[Exported]:
    raise ValueError(
        "opencode's older files have a message each; a newer opencode moves them to opencode.db, which is read"
    )
