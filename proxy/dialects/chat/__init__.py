"""Chat completions, `POST .../chat/completions`, as an implementation of the protocol `proxy.dialects.Dialect`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from msgspec import Raw

from proxy.core import rawjson
from proxy.core.request import Request
from proxy.core.turn import Continuation
from proxy.dialects import overflow, usage
from proxy.dialects.chat import errors, hidden, messages, render, summary, users
from proxy.dialects.chat.refusals import shape
from proxy.dialects.chat.request import parse
from proxy.dialects.chat.round_request import LIMITS, ChatRoundRequest
from proxy.dialects.chat.turn import ChatTurn
from proxy.dialects.refusals import as_it_is, complaint, is_error
from proxy.dialects.reply_limits import lowered, lowest

_OWN = re.compile(rb"/chat/completions(?:/|\Z)")


class ChatDialect:
    """Refers each method to the module of this folder that implements it. The protocol documents the methods."""

    name = "chat"
    counts = False

    parse = staticmethod(parse)

    read = staticmethod(messages.read)
    texts = staticmethod(messages.texts)
    replace = staticmethod(messages.with_texts)
    reply_meaning = staticmethod(messages.reply_meaning)
    sections = staticmethod(render.sections)
    with_snapshot = staticmethod(render.with_snapshot)
    joined = staticmethod(users.joined)
    said = staticmethod(hidden.said)
    reinserted = staticmethod(hidden.reinserted)
    shrunk = staticmethod(hidden.shrunk)

    summary_request = staticmethod(summary.alone)
    summary_on_prefix = staticmethod(summary.on_prefix)
    summary_answer = staticmethod(summary.answer)

    may_be_overflow = staticmethod(overflow.may_be)
    is_overflow = staticmethod(overflow.is_overflow)
    window = staticmethod(overflow.window)
    complaint = staticmethod(complaint)
    forgiving = staticmethod(as_it_is)
    is_error = staticmethod(is_error)
    shape = staticmethod(shape)
    error_body = staticmethod(errors.body)
    error_event = staticmethod(errors.event)

    prompt_tokens = staticmethod(usage.prompt_tokens)
    reported = staticmethod(usage.reported)

    are_paired = staticmethod(messages.are_paired)
    """Checks records that are older than the other dialects; not part of the protocol."""

    def serves(self, method: str, path: bytes) -> bool:
        return method == "POST" and path.endswith(b"/chat/completions")

    def owns(self, path: bytes, headers: Sequence[tuple[bytes, bytes]]) -> bool:
        return _OWN.search(path) is not None

    def continued(self, request: Request, continuation: Continuation) -> bytes:
        return request.body  # every request has the whole history

    def reply_limit(self, asked: Request, left: int) -> int | None:
        return lowest(lowered(asked.members, LIMITS, left))

    def with_lower_limit(self, asked: Request, left: int) -> bytes:
        return rawjson.encode(asked.members | lowered(asked.members, LIMITS, left))

    def turn(
        self,
        request: Request,
        entries: Sequence[bytes | Raw],
        tools: Sequence[bytes],
        max_rounds: int,
        usage: bool = True,
        left: int | None = None,
    ) -> ChatTurn:
        return ChatTurn(ChatRoundRequest(request, entries, tools, max_rounds, usage, left))


CHAT = ChatDialect()
