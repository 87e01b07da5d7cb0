"""The turn of the chat API: see `proxy.dialects.turn`."""

from __future__ import annotations

from collections.abc import Iterable

from proxy import rawjson, sse
from proxy.dialects import usage
from proxy.dialects.chat import errors
from proxy.dialects.chat.client_reply import ChatClientReply, ChatWholeReply
from proxy.dialects.chat.plain import plain_delta
from proxy.dialects.chat.reply import Chunk, as_events, parse
from proxy.dialects.chat.round import ChatRound
from proxy.dialects.chat.round_request import ChatRoundRequest
from proxy.dialects.refusals import is_error
from proxy.dialects.turn import Turn
from proxy.errors import ProxyError
from proxy.plan.history import ToolCall
from proxy.rawjson import NotJson


class ChatTurn(Turn):
    """A turn of the chat API. Streams and whole replies share its code: a whole reply is one large event."""

    usage = usage.CHAT
    _asked: ChatRoundRequest
    _round: ChatRound
    _shown: ChatClientReply

    def _reply(self, *, streamed: bool) -> ChatClientReply:
        return ChatClientReply(self._ledger, self._asked.wants_usage) if streamed else ChatWholeReply(self._ledger)

    def _begun_round(self) -> ChatRound:
        begun = ChatRound(
            self._names,
            numbered=self._shown.streamed,
            later=self._later,
            holds_text=self._asked.wants_json,
            theirs=self._theirs,
        )
        self._shown.calls = begun.theirs
        return begun

    def _take(self, event: sse.ServerSentEvent, data: bytes) -> bytes:
        if self._round.quick and (delta := plain_delta(data)) is not None:
            self._round.message.add_plain(delta)
            self._shown.message.add_plain(delta)
            return event.raw
        out = super()._take(event, data)
        plain = not (self.rounds or self._bare or self._asked.wants_json)
        self._round.quick = plain and self._shown.started and not self._round.undecided
        return out

    def _parsed(self, event: sse.ServerSentEvent, data: bytes) -> Chunk:
        chunk = parse(data)
        chunk.raw, chunk.name = event.raw, event.name
        return chunk

    def _error_in(self, parsed: Chunk, data: bytes) -> bytes | None:
        failed = parsed.failed or parsed.name == b"error" or (parsed.choice is None and is_error(data))
        return data if failed and parsed.says_nothing else None

    def _events_of(self, body: bytes) -> Iterable[Chunk]:
        chunk = parse(body)
        if chunk.key != "message" or (chunk.failed and chunk.says_nothing):
            raise NotJson("no chat completion")
        self._done = sse.encode(sse.DONE)
        if self._shown.streamed:
            return as_events(chunk)
        chunk.raw = body
        return [chunk]

    def _result(self, id: str, text: str) -> bytes:
        return rawjson.encode({"role": "tool", "tool_call_id": id, "content": text})

    def _last_parts(self) -> list[Chunk]:
        if self._mute:
            self._round.finish_with("stop")
        return super()._last_parts()

    def close(self) -> bytes:
        if self.mixed and not self._round.unfinished:
            self._round.finish_with("tool_calls")
        return super().close()

    @property
    def visible(self) -> tuple[str, list[ToolCall]]:
        return self._shown.message.text(), [call.call() for call in self._shown.calls]

    def error_event(self, fault: ProxyError, said: bytes = b"") -> bytes:
        return errors.event(fault, said)
