"""A scripted Messages API that is as strict as the real one, and in its words where they are known.

It remembers the thinking that it signed, so that it can refuse blocks that come back changed.
`MessagesApi` answers the requests of a `StrictUpstream`:

    up.respond(api := MessagesApi())
    api.script([thinking("hm"), call("grep", {"pattern": "x"})], [say("Done.")])
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from tests.dialects.scripted import Reply, ScriptedApi, pieces
from tests.fake_upstream import Pieces, Recorded, whole
from tests.strict import approximate_tokens

Json = dict[str, Any]

PARAMETERS = frozenset(
    """
    model messages max_tokens system tools tool_choice stream metadata stop_sequences temperature top_k top_p thinking
    service_tier cache_control output_config output_format context_management container mcp_servers
    """.split()  # noqa: SIM905 - a list of 20 strings is 20 lines
)
COUNTED = PARAMETERS - {
    "max_tokens",
    "stream",
    "metadata",
    "stop_sequences",
    "temperature",
    "top_k",
    "top_p",
}
"""What `count_tokens` takes."""
BLOCK_FIELDS = {
    "text": {"type", "text", "cache_control", "citations"},
    "image": {"type", "source", "cache_control"},
    "document": {"type", "source", "title", "context", "citations", "cache_control"},
    "thinking": {"type", "thinking", "signature"},
    "redacted_thinking": {"type", "data"},
    "tool_use": {"type", "id", "name", "input", "cache_control", "caller"},
    "tool_result": {"type", "tool_use_id", "content", "is_error", "cache_control"},
    "server_tool_use": {"type", "id", "name", "input", "cache_control"},
    "web_search_tool_result": {"type", "tool_use_id", "content", "cache_control"},
}
IN_RESULTS = ("text", "image", "document", "search_result", "tool_reference")
MEDIA_TYPES = ("image/jpeg", "image/png", "image/gif", "image/webp", "application/pdf")
MOST_BREAKPOINTS = 4
PRESERVING = re.compile("claude-(opus|sonnet|haiku)-5-5|claude-fable-5-")
"""Models that take their thinking back only behind the very text that they thought about.

