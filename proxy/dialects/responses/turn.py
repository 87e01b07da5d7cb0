"""The turn of the Responses API: see `proxy.dialects.turn`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from proxy import rawjson, sse
from proxy.dialects import usage
from proxy.dialects.last_words import NOT_ANSWERED
from proxy.dialects.responses import errors
from proxy.dialects.responses.client_reply import ResponsesClientReply, ResponsesWholeReply
from proxy.dialects.responses.items import output, said
from proxy.dialects.responses.reply import ItemEvent, Part, ResponsesRound, as_events
from proxy.dialects.responses.round_request import ResponsesRoundRequest
from proxy.dialects.turn import Turn
from proxy.dialects.values import object_of
from proxy.errors import ProxyError
from proxy.plan.history import ToolCall
from proxy.plan.turn import Continuation, State


class ResponsesTurn(Turn):
    """A turn of the Responses API."""

    usage = usage.RESPONSES
    _asked: ResponsesRoundRequest
    _round: ResponsesRound
    _shown: ResponsesClientReply

    def _reply(self, *, streamed: bool) -> ResponsesClientReply:
        return (
            ResponsesClientReply(self._ledger, self._names)
            if streamed
            else ResponsesWholeReply(self._ledger, self._names)
        )

    def _begun_round(self) -> ResponsesRound:
        return ResponsesRound(
            self._names,
            later=self._later or bool(self._shown.id),
            holds_text=self._asked.wants_json,
            stored=self._asked.stores,
            theirs=self._theirs,
        )

    def _parsed(self, event: sse.ServerSentEvent, data: bytes) -> ItemEvent:
        return ItemEvent(data, event.raw, event.name)

    def _error_in(self, parsed: ItemEvent, data: bytes) -> bytes | None:
        if parsed.type not in ("error", "response.failed"):
            return None
        error = object_of(parsed.response).get("error")
        return data if rawjson.is_null(error) else rawjson.encode({"error": error})

    def _events_of(self, body: bytes) -> Iterable[ItemEvent]:
        events = list(as_events(rawjson.members(body)))
        if isinstance(self._shown, ResponsesWholeReply):
            self._shown.take(body)
        return events

    def _show(self, parts: Sequence[Part]) -> bytes:
        self._shown.hides |= self._round.hides
        return self._shown.show(parts)

    def _go_on(self, answers: Sequence[str]) -> None:
        for event, _ in self._round.end:
            if event is not None:
                self._shown.carry(event.response)
        super()._go_on(answers)

    def _result(self, id: str, text: str) -> bytes:
        return output(id, text)

    def _as_one(self, entries: list[bytes]) -> bytes:
        return rawjson.array(entries)

    @property
    def continuation(self) -> Continuation | None:
        """Upstream keeps calls of ours that were not answered, too, and refuses what follows them without results."""
        self._require(State.DONE)
        kept = self._asked.stores and self._shown.id and self._round.id
        if not (kept and self._round.hides) or self._round.failed:
            return None
        dropped = [item for item in self._round.ours if item.call_id and item not in self._answering]
        after = (*self._after, *(self._result(item.call_id, NOT_ANSWERED) for item in dropped))
        same = self._shown.id == self._round.id and not after
        return None if same else Continuation(self._shown.id, self._round.id, after)

    @property
    def visible(self) -> tuple[str, list[ToolCall]]:
        return said(self._shown.finals())

    def error_event(self, fault: ProxyError, said: bytes = b"") -> bytes:
        return errors.event(fault, said, self._shown.next_number)
