"""Shortens hidden rounds: answers of our tools that were read long ago leave a line each. Shared by all dialects."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from proxy.plan.history import ToolCall
from proxy.plan.turn import HiddenRound
from proxy.tools.definitions import NAMES, OTHER_NAMES, Names

POINTER_BYTES = 4
"""Bytes of a token of the line that replaces an answer, about."""


def shrunk(
    hidden: HiddenRound,
    least: int,
    names: Names = NAMES,
    *,
    calls: Callable[[bytes], Sequence[ToolCall]],
    answered: Callable[[bytes], str],
    replaced: Callable[[bytes, str], bytes],
) -> HiddenRound:
    """Return the round with a line in place of each answer above `least` tokens that says how to get it again. The tool
    is called what it is called now (`names`): the client may have got one of its own with the name that it had.

    `calls` returns the calls in an entry, `answered` the id of the call that an entry answers or "", and `replaced` an
    answer with another text.
    """
    entries, sizes = [*hidden.before, *hidden.after], hidden.sizes_of_each()
    if all(size <= least for size in sizes):
        return hidden
    made = [*entries, *([] if hidden.instead is None else [hidden.instead])]
    known = {call.id: call for entry in made for call in calls(entry)}
    for place, (entry, size) in enumerate(zip(entries, sizes, strict=True)):
        call = known.get(answered(entry)) if size > least else None
        if call is None:
            continue
        pointer = replaced(entry, _line(call, names))
        if len(pointer) < len(entry):
            entries[place], sizes[place] = pointer, len(pointer) // POINTER_BYTES
    first = len(hidden.before)
    before, after = tuple(entries[:first]), tuple(entries[first:])
    return msgspec.structs.replace(hidden, before=before, after=after, tokens=sum(sizes), sizes=tuple(sizes))


def _line(call: ToolCall, names: Names) -> str:
    name = next((names[known.index(call.name)] for known in (NAMES, OTHER_NAMES) if call.name in known), call.name)
    return f"(this answer was shown before and is left out now; to have it again call {name} with {call.arguments})"
