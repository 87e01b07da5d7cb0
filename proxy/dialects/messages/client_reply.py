"""The reply as the client sees it: a single one, however many rounds it takes.

It has the first round's id, one beginning and one end. The blocks' numbers count on over all rounds. The end says why
the last round stopped, and its usage covers all rounds.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Raw

from proxy import rawjson, sse
from proxy.dialects.messages.reply import BEGIN, CALLED, CLOSING, DELTA, START, STOP, Block, Part, ReplyEvent
from proxy.dialects.usage import UsageLedger
from proxy.dialects.values import NULL, Members, object_of, string, text_of

FRAME = ("id", "model")
"""Members of the reply that are those of its first round."""


class MessageStream:
    """The reply so far. This class sends events at once; `WholeMessage` keeps them for one reply at the end."""

    streamed = True

    def __init__(self, ledger: UsageLedger) -> None:
        self.blocks: list[Block] = []
        """The blocks that the client sees."""
        self.begun = False
        self.hides = False
        """Whether upstream sent more than the client sees."""
        self.container: Raw = NULL
        """Where upstream's own tools ran in an earlier round."""
        self._ledger = ledger
        self._frame: Members = {}

    @property
    def seen(self) -> bool:
        return bool(self.blocks)

    def go_on(self) -> None:
        self.hides = True

    def show(self, parts: Iterable[Part]) -> bytes:
        return b"".join([self._put(event, block) for event, block in parts])

    def close(self, done: bytes) -> bytes:
        return done

    def _put(self, event: ReplyEvent, block: Block | None) -> bytes:
        changed = self._changes(event, block)
        if event.raw and not changed:
            return event.raw
        return sse.encode(rawjson.encode(rawjson.members(event.data) | changed), event.name)

    def _changes(self, event: ReplyEvent, block: Block | None) -> Members:
        """Return the members of the event that differ from upstream's."""
        if event.type == BEGIN:
            message = object_of(event.message)
            self.begun, self._frame = True, {key: message[key] for key in FRAME if key in message}
        if block is not None and event.type in (START, DELTA, STOP):
            if block.shown is None:
                block.shown = len(self.blocks)
                self.blocks.append(block)
            return {} if event.index == block.shown else {"index": Raw(b"%d" % block.shown)}
        return self._ending(event) if event.type == CLOSING and self.hides else {}

    def _ending(self, event: ReplyEvent) -> Members:
        changed: Members = {}
        ended, other = object_of(event.delta), Members()
        if text_of(ended.get("stop_reason")) == CALLED and not any(block.type == CALLED for block in self.blocks):
            other["stop_reason"] = string("end_turn")
        if not rawjson.is_null(self.container) and rawjson.is_null(ended.get("container")):
            other["container"] = self.container
        if other:
            changed["delta"] = Raw(rawjson.encode(ended | other))
        if not rawjson.is_null(event.usage):
            changed["usage"] = self._ledger.total(event.usage)
        return changed


class WholeMessage(MessageStream):
    """A reply that is not a stream: upstream's own bytes if nothing is hidden."""

    streamed = False

    def __init__(self, ledger: UsageLedger) -> None:
        super().__init__(ledger)
        self._whole = b""
        self._end: Members = {}

    def take(self, body: bytes) -> None:
        """Take a round's body, which is the reply if it turns out to be the last."""
        self._whole = body

    def show(self, parts: Iterable[Part]) -> bytes:
        for event, block in parts:
            changed = self._changes(event, block)
            if event.type == CLOSING:
                self._end = {
                    **object_of(changed.get("delta", event.delta)),
                    "usage": changed.get("usage", event.usage),
                }
        return b""

    def close(self, done: bytes) -> bytes:
        if not self.hides:
            return self._whole
        last = object_of(Raw(self._whole))
        content = rawjson.array(rawjson.encode(block.final()) for block in self.blocks)
        ended = {key: value for key, value in self._end.items() if key in last or value is not NULL}
        return rawjson.encode(last | self._frame | {"content": Raw(content)} | ended)
