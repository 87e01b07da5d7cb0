"""Builds the bodies of summary calls and reads their replies."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import Raw

from proxy import rawjson
from proxy.dialects import summary_calls
from proxy.dialects.responses.items import text_message
from proxy.dialects.responses.request import function_tool, items_of, joined, members_of
from proxy.dialects.values import Members, text_of
from proxy.plan.request import Request
from proxy.plan.summary import SummaryAnswer

IDENTITY = ("user", "safety_identifier")
KEPT = (*IDENTITY, "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "service_tier", "reasoning")
"""Members that a summary call copies from its request: who asks, how to cache, how to reason. Another model may know
only the members that say who asks."""
LIMIT = "max_output_tokens"


def alone(text: str, model: str, request: Request | None = None, most: int = 0) -> bytes:
    """Return the body of a call whose only input is `text`."""
    return rawjson.encode(_members(model, request, most) | {"input": text})


def on_prefix(
    text: str, request: Request, entries: Sequence[bytes | Raw], tools: Sequence[bytes], most: int, end: int
) -> bytes:
    """Return the body of a call that continues `entries`, exactly as upstream has cached them, with the task `text`.

    The instructions and the tools are part of what is cached. Upstream keeps the call as it keeps the client's request
    if an entry names what it has kept, because it finds that only then.
    """
    members = _members(request.model, request, most)
    if any(map(_names_kept, entries)):
        members["store"] = request.members.get("store", Raw(b"true"))
    if "instructions" in request.members:
        members["instructions"] = request.members["instructions"]
    members |= summary_calls.uncalled(request, [function_tool(raw) for raw in tools], b'"none"')
    return rawjson.encode(members | {"input": joined([*entries, text_message("user", text)])})


def _names_kept(entry: bytes | Raw) -> bool:
    """Whether an item of this entry is found by its id alone: a reference, or reasoning that is not in the item."""
    if not any(name in bytes(entry) for name in (b'"reasoning"', b'"item_reference"')):
        return False
    for item in map(members_of, items_of(entry)):
        kind = text_of(item.get("type"))
        if kind == "item_reference" or (kind == "reasoning" and not text_of(item.get("encrypted_content"))):
            return True
    return False


def _members(model: str, request: Request | None, most: int) -> Members:
    """Return all members except input, instructions and tools. Upstream stores nothing of a call."""
    named = {"model": Raw(rawjson.encode(model)), "store": Raw(b"false")}
    kept = summary_calls.kept(request, KEPT if summary_calls.is_own(request, model) else IDENTITY)
    return {**named, **kept, **({LIMIT: Raw(b"%d" % most)} if most else {})}


# -- replies ----------------------------------------------------------------------------------------------------------


def answer(status: int, body: bytes) -> SummaryAnswer:
    """Read the reply to a call. The answer has no text if the body cannot be read."""
    return summary_calls.answer(status, body, _Reply, _read)


def _read(status: int, reply: _Reply) -> SummaryAnswer:
    text = "".join(part.text or "" for item in reply.output if item.type == "message" for part in item.content or [])
    usage = reply.usage or _Usage()
    cached = (usage.input_tokens_details or _Details()).cached_tokens or 0
    finished = reply.status == "completed"
    return SummaryAnswer(status, text, usage.input_tokens, usage.output_tokens, cached, finished=finished)


class _Reply(msgspec.Struct):
    """The members of a reply that matter here; any of them may be missing."""

    status: str = ""
    output: list[_Item] = []
    usage: _Usage | None = None


class _Item(msgspec.Struct):
    type: str = ""
    content: list[_Part] | None = None


class _Part(msgspec.Struct):
    text: str | None = None


class _Usage(msgspec.Struct):
    input_tokens: int = 0
    output_tokens: int = 0
    input_tokens_details: _Details | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = 0