https://platform.claude.com/docs/en/build-with-claude/preserved-thinking/prefix-checks
"""
BINDING = "thinking-binding-controls-2026-08-01"


# -- what a model says -----------------------------------------------------------------------------


def say(text: str) -> Json:
    return {"type": "text", "text": text}


def call(name: str, arguments: Json | None = None, **more: Any) -> Json:
    return {"type": "tool_use", "name": name, "input": arguments or {}, **more}


def thinking(text: str = "") -> Json:
    return {"type": "thinking", "thinking": text}


def _check_base64(where: str, source: Json) -> None:
    if set(source) != {"type", "media_type", "data"} or source["media_type"] not in MEDIA_TYPES:
        raise RefusedMessage(f"{where}.source: Input should be one of {', '.join(MEDIA_TYPES)}")
    try:
        base64.b64decode(source["data"], validate=True)
    except ValueError as error:
        raise RefusedMessage(f"{where}.source.base64.data: invalid base64 data") from error


# -- the API ---------------------------------------------------------------------------------------


class RefusedMessage(Exception):
    """The API would not accept the request."""

    def __init__(
        self, message: str, kind: str = "invalid_request_error", status: int = 400
    ) -> None:
        super().__init__(message)
        self.message, self.kind, self.status = message, kind, status

    def body(self) -> Json:
        return {"type": "error", "error": {"type": self.kind, "message": self.message}}


class MessagesApi(ScriptedApi):
    def __init__(
        self, *, window: int = 200_000, expect_key: str | None = None, **more: Any
    ) -> None:
        super().__init__(**more)
        self.counted: list[Json] = []
        self.window = window
        self._key = expect_key
        self.signed: dict[str, str] = {}
        # signature → what preceded it, and the thinking before it
        self._bound: dict[str, tuple[str, str | None]] = {}

    def __call__(self, request: Recorded) -> Pieces:
        assert request.method == "POST", request.path
        body = request.json
        try:
            if self._key is not None and request.header("x-api-key") != self._key:
                raise RefusedMessage("invalid x-api-key", "authentication_error", 401)
            if request.path == "/v1/messages/count_tokens":
                self.checked(body, COUNTED)
                self.counted.append(body)
                return whole({"input_tokens": _tokens_of(body)})
            if request.path != "/v1/messages":
                raise RefusedMessage("Not Found", "not_found_error", 404)
            self.checked(body)
            last = self._check_bound(body, request.header("anthropic-beta") or "")
        except RefusedMessage as refused:
            self.refused.append(refused.message)
            return whole(refused.body(), refused.status)
        message = self._respond(body, self._next(body))
        if PRESERVING.match(body["model"]):
            self._bind(body, message, last)
        return self._sent(body, message)

    # -- checks --

    def checked(self, body: Json, known: frozenset[str] = PARAMETERS) -> None:
        """Raises RefusedMessage for a request that the real API does not accept."""
        for name in body:
            if name not in known:
                raise RefusedMessage(f"{name}: Extra inputs are not permitted")
        if known is PARAMETERS and not isinstance(body.get("max_tokens"), int):
            raise RefusedMessage("max_tokens: Field required")
        budget = body.get("thinking", {}).get("budget_tokens", 0)
        if known is PARAMETERS and budget >= body["max_tokens"]:
            raise RefusedMessage("`max_tokens` must be greater than `thinking.budget_tokens`.")
        if (tokens := _tokens_of(body)) > self.window:
            raise RefusedMessage(f"prompt is too long: {tokens} tokens > {self.window} maximum")
        messages = body["messages"]
        if not messages or messages[0]["role"] != "user":
            raise RefusedMessage('messages: first message must use the "user" role')
        blocks = [self._blocks(index, message) for index, message in enumerate(messages)]
        _check_places(messages)
        self._check_tools(body, [block for found in blocks for block in found])
        self._check_pairs(messages, blocks)
        marks = json.dumps(body).count('"cache_control": {')
        if marks > MOST_BREAKPOINTS:
            raise RefusedMessage(
                f"A maximum of 4 blocks with cache_control may be provided. Found {marks}."
            )

    def _blocks(self, index: int, message: Json) -> list[Json]:
        where = f"messages.{index}"
        known = {"role", "content"} | (
            {"output_config", "clear_at"} if message["role"] == "system" else set()
        )
        if extra := set(message) - known:
            raise RefusedMessage(f"{where}.{min(extra)}: Extra inputs are not permitted")
        if message["role"] not in ("user", "assistant", "system"):
            raise RefusedMessage(f'{where}: Unexpected role "{message["role"]}".')
        content = message["content"]
        blocks = [say(content)] if isinstance(content, str) else content
        if not blocks and "output_config" not in message:
            raise RefusedMessage(f"{where}: all messages must have non-empty content")
        for place, block in enumerate(blocks):
            self._check_block(f"{where}.content.{place}", block)
        return blocks

    def _check_block(self, where: str, block: Json) -> None:
        kind = block["type"]
        if kind not in BLOCK_FIELDS:
            raise RefusedMessage(
                f"{where}: Input tag '{kind}' found using 'type' does not match any expected tags"
            )
        if extra := set(block) - BLOCK_FIELDS[kind]:
            raise RefusedMessage(f"{where}.{kind}.{min(extra)}: Extra inputs are not permitted")
        if kind == "text" and not block["text"].strip():
            raise RefusedMessage("messages: text content blocks must be non-empty")
        if kind == "tool_use" and not isinstance(block["input"], dict):
            raise RefusedMessage(f"{where}.tool_use.input: Input should be a valid dictionary")
        if kind == "thinking" and self.signed.get(block["signature"]) != block["thinking"]:
            raise RefusedMessage(f"{where}: Invalid `signature` in `thinking` block")
        if kind == "tool_result" and isinstance(block.get("content"), list):
            for part in block["content"]:
                if part["type"] not in IN_RESULTS:
                    raise RefusedMessage(
                        f"{where}.tool_result.content: Input tag '{part['type']}' is not expected"
                    )
                self._check_block(where, part)
        if kind in ("image", "document") and block["source"]["type"] == "base64":
            _check_base64(where, block["source"])

    def _check_tools(self, body: Json, blocks: Sequence[Json]) -> None:
        tools = body.get("tools") or []
        names = [tool["name"] for tool in tools]
        if len(names) != len(set(names)):
            raise RefusedMessage("tools: Tool names must be unique.")
        for place, tool in enumerate(tools):
            if "type" not in tool and not isinstance(tool.get("input_schema"), dict):
                raise RefusedMessage(f"tools.{place}.input_schema: Field required")
        if not tools and any(block["type"] in ("tool_use", "tool_result") for block in blocks):
            raise RefusedMessage(
                "Requests which include `tool_use` or `tool_result` blocks must define tools"
            )
        choice = body.get("tool_choice")
        if choice and not tools:
            raise RefusedMessage("tool_choice may only be specified while providing tools.")
        if choice and choice["type"] == "tool" and choice["name"] not in names:
            raise RefusedMessage(f"Tool '{choice['name']}' not found in provided tools")

    def _check_pairs(self, messages: Sequence[Json], blocks: Sequence[Sequence[Json]]) -> None:
        ids = [block["id"] for found in blocks for block in found if block["type"] == "tool_use"]
        if len(ids) != len(set(ids)):
            raise RefusedMessage("messages: `tool_use` ids must be unique")
        open_ids: list[str] = []
        for index, (message, found) in enumerate(zip(messages, blocks, strict=True)):
            results = [block["tool_use_id"] for block in found if block["type"] == "tool_result"]
            if results and message["role"] != "user":
                raise RefusedMessage(
                    f"messages.{index}: `tool_result` blocks can only be in `user` messages"
                )
            if unknown := [id for id in results if id not in open_ids]:
                raise RefusedMessage(
                    f"messages.{index}: unexpected `tool_use_id` found in `tool_result`: {unknown[0]}"
                )
            if missing := [id for id in open_ids if id not in results]:
                said = "`tool_use` ids were found without `tool_result` blocks immediately after"
                raise RefusedMessage(f"messages.{index - 1}: {said}: {', '.join(missing)}.")
            if [block["type"] == "tool_result" for block in found[: len(results)]] != [True] * len(
                results
            ):
                raise RefusedMessage(f"messages.{index}: `tool_result` blocks must come first")
            open_ids = [block["id"] for block in found if block["type"] == "tool_use"]
        if open_ids:
            raise RefusedMessage("messages: the last message has `tool_use` without `tool_result`")

    # -- preserved thinking --

    def _check_bound(self, body: Json, betas: str) -> str | None:
        """Return the signature of the last thinking that the model gets to see. Raises
        RefusedMessage."""
        binding = body.get("thinking", {}).get("block_binding")
        if binding and BINDING not in betas:
            kind = body["thinking"]["type"]
            raise RefusedMessage(f"thinking.{kind}.block_binding: Extra inputs are not permitted")
        if not PRESERVING.match(body["model"]):
            return None
        last: str | None = None
        for where, block, prefix in _prefixes(body):
            if block["type"] != "thinking":
                continue
            bound, before = self._bound[block["signature"]]
            if bound == prefix and last in (None, before):
                last = block["signature"]
            elif binding == {"prefix_mismatch_behavior": "drop_block"}:
                return last
            else:
                raise RefusedMessage(
                    f"{where}: Invalid `signature` in `thinking` block. The block is bound to a different "
                    "conversation. Remove the block, or set `thinking.block_binding.prefix_mismatch_behavior` to "
                    f'"drop_block". That setting requires the `{BINDING}` value in the `anthropic-beta` header.'
                )
        return last

    def _bind(self, body: Json, message: Json, last: str | None) -> None:
        whole = {
            **body,
            "messages": [*body["messages"], {"role": "assistant", "content": message["content"]}],
        }
        for _, block, prefix in _prefixes(whole):
            if block.get("signature") and block["signature"] not in self._bound:
                self._bound[block["signature"]] = prefix, last
                last = block["signature"]

    # -- replies --

    @staticmethod
    def events_of(reply: Json, split: int) -> Iterator[Json]:
        return events_of(reply, split)

    def _respond(self, body: Json, reply: Reply) -> Json:
        blocks = [self._block(block) for block in reply if "stop_reason" not in block]
        stopped = next((block["stop_reason"] for block in reply if "stop_reason" in block), None)
        called = any(block["type"] == "tool_use" for block in blocks)
        return {
            "id": f"msg_{self._made(next(self._numbers))}",
            "type": "message",
            "role": "assistant",
            "model": body["model"],
            "content": blocks,
            "stop_reason": stopped or ("tool_use" if called else "end_turn"),
            "stop_sequence": None,
            "usage": usage(_tokens_of(body), approximate_tokens(json.dumps(blocks))),
        }

    def _block(self, block: Json) -> Json:
        number = self._made(next(self._numbers))
        if block["type"] == "tool_use":
            return {"id": f"toolu_{number}", **block}
        if block["type"] == "thinking":
            signature = f"Sig+/{number}=="
            self.signed[signature] = block["thinking"]
            return {**block, "signature": signature}
        return block


def _check_places(messages: Sequence[Json]) -> None:
    """Check that a system message follows what the user says, and comes directly before a reply.

    https://platform.claude.com/docs/en/build-with-claude/mid-conversation-system-messages
    """
    for index, message in enumerate(messages):
        if message["role"] != "system" or not message["content"]:
            continue
        if index == 0 or messages[index - 1]["role"] != "user":
            said = "a `system` message must follow a `user` message or an `assistant` message with server tool use"
            raise RefusedMessage(f"messages.{index}: {said}")
        if index + 1 < len(messages) and messages[index + 1]["role"] != "assistant":
            raise RefusedMessage(
                f"messages.{index}: a `system` message must be last or precede an `assistant` message"
            )


def _prefixes(body: Json) -> Iterator[tuple[str, Json, str]]:
    """Yield each block, where it is, and a digest of all before it: breakpoints and other thinking
    do not count."""
    digest = hashlib.sha256(_plain([body.get("system"), body.get("tools")]))
    for index, message in enumerate(body["messages"]):
        digest.update(_plain({**message, "content": []}))
        content = message["content"]
        for place, block in enumerate([say(content)] if isinstance(content, str) else content):
            yield f"messages.{index}.content.{place}", block, digest.hexdigest()
            if block["type"] not in ("thinking", "redacted_thinking"):
                digest.update(_plain(block))


def _plain(value: Any) -> bytes:
    return json.dumps(unmarked(value), sort_keys=True).encode()


def unmarked(value: Any) -> Any:
    """The value without cache breakpoints."""
    if isinstance(value, list):
        return list(map(unmarked, value))
    if isinstance(value, dict):
        return {key: unmarked(member) for key, member in value.items() if key != "cache_control"}
    return value


def usage(before: int, after: int, cached: int = 0) -> Json:
    return {
        "input_tokens": before - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": after,
        "service_tier": "standard",
    }


def _tokens_of(body: Json) -> int:
    return approximate_tokens(json.dumps([body.get("system"), body.get("tools"), body["messages"]]))


# -- streams ---------------------------------------------------------------------------------------


def events_of(message: Json, split: int = 8) -> Iterator[Json]:
    """The events of a streamed message."""
    begun = {
        **message,
        "content": [],
        "stop_reason": None,
        "usage": {**message["usage"], "output_tokens": 1},
    }
    for late in ("container", "stop_details"):  # known only at the end
        begun |= {late: None} if late in message else {}
    yield {"type": "message_start", "message": begun}
    for index, block in enumerate(message["content"]):
        yield from _block_events(index, block, split)
        if index == 0:
            yield {"type": "ping"}
    told = ("stop_reason", "stop_sequence", "stop_details", "container")
    ended = {key: message[key] for key in told if key in message}
    yield {"type": "message_delta", "delta": ended, "usage": message["usage"]}
    yield {"type": "message_stop"}


def _block_events(index: int, block: Json, split: int) -> Iterator[Json]:
    empty: Json = {
        "text": {"text": ""},
        "thinking": {"thinking": "", "signature": ""},
        "tool_use": {"input": {}},
    }
    empty["server_tool_use"] = {"input": {}}
    yield {
        "type": "content_block_start",
        "index": index,
        "content_block": block | empty.get(block["type"], {}),
    }
    deltas: list[Json] = []
    if block["type"] == "text":
        deltas = [{"type": "text_delta", "text": piece} for piece in pieces(block["text"], split)]
    elif block["type"] == "thinking":
        deltas = [
            {"type": "thinking_delta", "thinking": piece}
            for piece in pieces(block["thinking"], split)
        ]
        deltas.append({"type": "signature_delta", "signature": block["signature"]})
    elif "input" in block:
        parts = ["", *pieces(json.dumps(block["input"]), split)]
        deltas = [{"type": "input_json_delta", "partial_json": part} for part in parts]
    for delta in deltas:
        yield {"type": "content_block_delta", "index": index, "delta": delta}
    yield {"type": "content_block_stop", "index": index}
