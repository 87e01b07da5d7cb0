"""What the summary calls of all dialects have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Raw

from proxy import rawjson
from proxy.dialects import cache_marks, overflow
from proxy.dialects.round_request import has_tools, with_tools
from proxy.dialects.usage import Reported, reported
from proxy.dialects.values import Members, string
from proxy.plan.summary import SummaryAnswer
from proxy.plan.turn import Request
from proxy.rawjson import NotJson

ANSWER_BYTES = 4 << 20
"""The most bytes of a reply that are parsed. A record takes a few thousand, and parsing more would block the event loop
for more than 10 ms."""


def asking(model: str, request: Request | None, who: Sequence[str], how: Sequence[str]) -> Members:
    """Return the model and what a call copies from its request: `who` asks and, if the model is the request's own,
    `how` to cache and to reason. Another model may not know those members."""
    if request is None:
        return {"model": string(model)}
    names = (*who, *how) if model == request.model else who
    return {"model": string(model)} | {name: request.members[name] for name in names if name in request.members}


def uncalled(request: Request, ours: Sequence[bytes], choice: bytes) -> Members:
    """Return the tools of the request and `ours`, as upstream has cached them, and the `choice` of none; or nothing."""
    defined = with_tools(request.members.get("tools"), ours)
    return {"tools": defined, "tool_choice": Raw(choice)} if defined is not None and has_tools(defined) else {}


def task(text: str, request: Request, end: int) -> bytes:
    """Return the task as a user message. Some caches store a prefix only up to a breakpoint that the client sets. If
    the client set one after entry `end`, the task gets the same, since the client's own is not part of the call."""
    marks = [mark for raw in request.entries[end:] if (mark := cache_marks.last_in(raw))]
    content = cache_marks.content(string(text), marks[-1]) if marks else None
    return rawjson.encode({"role": "user", "content": content or string(text)})


def answer(status: int, body: bytes, read: Callable[[Members], tuple[str, bool]]) -> SummaryAnswer:
    """Read the reply to a call. The answer has no text if the body cannot be read. `read` returns the text of a reply,
    and whether the model ended it by itself."""
    if overflow.is_overflow(status, body):
        return SummaryAnswer(status, too_long=True, window=overflow.window(body))
    if len(body) > ANSWER_BYTES:
        return SummaryAnswer(status)
    try:
        text, finished = read(rawjson.members(Raw(body)))
    except (NotJson, KeyError, ValueError):
        return SummaryAnswer(status)
    said = reported(body) or Reported(0, 0, 0)
    return SummaryAnswer(status, text, said.prompt, said.completion, said.cached or 0, finished=finished)
