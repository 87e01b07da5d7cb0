"""Builds the bodies of summary calls and reads their replies."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import Raw

from proxy import rawjson
from proxy.dialects import summary_calls
from proxy.dialects.chat.messages import cache_breakpoint, text_message, with_cache_breakpoint
from proxy.dialects.chat.render import followed
from proxy.dialects.chat.request import function_tool
from proxy.dialects.chat.round_request import LIMITS
from proxy.plan.request import Request
from proxy.plan.summary import SummaryAnswer

IDENTITY = ("user", "safety_identifier")
KEPT = (*IDENTITY, "prompt_cache_key", "cache_control", "service_tier", "reasoning_effort")
"""Members that a summary call copies from its request: who asks, how to cache, how to reason. Another model may know
only the members that say who asks. `store` is never copied."""


def alone(text: str, model: str, request: Request | None = None, most: int = 0) -> bytes:
    """Return the body of a call whose only message is `text`."""
    return rawjson.encode(_members(model, request, most) | {"messages": [{"role": "user", "content": text}]})


def on_prefix(
    text: str, request: Request, entries: Sequence[bytes | Raw], tools: Sequence[bytes], most: int, end: int
) -> bytes:
    """Return the body of a call that continues `entries`, exactly as upstream has cached them, with the task `text`.

    If the last entry is a user message, the task goes on with it, because many chat templates refuse two in a row.
    Some caches store a prefix only up to a breakpoint that the client sets. If the client set one after `end`, the
    task gets the same one, since the client's own is not part of this call.
    """
    without_calls = summary_calls.uncalled(request, [function_tool(raw) for raw in tools], b'"none"')
    marks = [mark for raw in request.entries[end:] if (mark := cache_breakpoint(raw))]
    task = text_message("user", text)
    last = with_cache_breakpoint(task, marks[-1]) if marks else task
    members = _members(request.model, request, most) | without_calls
    together = followed(entries[-1], by=last) if entries else None
    sent = [*entries, last] if together is None else [*entries[:-1], together]
    return rawjson.encode(members | {"messages": Raw(rawjson.array(sent))})


def _members(model: str, request: Request | None, most: int) -> dict[str, Raw]:
    """Return all members except messages and tools."""
    named = {"model": Raw(rawjson.encode(model))}
    own = summary_calls.is_own(request, model)
    limits = list(summary_calls.kept(request, LIMITS)) if own else []
    return {**named, **summary_calls.kept(request, KEPT if own else IDENTITY), **_limited(limits, most)}


def _limited(names: Sequence[str], most: int) -> dict[str, Raw]:
    """Return the reply's limit in the client's fields, because servers know one or the other, or in the older one."""
    return dict.fromkeys(names or LIMITS[:1], Raw(b"%d" % most)) if most else {}


def _with_newer_limit(body: bytes) -> bytes:
    """Return the body of a call with the reply's limit in the newer field, which some models insist on."""
    members = rawjson.members(body)
    old, new = LIMITS
    return rawjson.encode({new if name == old else name: value for name, value in members.items()})


# -- replies ----------------------------------------------------------------------------------------------------------


def answer(status: int, body: bytes) -> SummaryAnswer:
    """Read the reply to a call. The answer has no text if the body cannot be read."""
    read = summary_calls.answer(status, body, _Completion, _read)
    if status == 400 and not read.too_long and LIMITS[1].encode() in body:
        return SummaryAnswer(status, again=_with_newer_limit)
    return read


def _read(status: int, completion: _Completion) -> SummaryAnswer:
    usage = completion.usage or _Usage()
    details = usage.prompt_tokens_details or _Details()
    choice = completion.choices[0] if completion.choices else _Choice(_Message())
    text = choice.message.content or ""
    cached, finished = details.cached_tokens or 0, choice.finish_reason == "stop"
    return SummaryAnswer(status, text, usage.prompt_tokens, usage.completion_tokens, cached, finished=finished)


class _Completion(msgspec.Struct):
    """The members of a reply that matter here; any of them may be missing."""

    choices: list[_Choice] = []
    usage: _Usage | None = None


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None


class _Message(msgspec.Struct):
    content: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = 0
