"""Messages, `POST .../messages`, as an implementation of the protocol `proxy.dialects.Dialect`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from msgspec import Raw

from proxy.core import rawjson
from proxy.core.request import Request
from proxy.dialects import overflow
from proxy.dialects.messages import blocks, costs, errors, render, request, summary
from proxy.dialects.messages.refusals import complaint, forgiving, shape
from proxy.dialects.messages.round_request import LIMITS, MessagesRoundRequest
from proxy.dialects.messages.turn import MessagesTurn
from proxy.dialects.refusals import is_error
from proxy.dialects.reply_limits import lowered, lowest

_PATH = re.compile(rb"(?:/[^/]+)*/v1/messages|/messages")
"""Other APIs have paths that end alike, such as `/v1/threads/ID/messages`."""
_COUNT = b"/count_tokens"
_OWN = re.compile(rb"(?:/v1|^)/messages(?:/|\Z)")


class MessagesDialect:
    """Refers each method to the module of this folder that implements it. The protocol documents the methods."""

    name = "messages"
    version_header = b"anthropic-version"
    """A header that every request for this API has, also those for models and files."""

    def __init__(self, *, counts: bool = False) -> None:
        """`counts`: it serves `POST .../messages/count_tokens`, which takes what would be sent."""
        self.counts = counts

    recognises = staticmethod(request.recognises)
    parse = staticmethod(request.parse)
    continued = staticmethod(request.continued)

    read = staticmethod(blocks.read)
    texts = staticmethod(blocks.texts)
    replace = staticmethod(blocks.with_texts)
    reply_meaning = staticmethod(blocks.reply_meaning)
    sections = staticmethod(render.sections)
    with_snapshot = staticmethod(render.with_snapshot)
    joined = staticmethod(render.joined)
    said = staticmethod(render.said)
    reinserted = staticmethod(render.reinserted)
    shrunk = staticmethod(render.shrunk)

    summary_request = staticmethod(summary.alone)
    summary_on_prefix = staticmethod(summary.on_prefix)
    summary_answer = staticmethod(summary.answer)

    may_be_overflow = staticmethod(overflow.may_be)
    is_overflow = staticmethod(overflow.is_overflow)
    window = staticmethod(overflow.window)
    complaint = staticmethod(complaint)
    forgiving = staticmethod(forgiving)
    is_error = staticmethod(is_error)
    shape = staticmethod(shape)
    prompt_tokens = staticmethod(costs.prompt_tokens)
    reported = staticmethod(costs.reported)
    error_body = staticmethod(errors.body)
    error_event = staticmethod(errors.event)

    def serves(self, method: str, path: bytes) -> bool:
        asked = path.removesuffix(_COUNT) if self.counts else path
        return method == "POST" and self.counts == (asked != path) and _PATH.fullmatch(asked) is not None

    def owns(self, path: bytes, headers: Sequence[tuple[bytes, bytes]]) -> bool:
        return _OWN.search(path) is not None or any(name.lower() == self.version_header for name, _ in headers)

    @property
    def counting(self) -> MessagesDialect:
        """The dialect of requests that only ask how many tokens they have."""
        return MessagesDialect(counts=True)

    def reply_limit(self, asked: Request, left: int) -> int | None:
        return lowest(lowered(asked.members, LIMITS, left))

    def with_lower_limit(self, asked: Request, left: int) -> bytes:
        return rawjson.encode(asked.members | lowered(asked.members, LIMITS, left))

    def turn(
        self,
        asked: Request,
        entries: Sequence[bytes | Raw],
        tools: Sequence[bytes],
        max_rounds: int,
        usage: bool = True,
        left: int | None = None,
    ) -> MessagesTurn:
        return MessagesTurn(MessagesRoundRequest(asked, entries, tools, max_rounds, usage, left))


MESSAGES = MessagesDialect()
