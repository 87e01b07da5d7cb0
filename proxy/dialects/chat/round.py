"""Reads one reply of upstream and decides which parts the client may see, because the round may have to be hidden.

Everything is shown at once, except:
- calls of our tools, which are never shown, and calls with an incomplete name that may turn out to be one of ours;
- text that may turn out to be a call of our tools (see `text_calls`);
- parts that only a visible round may show: signed reasoning, and text if the client wants JSON (two texts are not);
- the end, if something is hidden, because another round may follow.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from msgspec import Raw

from proxy import rawjson
from proxy.dialects.chat import text_calls
from proxy.dialects.chat.reply import Chunk, ReplyMessage, held
from proxy.dialects.chat.tool_calls import PartialCall, ToolCalls
from proxy.dialects.values import Members, string, text_of

STOPPED = frozenset(("length", "content_filter", "error"))
"""Finish reasons after which no round follows, since the last call may be incomplete (`error`: OpenRouter)."""

MANY_CALLS = 128
"""Up to this many calls each get a separate event; a request may have as many tools."""


class ChatRound:
    """Reads chunks. `names` are the names of our tools; empty if the request does not have them."""

    def __init__(
        self, names: Sequence[str], *, numbered: bool, later: bool, holds_text: bool, theirs: Collection[str] = ()
    ) -> None:
        self.message = ReplyMessage()
        self.calls = ToolCalls(names, numbered=numbered, theirs=theirs)
        self.usage: Raw | None = None
        self.failed = False
        self.quick = False
        """Whether an event with text only has to be noted and nothing else."""
        self._finish = ""  # the finish reason; empty until it is known
        self._end: Chunk | None = None  # the event with the finish reason, if it is kept back
        self._bill: Chunk | None = None  # the event with the usage, if it is kept back
        self._injected = bool(names)
        self._later = later
        self._holds_text = holds_text
        self._kept: list[Chunk] = []
        self._last: Chunk | None = None
        self.undecided = bool(names)
        """Whether the text may still turn out to be a call of ours."""
        self._beginning = ""
        self._texts: list[Chunk] = []  # kept back for that reason

    @property
    def hides(self) -> bool:
        """Whether this turn has anything that the client does not see."""
        return self._later or bool(self.calls.ours)

    @property
    def ours(self) -> list[PartialCall]:
        return self.calls.ours

    @property
    def theirs(self) -> list[PartialCall]:
        return self.calls.theirs

    @property
    def pieces(self) -> int:
        return len(self.calls.all)

    @property
    def ended(self) -> bool:
        return bool(self._finish)

    @property
    def over(self) -> bool:
        return False  # a stream ends with an event that is no chunk

    @property
    def unfinished(self) -> bool:
        return self._finish in STOPPED

    @property
    def end(self) -> list[Chunk]:
        return [chunk for chunk in (self._end, self._bill) if chunk is not None]

    def finish_with(self, reason: str) -> None:
        """Change the finish reason, if it is kept back."""
        if self._end is not None:
            self._end.put_choice("finish_reason", string(reason))

    def read(self, chunk: Chunk) -> list[Chunk]:
        self.failed |= chunk.failed
        self.usage = chunk.usage or self.usage
        if chunk.choice is None:
            return self._about_nothing(chunk)
        self._last = chunk
        self.message.add(chunk.delta)
        parts = self._sort_calls(chunk)
        texts = self._hold_text(chunk)
        self._keep_back(chunk)
        return texts + (self._finished(chunk, parts) if chunk.finish else [chunk, *parts])

    def settle(self) -> list[Chunk]:
        if self._last is None:
            return []
        return [*self._decide_text(), *_entries(self._last, self.calls.settle())]

    @property
    def empty(self) -> bool:
        said = any(self.message.text(key).strip() for key in ("content", "refusal"))
        return self._last is not None and not said and not self.calls.theirs

    def say(self, text: str, seed: str) -> list[Chunk]:
        self.message.add_text("content", text)
        return [] if self._last is None else [self._last.part({"content": string(text)})]

    def release(self, *, visible: bool) -> list[Chunk]:
        kept, self._kept = self._kept, []
        return [chunk for chunk in kept if visible or not text_of(chunk.delta.get("content"))]

    def written(self, answered: Collection[object]) -> list[bytes]:
        calls = [call.raw() for call in self.calls.all if not call.ours or call in answered]
        message = self.message.history(calls)
        return [] if message is None else [message]

    def _about_nothing(self, chunk: Chunk) -> list[Chunk]:
        if chunk.usage is not None and self.hides:
            self._bill = chunk
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

    def _hold_text(self, chunk: Chunk) -> list[Chunk]:
        """Keep text back that may be a call of ours. Returns what was kept back before and turned out to be none."""
        if not self.undecided or rawjson.is_null(chunk.delta.get("content")):
            return self._decide_text(chunk) if chunk.finish else []
        named = text_calls.is_named(self._beginning)
        if not named:
            self._beginning += text_of(chunk.delta["content"])
        if not (named or text_calls.could_be_call(self._beginning, self.calls.names)):
            self.undecided = False
            texts, self._texts = self._texts, []
            return texts
        if chunk.finish:
            return self._decide_text(chunk)
        if self._beginning.strip() and not self._holds_text:
            self._texts.append(chunk.take(["content"]))
        return []

    def _decide_text(self, chunk: Chunk | None = None) -> list[Chunk]:
        """Take a text that consists of calls of ours for these calls. Returns the parts to show if it does not.

        `chunk` has the end of the text, if that is not kept back.
        """
        texts, self._texts = self._texts, []
        calls = text_calls.calls_in(self.message.text(), self.calls.names) if self.undecided else []
        self.undecided = False
        if not calls:
            return texts
        for name, arguments in calls:
            self.calls.adopt(name, arguments)
        self.message.forget("content")
        self._kept = [kept for kept in self._kept if not text_of(kept.delta.get("content"))]
        if chunk is not None and "content" in chunk.delta:
            chunk.drop("content")
        return []

    def _keep_back(self, chunk: Chunk) -> None:
        if not self._injected:
            return
        if signed := held(chunk.delta):
            self._kept.append(chunk.take(signed))
        if self._holds_text and text_of(chunk.delta.get("content")):
            self._kept.append(chunk.take(["content"]))

    def _finished(self, chunk: Chunk, parts: list[Chunk]) -> list[Chunk]:
        self._finish = chunk.finish
        parts += _entries(chunk, self.calls.settle())
        if self.hides:
            self._end = chunk.take_end()
            return [chunk, *parts]
        return [*parts, *self.release(visible=True), chunk]


def _entries(chunk: Chunk, entries: Sequence[Members]) -> list[Chunk]:
    """Return the entries of `tool_calls` in separate events, because some clients read only the first entry.

    More entries than any model sends stay in one event, because each event repeats the reply's other members.
    """
    if len(entries) > MANY_CALLS:
        return [chunk.part({"tool_calls": Raw(rawjson.array(map(rawjson.encode, entries)))})]
    return [chunk.part({"tool_calls": Raw(rawjson.array([rawjson.encode(entry)]))}) for entry in entries]
