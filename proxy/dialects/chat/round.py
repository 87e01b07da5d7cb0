"""One reply of upstream while it is read: what of it a client may see, when it may turn out to be a hidden round.

Everything goes on at once but
- calls of our tools, which never do, and calls whose name may still become ours;
- what only a visible round may show: signed reasoning, and the text where the client wants JSON (two texts are none);
- the end, where something is hidden: another round may follow.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Raw

from proxy.core import rawjson
from proxy.dialects.chat.reply import Chunk, Members, ReplyMessage, held, text_of
from proxy.dialects.chat.tool_calls import PartialCall, ToolCalls

MANY_CALLS = 128
"""As many tools as a request may have."""


class Round:
    """Reads chunks. `names` are our tools', none where the request has none of ours."""

    def __init__(self, names: Sequence[str], *, numbered: bool, later: bool, holds_text: bool) -> None:
        self.message = ReplyMessage()
        self.calls = ToolCalls(names, numbered=numbered)
        self.usage: Raw | None = None
        self.finish = ""
        """The finish reason, as soon as it is known."""
        self.end: Chunk | None = None
        """The event with it, where that is kept back."""
        self.bill: Chunk | None = None
        """The event with the usage, where that is kept back."""
        self._injected = bool(names)
        self._later = later
        self._holds_text = holds_text
        self._kept: list[Chunk] = []
        self._last: Chunk | None = None

    @property
    def hides(self) -> bool:
        """Whether there is something in this turn that the client does not see."""
        return self._later or bool(self.calls.ours)

    def read(self, chunk: Chunk) -> list[Chunk]:
        """What of this chunk, and of what was kept back before, may be shown now. Raises Broken."""
        self.usage = chunk.usage or self.usage
        if chunk.choice is None:
            return self._about_nothing(chunk)
        self._last = chunk
        self.message.add(chunk.delta)
        parts = self._sort_calls(chunk)
        self._keep_back(chunk)
        return self._finished(chunk, parts) if chunk.finish else [chunk, *parts]

    def settle(self) -> list[Chunk]:
        """No more is coming: whose calls there are is known now."""
        return [] if self._last is None else _entries(self._last, self.calls.settle())

    def release(self, *, visible: bool) -> list[Chunk]:
        """What was kept back, once the round is not a hidden one.

        Text that was is not shown beside answered calls of ours, in a mixed turn either: unless the round is all
        `visible`.
        """
        kept, self._kept = self._kept, []
        return [chunk for chunk in kept if visible or not text_of(chunk.delta.get("content"))]

    def history(self, calls: Sequence[PartialCall]) -> bytes | None:
        """The assistant message as the model wrote it, with these of its calls."""
        return self.message.history([call.raw() for call in calls])

    def _about_nothing(self, chunk: Chunk) -> list[Chunk]:
        if chunk.usage is not None and self.hides:
            self.bill = chunk
            return []
        return [chunk]

    def _sort_calls(self, chunk: Chunk) -> list[Chunk]:
        """The client's part of the calls in this chunk, where that is not simply all of them."""
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
    """Entries of `tool_calls`, each in an event of its own: some clients look at the first one only.

    More than any model calls at once stay in one, for each event repeats all else that the reply says.
    """
    if len(entries) > MANY_CALLS:
        return [chunk.part({"tool_calls": Raw(rawjson.array(map(rawjson.encode, entries)))})]
    return [chunk.part({"tool_calls": Raw(rawjson.array([rawjson.encode(entry)]))}) for entry in entries]
