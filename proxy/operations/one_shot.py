"""One call of `/context_offload`: decides which texts move to files, which messages are summarised, and what remains.

    messages ──measured──> sizes ──offload──> Offloaded ──(files written, summaries made)──> with_snapshots

The caller adopts the result, so one call is one event: there are no pins, and nothing has to pay for itself. Every
message is accepted: one with members that we do not know stays unchanged, and is summarised as JSON. All comparisons
are strict, and sizes are in tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

import msgspec
from msgspec import Raw

from proxy.dialects.chat import CHAT
from proxy.dialects.chat.request import is_system
from proxy.dialects.render import compact
from proxy.operations.names import joined
from proxy.operations.schema import OffloadParameters
from proxy.plan import preview, summary
from proxy.plan.history import Naming
from proxy.plan.message import Message, Reading, moved_pieces
from proxy.plan.plan import Role
from proxy.plan.summary import Section
from proxy.policy import Mode, SnapshotRole

NEVER = 1 << 62
"""More tokens than any tool result has, so that no result is moved before the model has seen it."""

_REFERENCE = re.compile(
    r"\.\.\. "
    + re.escape(preview.MARK)
    + r"[^\n]+?; complete, [0-9]+ lines, (?P<tokens>[0-9]{1,12}) tokens(?:; [^\n;)]+)?\)\Z"
)
"""The end of a replacement that we made, and how many tokens it stands for."""


class Offloaded(msgspec.Struct, frozen=True):
    """The decision. `groups` has the indexes of the messages that each snapshot replaces; most calls have no groups."""

    raws: list[bytes | Raw]
    tokens: list[int]
    """The tokens of each message in `raws`."""
    tokens_before: int
    files: dict[str, str]
    """Path → the text that was moved there."""
    compacted: int
    groups: tuple[tuple[int, ...], ...]

    @property
    def taken(self) -> frozenset[int]:
        """The indexes of the messages that snapshots replace."""
        return frozenset(index for group in self.groups for index in group)


def measured(raw: bytes | Raw, options: OffloadParameters, count: Callable[[str], int]) -> Message:
    return CHAT.read(raw, Reading(options.shape, NEVER), count)


def _refers(text: str, count: Callable[[str], int]) -> bool:
    """Whether this is a replacement that we made: it ends with a reference to something larger, and so stays."""
    match = _REFERENCE.search(text)
    return match is not None and count(text) < int(match["tokens"])


def offload(
    raws: Sequence[bytes | Raw],
    messages: Sequence[Message],
    options: OffloadParameters,
    count: Callable[[str], int],
) -> Offloaded:
    """Decide what the limits require."""
    messages, _ = Naming().named(messages)
    borders = _borders(messages)
    before = sum(message.tokens for message in messages)
    moved: dict[int, Message] = {}
    if before > options.max_total_tokens:
        moved = _moved(raws, messages[: _recent(borders, options.keep(1))], options, count)
    kept = [
        compact(CHAT, raw, moved[index], options.shape, first_preview=False) if index in moved else raw
        for index, raw in enumerate(raws)
    ]
    # Measured again, not summed from parts: callers compare their threshold with the ratio that the reply states.
    live = [
        measured(raw, options, count).tokens if index in moved else message.tokens
        for index, (raw, message) in enumerate(zip(kept, messages, strict=True))
    ]
    groups: tuple[tuple[int, ...], ...] = ()
    if _compresses(options, before, sum(live)):
        groups = _groups(messages, live, borders, options)
    return Offloaded(
        raws=kept,
        tokens=live,
        tokens_before=before,
        files={
            joined(options.store_dir, piece.name): dict(CHAT.texts(raws[index]))[piece.part]
            for index, message in moved.items()
            for piece in message.pieces
        },
        compacted=len(moved),
        groups=groups,
    )


def _compresses(options: OffloadParameters, before: int, after: int) -> bool:
    """Whether to compress: in compress mode always, in auto mode if compaction leaves too much."""
    if options.mode is not Mode.AUTO:
        return options.mode is Mode.COMPRESS
    return before > 0 and after / before > options.compact_ratio_threshold


def _moved(
    raws: Sequence[bytes | Raw], messages: Sequence[Message], options: OffloadParameters, count: Callable[[str], int]
) -> dict[int, Message]:
    """Return the tool results to move, each with only the pieces that are worth moving."""
    moved = dict[int, Message]()
    if options.mode is Mode.COMPRESS:
        return moved
    for index, message in enumerate(messages):
        if message.role is Role.TOOL and message.tokens > options.max_tool_message_tokens and message.pieces:
            kept = {part for part, text in CHAT.texts(raws[index]) if _refers(text, count)}
            pieces = tuple(piece for piece in moved_pieces(message, first_preview=False) if piece.part not in kept)
            if pieces:
                moved[index] = msgspec.structs.replace(message, pieces=pieces)
    return moved


def _groups(
    messages: Sequence[Message], live: Sequence[int], borders: Sequence[bool], options: OffloadParameters
) -> tuple[tuple[int, ...], ...]:
    """Return the groups to compress, each with as many whole steps as fit; none if the total is within the limit."""
    taken = [
        index
        for index in range(_recent(borders, options.keep(2)))
        if options.compress_system_message or messages[index].role is not Role.SYSTEM
    ]
    if sum(live[index] for index in taken) <= options.max_total_tokens:
        return ()
    groups: list[tuple[int, ...]] = []
    room, most = 0, options.group_token_threshold or 0
    for step in _steps(taken, borders):
        tokens = sum(live[index] for index in step)
        if groups and (tokens <= room or not most):
            groups[-1] += step
            room -= tokens
        else:
            groups.append(step)
            room = most - tokens
    return tuple(groups)


def _steps(taken: Sequence[int], borders: Sequence[bool]) -> list[tuple[int, ...]]:
    """Split the taken messages at the borders. A border counts even if the message after it is not taken."""
    steps: list[list[int]] = []
    last = -1
    for index in taken:
        if not steps or any(borders[last + 1 : index + 1]):
            steps.append([])
        steps[-1].append(index)
        last = index
    return [tuple(step) for step in steps]


def _recent(borders: Sequence[bool], keep: int) -> int:
    """Return the index where the last `keep` messages begin, or an earlier one, so that no call loses its result."""
    start = max(len(borders) - 1 - keep, 0)
    while not borders[start]:
        start -= 1
    return start


def _borders(messages: Sequence[Message]) -> list[bool]:
    """Return whether the history may be cut before each message, and after the last one.

    A cut never separates a call from its result. A result without a call belongs to the message before it, and so do
    results in the old form.
    """
    calls: dict[str, int] = {}
    partners: list[int] = []
    for index, message in enumerate(messages):
        before = max(index - 1, 0)
        partners.append(calls.get(message.answers, before) if message.role is Role.TOOL else index)
        calls |= {call: index for call, _ in message.calls}
    borders = [True]
    needed = len(messages)
    for index in range(len(messages) - 1, -1, -1):
        needed = min(needed, partners[index])
        borders.append(needed >= index)
    return borders[::-1]


def with_snapshots(offloaded: Offloaded, snapshots: Sequence[tuple[str, str]]) -> list[bytes | Raw]:
    """Return the messages with `snapshots`, each a text and the path of its originals, instead of the groups.

    They stand in the system message, where callers of this operation have always found them.
    """
    taken = offloaded.taken
    kept = [raw for index, raw in enumerate(offloaded.raws) if index not in taken]
    if not snapshots:
        return kept
    pairs = zip(offloaded.groups, snapshots, strict=True)
    blocks = [summary.framed(text, len(group), path) for group, (text, path) in pairs]
    leading = next((place for place, raw in enumerate(kept) if not is_system(raw)), len(kept))
    return CHAT.with_snapshot(kept, leading, "\n\n".join([summary.NOTICE, *blocks]), SnapshotRole.SYSTEM)


def group_turns(offloaded: Offloaded, messages: Sequence[Message], group: Iterable[int]) -> list[Section]:
    """Return a group as the summarising model sees it, with references in place of the texts that moved."""
    tools = {call: name for message in messages for call, name in message.calls}
    turns = list[Section]()
    for index in group:
        raw, message = offloaded.raws[index], messages[index]
        if message.sealed:
            said = bytes(raw).decode("utf-8", "replace")
            turns.append(Section(f"{index + 1} {message.role.name.lower()}", said, message.role))
        else:
            turns += CHAT.sections(raw, index, message, tools.get(message.answers, ""))
    return turns
