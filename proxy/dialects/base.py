"""What all dialects do alike, whatever their API calls it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from msgspec import Raw

from proxy import rawjson
from proxy.dialects import overflow, refusals
from proxy.dialects.reply_limits import lowered, lowest
from proxy.dialects.round_request import RoundRequest
from proxy.dialects.turn import Turn
from proxy.dialects.usage import prompt_tokens, reported
from proxy.plan.request import Request
from proxy.plan.turn import Continuation


class BaseDialect:
    """The methods that no dialect needs to write itself. The protocol `proxy.dialects.Dialect` documents them."""

    counts = False
    turns: ClassVar[type[Turn]]
    requests: ClassVar[type[RoundRequest]]

    may_be_overflow = staticmethod(overflow.may_be)
    window = staticmethod(overflow.window)
    complaint = staticmethod(refusals.complaint)
    forgiving = staticmethod(refusals.as_it_is)
    is_error = staticmethod(refusals.is_error)
    prompt_tokens = staticmethod(prompt_tokens)
    reported = staticmethod(reported)

    def turn(
        self,
        request: Request,
        entries: Sequence[bytes | Raw],
        tools: Sequence[bytes],
        max_rounds: int,
        usage: bool = True,
        left: int | None = None,
    ) -> Turn:
        return self.turns(self.requests(request, entries, tools, max_rounds, usage, left))

    def reply_limit(self, asked: Request, left: int) -> int | None:
        return lowest(lowered(asked.members, self.requests.limits, left))

    def with_lower_limit(self, asked: Request, left: int) -> bytes:
        return rawjson.encode(asked.members | lowered(asked.members, self.requests.limits, left))

    def continued(self, request: Request, continuation: Continuation) -> bytes:
        """Every request has the whole history, unless upstream keeps it."""
        return request.body
