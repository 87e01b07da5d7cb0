"""Reads one reply of upstream and decides which parts the client may see, because the round may have to be hidden.

Everything is shown at once, except:
- calls of our tools, which are never shown, and calls with an incomplete name that may turn out to be one of ours;
- parts that only a visible round may show: signed reasoning, and text if the client wants JSON (two texts are not);
- the end, if something is hidden, because another round may follow.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Raw

from proxy.core import rawjson
from proxy.dialects.chat.reply import Chunk, ReplyMessage, held
from proxy.dialects.chat.tool_calls import PartialCall, ToolCalls
from proxy.dialects.values import Members, text_of

MANY_CALLS = 128
"""Up to this many calls each get a separate event; a request may have as many tools."""


class Round:
    """Reads chunks. `names` are the names of our tools; empty if the request does not have them."""

    def __init__(self, names: Sequence[str], *, numbered: bool, later: bool, holds_text: bool) -> None:
        self.message = ReplyMessage()
        self.calls = ToolCalls(names, numbered=numbered)
        self.usage: Raw | None = None
        self.finish = ""
        """The finish reason; empty until it is known."""
        self.end: Chunk | None = None
        """The event with the finish reason, if it is kept back."""
        self.bill: Chunk | None = None
        """The event with the usage, if it is kept back."""
        self._injected = bool(names)
        self._later = later
        self._holds_text = holds_text
        self._kept: list[Chunk] = []
        self._last: Chunk | None = None

    @property
    def hides(self) -> bool:
        """Whether this turn has anything that the client does not see."""
        return self._later or bool(self.calls.ours)

    def read(self, chunk: Chunk) -> list[Chunk]:
        """Return the parts to show now, of this chunk and of earlier ones that were kept back. Raises Broken."""
        self.usage = chunk.usage or self.usage
        if chunk.choice is None:
            return self._about_nothing(chunk)
        self._last = chunk
        self.message.add(chunk.delta)
        parts = self._sort_calls(chunk)
        self._keep_back(chunk)
        return self._finished(chunk, parts) if chunk.finish else [chunk, *parts]

    def settle(self) -> list[Chunk]:
        """Sort the remaining calls, now that the reply has ended. Returns the parts to show."""
        return [] if self._last is None else _entries(self._last, self.calls.settle())

    def release(self, *, visible: bool) -> list[Chunk]:
        """Return the parts that were kept back, once it is known that the round is not hidden.

        In a mixed turn, text that was kept back is left out; it is shown only if the whole round is `visible`.
        """
        kept, self._kept = self._kept, []
        return [chunk for chunk in kept if visible or not text_of(chunk.delta.get("content"))]

    def history(self, calls: Sequence[PartialCall]) -> bytes | None:
        """Return the assistant message as the model wrote it, with only these of its calls."""
        return self.message.history([call.raw() for call in calls])

    def _about_nothing(self, chunk: Chunk) -> list[Chunk]:
        if chunk.usage is not None and self.hides:
            self.bill = chunk
            return []
        return [chunk]

    def _sort_calls(self, chunk: Chunk) -> list[Chunk]:
        """Return events with the client's calls in this chunk, if the chunk cannot be shown unchanged."""
        if not chunk.calls:
            return []
        shown = self.calls.take(chunk.calls, whole=chunk.key == "message")
        if len(shown) == len(chunk.calls) and all(
            entry is delta.members for entry, delta in zip(shown, chunk.calls, strict=True)
        ):
            return []
        chunk.drop("tool_calls")
        return _entries(chunk, shown)

    def _keep_back(self, chunk: Chunk) -> None:
        if not self._injected:
            return
        if signed := held(chunk.delta):
            self._kept.append(chunk.take(signed))
        if self._holds_text and text_of(chunk.delta.get("content")):
            self._kept.append(chunk.take(["content"]))

    def _finished(self, chunk: Chunk, parts: list[Chunk]) -> list[Chunk]:
        self.finish = chunk.finish
        parts += _entries(chunk, self.calls.settle())
        if self.hides:
            self.end = chunk.take_end()
            return [chunk, *parts]
        return [*parts, *self.release(visible=True), chunk]


def _entries(chunk: Chunk, entries: Sequence[Members]) -> list[Chunk]:
    """Return the entries of `tool_calls` in separate events, because some clients read only the first entry.

    More entries than any model sends stay in one event, because each event repeats the reply's other members.
    """
    if len(entries) > MANY_CALLS:
        return [chunk.part({"tool_calls": Raw(rawjson.array(map(rawjson.encode, entries)))})]
    return [chunk.part({"tool_calls": Raw(rawjson.array([rawjson.encode(entry)]))}) for entry in entries]
