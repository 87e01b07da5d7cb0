"""Builds the bodies of summary calls and reads their replies."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import Raw

from proxy import rawjson
from proxy.dialects import summary_calls
from proxy.dialects.messages.blocks import cache_breakpoint, text_message
from proxy.dialects.messages.render import followed
from proxy.dialects.messages.request import assembled, client_tool, text_block, user_message
from proxy.dialects.messages.round_request import LIMITS
from proxy.dialects.values import Members, object_of, string, whole
from proxy.plan.request import Request
from proxy.plan.summary import SummaryAnswer

IDENTITY = ("metadata",)
KEPT = (*IDENTITY, "cache_control", "service_tier", "thinking", "context_management", "anthropic_version")
"""Members that a summary call copies from its request: who asks, how to cache, how to reason, which thinking counts.
Another model may know only the members that say who asks."""

LIMIT = LIMITS[0]
DEFAULT_LIMIT = 8_192
"""Tokens of a summary whose length nobody limits: this API insists on a limit, and every model takes this one."""

FINISHED = ("end_turn", "stop_sequence")


def alone(text: str, model: str, request: Request | None = None, most: int = 0) -> bytes:
    """Return the body of a call whose only message is `text`."""
    return rawjson.encode(_members(model, request, most) | {"messages": [{"role": "user", "content": text}]})


def on_prefix(
    text: str, request: Request, entries: Sequence[bytes | Raw], tools: Sequence[bytes], most: int, end: int
) -> bytes:
    """Return the body of a call that continues `entries`, exactly as upstream has cached them, with the task `text`.

    The system prompt and the tools are part of what is cached. If the client set a breakpoint after `end`, the task
    gets the same one, since the client's own is not part of this call.
    """
    members = _members(request.model, request, most)
    if "system" in request.members:
        members["system"] = request.members["system"]
    members |= summary_calls.uncalled(request, [client_tool(raw) for raw in tools], b'{"type":"none"}')
    marks = [mark for raw in request.entries[end:] if (mark := cache_breakpoint(raw))]
    task = text_message("user", text)
    if marks:
        marked = rawjson.members(text_block(string(text))) | {marks[-1].key: marks[-1].value}
        task = user_message([rawjson.encode(marked)])
    return rawjson.encode(members | assembled(members, followed(list(entries), task)))


def _members(model: str, request: Request | None, most: int) -> Members:
    """Return all members except messages, system prompt and tools. What the model thinks counts as part of a reply."""
    named: Members = {"model": string(model)}
    kept = summary_calls.kept(request, KEPT if summary_calls.is_own(request, model) else IDENTITY)
    thinking = whole(object_of(kept.get("thinking")).get("budget_tokens"))
    return {**named, **kept, LIMIT: Raw(b"%d" % ((most or DEFAULT_LIMIT) + thinking))}


# -- replies ----------------------------------------------------------------------------------------------------------


def answer(status: int, body: bytes) -> SummaryAnswer:
    """Read the reply to a call. The answer has no text if the body cannot be read."""
    return summary_calls.answer(status, body, _Reply, _read)


def _read(status: int, reply: _Reply) -> SummaryAnswer:
    text = "".join(block.text or "" for block in reply.content if block.type == "text")
    usage = reply.usage or _Usage()
    cached = usage.cache_read_input_tokens or 0
    prompt = usage.input_tokens + (usage.cache_creation_input_tokens or 0) + cached
    return SummaryAnswer(status, text, prompt, usage.output_tokens, cached, finished=reply.stop_reason in FINISHED)


class _Reply(msgspec.Struct):
    """The members of a reply that matter here; any of them may be missing."""

    content: list[_Block] = []
    stop_reason: str | None = None
    usage: _Usage | None = None


class _Block(msgspec.Struct):
    type: str = ""
    text: str | None = None


class _Usage(msgspec.Struct):
    input_tokens: int = 0
    output_tokens: int = 0
    cache_creation_input_tokens: int | None = None
    cache_read_input_tokens: int | None = None
