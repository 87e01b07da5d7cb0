"""The turn of the Messages API: see `proxy.dialects.turn`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from proxy import rawjson, sse
from proxy.dialects import usage
from proxy.dialects.messages import errors
from proxy.dialects.messages.blocks import result, said
from proxy.dialects.messages.client_reply import MessageStream, WholeMessage
from proxy.dialects.messages.reply import MessagesRound, Part, ReplyEvent, as_events
from proxy.dialects.messages.round_request import MessagesRoundRequest
from proxy.dialects.turn import Turn
from proxy.errors import ProxyError
from proxy.plan.history import ToolCall


class MessagesTurn(Turn):
    """A turn of the Messages API."""

    usage = usage.MESSAGES
    _asked: MessagesRoundRequest
    call_ids = "toolu"
    _round: MessagesRound
    _shown: MessageStream

    def _reply(self, *, streamed: bool) -> MessageStream:
        return MessageStream(self._ledger) if streamed else WholeMessage(self._ledger)

    def _begun_round(self) -> MessagesRound:
        later = self._later or self._shown.begun
        return MessagesRound(self._names, later=later, holds_text=self._asked.wants_json, theirs=self._theirs)

    def _parsed(self, event: sse.ServerSentEvent, data: bytes) -> ReplyEvent:
        return ReplyEvent(data, event.raw, event.name)

    def _error_in(self, parsed: ReplyEvent, data: bytes) -> bytes | None:
        return data if parsed.type == "error" else None

    def _events_of(self, body: bytes) -> Iterable[ReplyEvent]:
        events = list(as_events(rawjson.members(body)))
        if isinstance(self._shown, WholeMessage):
            self._shown.take(body)
        return events

    def _show(self, parts: Sequence[Part]) -> bytes:
        self._shown.hides |= self._round.hides
        return self._shown.show(parts)

    def _go_on(self, answers: Sequence[str]) -> None:
        if not rawjson.is_null(self._round.container):
            self._asked.container = self._shown.container = self._round.container
        super()._go_on(answers)

    def _result(self, id: str, text: str) -> bytes:
        return result(id, text)

    @property
    def visible(self) -> tuple[str, list[ToolCall]]:
        return said(block.final() for block in self._shown.blocks)

    def error_event(self, fault: ProxyError, said: bytes = b"") -> bytes:
        return errors.event(fault, said)
