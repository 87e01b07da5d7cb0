"""The session files of agents, which are read record after record.

Shapes as these versions write them: Claude Code 2.1, Codex 0.169, and opencode's database of November 2026.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from proxy.cli.records import (
    CHAT,
    MESSAGES,
    RESPONSES,
    Exported,
    Json,
    RecordReader,
    anthropic_usage,
    call,
    cost,
    inside,
    is_reply,
    texts,
)


class ClaudeCode(RecordReader):
    """`~/.claude/projects/*/*.jsonl`: a line for each block of a reply, each result, and much that is only shown."""

    def __init__(self) -> None:
        self._histories: dict[str, list[Json]] = {}
        self._replies: dict[str, str] = {}  # history → the id of its newest reply
        self._system: Any = None
        self._tools: list[Json] = []
        self._used: dict[str, Json] = {}  # name → a tool that was called

    def take(self, record: Json) -> Iterator[Exported]:
        side = str(record.get("agentId") or "side") if record.get("isSidechain") else ""
        history = self._histories.setdefault(side, [])
        match record.get("type"):
            case "system" if record.get("subtype") == "compact_boundary":
                history.clear()
            case "api-request-shape":
                self._system = inside(record, "shape", "system") or self._system
                self._tools = inside(record, "shape", "tools") or self._tools
            case "attachment":
                self._attached(record, history)
            case "user":
                message = record["message"]
                history.append({"role": message.get("role", "user"), "content": message.get("content", "")})
            case "assistant" if inside(record, "message", "model") != "<synthetic>":
                yield from self._reply(record["message"], side, history)

    def _attached(self, record: Json, history: list[Json]) -> None:
        """What the client adds to the user's words."""
        attachment = record.get("attachment") or {}
        if attachment.get("type") == "prompt_snapshot" and self._system is None:
            self._system = "\n".join(attachment.get("systemPrompt") or []) or None
        for one in record.get("rendered") or []:
            history.append({"role": record.get("renderedRole") or "user", "content": one.get("content")})

    def _reply(self, message: Json, side: str, history: list[Json]) -> Iterator[Exported]:
        blocks = message.get("content") or []
        if self._replies.get(side) != message.get("id"):
            self._replies[side] = message.get("id", "")
            if history:
                yield Exported(self._body(message, history), MESSAGES, anthropic_usage(message.get("usage")), side)
            history.append({"role": "assistant", "content": []})
        for block in blocks if isinstance(blocks, list) else [{"type": "text", "text": str(blocks)}]:
            if block.get("type") == "tool_use":
                self._used[block["name"]] = {"name": block["name"], "input_schema": {"type": "object"}}
            history[-1]["content"].append(block)

    def _body(self, message: Json, history: list[Json]) -> Json:
        tools = self._tools or list(self._used.values())
        body = {"model": message.get("model", ""), "max_tokens": 8192, "messages": list(map(dict, history))}
        return {**body, **({"system": self._system} if self._system else {}), **({"tools": tools} if tools else {})}


class Codex(RecordReader):
    """`~/.codex/sessions/**/rollout-*.jsonl`: items of the Responses API, with what a reply cost after it."""

    def __init__(self) -> None:
        self._items: list[Json] = []
        self._model = "unknown"
        self._instructions = ""
        self._used: dict[str, Json] = {}
        self._waiting: Json | None = None  # a request whose cost has not been said yet

    def take(self, record: Json) -> Iterator[Exported]:
        payload = record.get("payload")
        payload = payload if isinstance(payload, dict) else {}
        match record.get("type"):
            case "session_meta":
                self._instructions = inside(payload, "base_instructions", "text") or ""
            case "turn_context":
                self._model = payload.get("model") or self._model
            case "compacted":
                yield from self.end()
                summary = {"type": "message", "role": "user", "content": payload.get("message") or ""}
                self._items = list(payload.get("replacement_history") or [summary])
            case "event_msg" if payload.get("type") == "token_count":
                yield from self._asked(inside(payload, "info", "last_token_usage"))
            case "response_item":
                yield from self._item(payload)

    def _item(self, payload: Json) -> Iterator[Exported]:
        item = {key: value for key, value in payload.items() if not key.startswith("internal_")}
        if is_reply(item) and self._items and not is_reply(self._items[-1]):
            yield from self.end()
            self._waiting = self._body()
        if isinstance(name := item.get("name"), str):
            self._used[name] = {"type": "function", "name": name, "parameters": {"type": "object"}}
        if item.get("type") != "ghost_snapshot":
            self._items.append(item)

    def _body(self) -> Json:
        body = {"model": self._model, "store": False, "input": list(self._items), "tools": list(self._used.values())}
        return {**body, "instructions": self._instructions} if self._instructions else body

    def _asked(self, usage: Any) -> Iterator[Exported]:
        if self._waiting is not None:
            spent = [inside(usage, name) for name in ("input_tokens", "output_tokens", "cached_input_tokens")]
            yield Exported(self._waiting, RESPONSES, cost(*spent))
            self._waiting = None

    def end(self) -> Iterator[Exported]:
        yield from self._asked(None)


class Opencode(RecordReader):
    """`opencode.db`: rows of messages, each with its parts, as `recordings` reads them from the database."""

    def __init__(self) -> None:
        self._session = ""
        self._messages: list[Json] = []
        self._used: dict[str, Json] = {}

    def take(self, record: Json) -> Iterator[Exported]:
        if record["session"] != self._session:
            self._session, self._messages, self._used = record["session"], [], {}
        message, parts = record["message"], record["parts"]
        if message.get("role") == "user":
            self._messages.append({"role": "user", "content": texts(parts)})
            return
        tokens = message.get("tokens") or {}
        cached, written = inside(tokens, "cache", "read"), inside(tokens, "cache", "write")
        said = cost(tokens.get("input"), tokens.get("output"), cached, cached, written)
        body = {"model": message.get("modelID", ""), "messages": list(self._messages), "tools": [*self._used.values()]}
        yield Exported(body, CHAT, said, self._session)
        self._messages += self._reply(parts)

    def _reply(self, parts: list[Json]) -> Iterator[Json]:
        calls = [part for part in parts if part.get("type") == "tool"]
        for one in calls:
            function = {"name": one["tool"], "parameters": {"type": "object"}}
            self._used[one["tool"]] = {"type": "function", "function": function}
        said = [call(one["callID"], one["tool"], inside(one, "state", "input") or {}) for one in calls]
        yield {"role": "assistant", "content": texts(parts) or None, **({"tool_calls": said} if said else {})}
        for one in calls:
            state = one.get("state") or {}
            output = state.get("output") or state.get("error") or ""
            yield {"role": "tool", "tool_call_id": one["callID"], "content": output}
