"""What the summary calls of all dialects have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
from msgspec import Raw

from proxy.dialects import overflow
from proxy.dialects.tools import has_tools, with_tools
from proxy.dialects.values import Members
from proxy.plan.request import Request
from proxy.plan.summary import SummaryAnswer

T = TypeVar("T")

ANSWER_BYTES = 4 << 20
"""The most bytes of a reply that are parsed. A record takes a few thousand, and parsing more would block the event loop
for more than 10 ms."""


def is_own(request: Request | None, model: str) -> bool:
    """Whether a call to this model is one to the request's own."""
    return request is not None and model == request.model


def kept(request: Request | None, names: Sequence[str]) -> Members:
    """Return those of the request's members that have these names."""
    return {} if request is None else {name: request.members[name] for name in names if name in request.members}


def uncalled(request: Request, ours: Sequence[bytes], choice: bytes) -> Members:
    """Return the tools of the request and `ours`, as upstream has cached them, and the `choice` of none; or nothing."""
    defined = with_tools(request.members.get("tools"), ours)
    return {"tools": defined, "tool_choice": Raw(choice)} if defined is not None and has_tools(defined) else {}


def answer(status: int, body: bytes, reply: type[T], read: Callable[[int, T], SummaryAnswer]) -> SummaryAnswer:
    """Read the reply to a call. The answer has no text if the body cannot be read as a `reply`."""
    if overflow.is_overflow(status, body):
        return SummaryAnswer(status, too_long=True, window=overflow.window(body))
    if len(body) > ANSWER_BYTES:
        return SummaryAnswer(status)
    try:
        return read(status, msgspec.json.decode(body, type=reply))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return SummaryAnswer(status)
