"""Finds calls of our tools in the texts of one reply, while these stream.

    piece ──may it begin a run of calls?──no──> it is shown as it came
                    └──yes──> a Candidate holds it ──something else follows──> it is shown
                                                   └──the reply ends with it──> its calls are ours

Only what may be a run of calls waits. A text that is nothing but white space waits as well where a
client would see it as a block of its own. Candidates of several texts stand together: the last
words of thinking, and an empty answer.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from proxy.dialects.grammars import SIGNS, CallRun, LinesBefore
from proxy.dialects.reply import Block, Candidate, Part, ToolNames


class Recovered(NamedTuple):
    """The calls of our tools in a text, as name and arguments, and what is left of the end that
    they stood in."""

    text: Hashable
    calls: list[tuple[str, dict[str, Any]]]
    end: str
    left: str


class _Text:
    """One text of a reply, as far as it was shown, and the candidate at its end."""

    def __init__(self, waits: bool) -> None:
        self.lines = LinesBefore()
        self.waits = waits  # whether white space waits as long as there is nothing else
        self.candidate: Candidate | None = None


class TextCalls:
    """The texts of one reply. `names` are empty where the request does not have our tools."""

    def __init__(self, names: ToolNames) -> None:
        self._names = names
        self._texts: dict[Hashable, _Text] = {}
        self._open: list[tuple[Hashable, Candidate]] = []

    def passes(self, piece: str) -> bool:
        """Whether a piece of any text certainly begins no run of calls, and no candidate waits."""
        return not (self._open or SIGNS.search(piece))

    def extend(self, pieces: dict[Any, str]) -> bool:
        """Take a piece of each of these texts if all certainly are shown as they came. Returns
        whether they are; if not, nothing has changed. Called only while no candidate waits."""
        if not self._names:
            return True
        for text, piece in pieces.items():
            state = self._texts.get(text)
            if state is None or (state.waits and state.lines.empty) or not self.passes(piece):
                return False
        for text, piece in pieces.items():
            self._texts[text].lines.add(piece)
        return True

    def shown(self, text: Hashable, piece: str) -> None:
        """Take a piece that `passes`."""
        if self._names:
            self._text(text).lines.add(piece)

    def take(
        self,
        text: Hashable,
        piece: str,
        of: Block,
        event: Callable[[str], Any],
        *,
        waits: bool = False,
    ) -> list[Part] | None:
        """Take the next piece of a text, which is of this block; `event` makes an event of a part
        of it.

        Returns the parts of the reply in the place of the piece, or None if it is shown as it came.
        """
        if not self._names:
            return None
        state = self._text(text, waits)
        if self.passes(piece) and not (state.waits and state.lines.empty):
            state.lines.add(piece)
            return None
        candidate = state.candidate
        if candidate is not None and len(candidate.text) + len(piece) < candidate.next:
            candidate.text += piece
            return []
        written = candidate.text + piece if candidate else piece
        at = state.lines.cut(written, self._names)
        if state.waits and state.lines.empty and not written[:at].strip():
            at = 0
        if at == 0 and candidate:
            candidate.grow(written)
            return []
        if written[:at].strip():
            self._give_up(candidate)
        state.lines.add(written[:at])
        state.candidate = None
        if candidate:
            self._open = [one for one in self._open if one[1] is not candidate]
            candidate.text = written[:at]
            candidate.shown = True
        elif at == len(written):
            return None
        parts: list[Part] = [] if candidate or not at else [(event(written[:at]), of)]
        if at < len(written):
            state.candidate = Candidate(written[at:], of, event)
            self._open.append((text, state.candidate))
            parts.append((None, state.candidate))
        return parts

    def known(self, text: Hashable) -> bool:
        """Whether any piece of this text was taken."""
        return text in self._texts

    def begun(self, text: Hashable) -> bool:
        """Whether anything but white space of this text is certainly no call."""
        return text in self._texts and not self._texts[text].lines.empty

    def waits(self, text: Hashable) -> bool:
        """Whether the end of this text waits."""
        state = self._texts.get(text)
        return state is not None and state.candidate is not None

    def settle(self, quotes: Callable[[], bool]) -> list[Recovered]:
        """Decide about all candidates, because the reply has ended. Those behind which only other
        candidates stand are calls, unless upstream parses the calls of this conversation, so that
        its texts only `quotes` them: that looks through the conversation."""
        found: list[Recovered] = []
        for text, candidate in reversed(self._open):
            if not candidate.text.strip():
                continue
            run = CallRun(candidate.text, 0, self._names, first=self._texts[text].lines.empty)
            if not (run.ended and run.ours) or quotes():
                break
            calls = [(self._names.recognised(call.name), call.arguments) for call in run.ours]
            found.append(Recovered(text, calls, candidate.text, run.rest))
            candidate.text = run.rest
            candidate.shown = bool(run.rest.strip())
        self._give_up(None)
        return found[::-1]

    def _text(self, text: Hashable, waits: bool = False) -> _Text:
        if text not in self._texts:
            self._texts[text] = _Text(waits)
        return self._texts[text]

    def _give_up(self, but: Candidate | None) -> None:
        """Show what waits: it is followed by something else."""
        for text, candidate in self._open:
            if candidate is not but:
                candidate.shown = candidate.shown is not False
                self._texts[text].lines.add(candidate.text)
                self._texts[text].candidate = None
        self._open = [one for one in self._open if one[1] is but]
