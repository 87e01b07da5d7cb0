"""One call of `/context_offload`: its messages and limits → what moves to files, what is summarised, what remains.

    messages ──measured──> sizes ──offload──> Offloaded ──(files written, summaries made)──> with_snapshots

The caller adopts the result, so one call is one event: no fold, no pins, nothing that must pay for itself. Whatever a
message looks like, there is a result: what cannot be read is left as it came, and compressed as the JSON that it is.
All comparisons are strict; sizes are tokens.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress

import msgspec
from msgspec import Raw

from proxy.core import preview, rawjson, summary
from proxy.core.history import Message, Reading, Unplannable, digest, moved_pieces
from proxy.core.plan import Item, Role
from proxy.core.policy import Mode, SnapshotRole
from proxy.core.preview import Shape
from proxy.core.rawjson import NotJson
from proxy.core.retrieval.names import joined, stem
from proxy.core.summary import Section
from proxy.dialects.chat import CHAT
from proxy.dialects.chat import messages as chat_messages
from proxy.dialects.chat.messages import MESSAGE_TOKENS
from proxy.dialects.chat.render import is_system
from proxy.dialects.render import compact

NEVER = 1 << 62
"""Tokens that no tool result has: there is no first sight here."""

LONGEST_NAME = 120
"""Bytes of a file's name as it is stored, at most: a call's or a chat's id of 64, a digest, a number, what is ours."""

_REFERENCE = re.compile(
    r"\.\.\. " + re.escape(preview.MARK) + r"(?P<path>[^\n]+); complete, [0-9]+ lines, [0-9]+ tokens\)\Z"
)
_odd = re.compile(r"[^A-Za-z0-9_-]+")

ROLES = chat_messages.ROLES | {"function": Role.TOOL}
"""With the role of results from before there were tool calls."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What the caller asked for. `store_dir` is spelled as it came."""

    mode: Mode
    store_dir: str
    max_total_tokens: int
    max_tool_message_tokens: int
    compact_ratio_threshold: float
    group_token_threshold: int
    """0: one group."""
    keep_recent_count: int | None
    preview_chars: int
    compress_system_message: bool

    @property
    def shape(self) -> Shape:
        return Shape(stem(self.store_dir), self.preview_chars, 0)

    def keep(self, default: int) -> int:
        """How many of the last messages stay."""
        return default if self.keep_recent_count is None else self.keep_recent_count


class Offloaded(msgspec.Struct, frozen=True):
    """What became of the messages. `groups`: the indexes that each snapshot is to stand for, none for most calls."""

    raws: list[bytes | Raw]
    tokens: list[int]
    """Of each message in `raws`."""
    tokens_before: int
    files: dict[str, str]
    """Path → the text that was moved there."""
    compacted: int
    groups: tuple[tuple[int, ...], ...]

    @property
    def taken(self) -> frozenset[int]:
        """The messages that snapshots stand for."""
        return frozenset(index for group in self.groups for index in group)


# -- reading ----------------------------------------------------------------------------------------------------------


def measured(raw: bytes | Raw, options: Options, count: Callable[[str], int]) -> Message:
    """A message's measure; one that cannot be read is all one piece, and never moved on its own."""
    if not _is_older(raw):
        with suppress(Unplannable):
            return CHAT.read(raw, Reading(options.shape, NEVER), count)
    return _opaque(raw, count)


def references(raws: Sequence[bytes | Raw], messages: Sequence[Message], options: Options) -> list[str]:
    """Paths that tool results large enough to move seem to refer to: whether they do, only the files can tell."""
    found: dict[str, None] = {}
    for raw, message in zip(raws, messages, strict=True):
        if _may_move(message, options):
            matches = (_REFERENCE.search(text) for _, text in CHAT.texts(raw))
            found |= {match["path"]: None for match in matches if match}
    return list(found)


def _may_move(message: Message, options: Options) -> bool:
    return (
        options.mode is not Mode.COMPRESS
        and message.role is Role.TOOL
        and message.tokens > options.max_tool_message_tokens
        and bool(message.pieces)
    )


def _is_older(raw: bytes | Raw) -> bool:
    """Whether it calls a function as messages did before there were tool calls."""
    return not rawjson.is_null(rawjson.members(raw).get("function_call"))


def _opaque(raw: bytes | Raw, count: Callable[[str], int]) -> Message:
    role = ROLES[rawjson.string(rawjson.members(raw)["role"])]
    tokens = count(bytes(raw).decode("utf-8", "replace")) + MESSAGE_TOKENS
    item = Item(role, tokens, tokens, tokens)
    return Message(digest(raw), role, b"", tokens, item, (), (), "")


def _refers(text: str, stored: Mapping[str, str]) -> bool:
    """Whether this is a replacement that we made: its file is there, begins with its preview, and is the longer one."""
    match = _REFERENCE.search(text)
    original = stored.get(match["path"], "") if match else ""
    return match is not None and len(text) < len(original) and original.startswith(text[: match.start()])


# -- deciding ---------------------------------------------------------------------------------------------------------


def offload(
    raws: Sequence[bytes | Raw], messages: Sequence[Message], options: Options, stored: Mapping[str, str]
) -> Offloaded:
    """What the limits ask for. `stored`: the texts of those `references` that lead to a file, by path."""
    borders = _borders(messages)
    before = sum(message.tokens for message in messages)
    moved: dict[int, Message] = {}
    if before > options.max_total_tokens:
        moved = _moved(raws, messages, options, stored, _recent(borders, options.keep(1)))
    live = [message.tokens - _saved(moved.get(index)) for index, message in enumerate(messages)]
    groups: tuple[tuple[int, ...], ...] = ()
    if _compresses(options, before, sum(live)):
        groups = _groups(messages, live, borders, options)
    return Offloaded(
        raws=[_compacted(raw, moved.get(index), options.shape) for index, raw in enumerate(raws)],
        tokens=live,
        tokens_before=before,
        files={path: text for index, message in moved.items() for path, text in _files(raws[index], message, options)},
        compacted=len(moved),
        groups=groups,
    )


def _compresses(options: Options, before: int, after: int) -> bool:
    """Whether compaction is not asked for, or leaves too much."""
    if options.mode is not Mode.AUTO:
        return options.mode is Mode.COMPRESS
    return before > 0 and after / before > options.compact_ratio_threshold


def _moved(
    raws: Sequence[bytes | Raw], messages: Sequence[Message], options: Options, stored: Mapping[str, str], recent: int
) -> dict[int, Message]:
    """The tool results to move, each with just the pieces that are worth it."""
    moved = {}
    for index, message in enumerate(messages[:recent]):
        if _may_move(message, options):
            kept = {part for part, text in CHAT.texts(raws[index]) if _refers(text, stored)} if stored else set()
            pieces = tuple(piece for piece in moved_pieces(message, first_preview=False) if piece.part not in kept)
            if pieces:
                moved[index] = msgspec.structs.replace(message, pieces=pieces)
    return moved


def _saved(message: Message | None) -> int:
    return sum(piece.tokens - piece.preview for piece in message.pieces) if message else 0


def _compacted(raw: bytes | Raw, message: Message | None, shape: Shape) -> bytes | Raw:
    return compact(CHAT, raw, message, shape, first_preview=False) if message else raw


def _files(raw: bytes | Raw, message: Message, options: Options) -> Iterator[tuple[str, str]]:
    texts = dict(CHAT.texts(raw))
    return ((joined(options.store_dir, piece.name), texts[piece.part]) for piece in message.pieces)


def _groups(
    messages: Sequence[Message], live: Sequence[int], borders: Sequence[bool], options: Options
) -> tuple[tuple[int, ...], ...]:
    """What is to be compressed, as many whole steps at a time as fit; none where it is not too much."""
    taken = [
        index
        for index in range(_recent(borders, options.keep(2)))
        if options.compress_system_message or messages[index].role is not Role.SYSTEM
    ]
    if sum(live[index] for index in taken) <= options.max_total_tokens:
        return ()
    groups: list[tuple[int, ...]] = []
    room = 0
    for step in _steps(taken, borders):
        tokens = sum(live[index] for index in step)
        if groups and (tokens <= room or not options.group_token_threshold):
            groups[-1] += step
            room -= tokens
        else:
            groups.append(step)
            room = options.group_token_threshold - tokens
    return tuple(groups)


def _steps(taken: Sequence[int], borders: Sequence[bool]) -> list[tuple[int, ...]]:
    """What may not be separated stays together; a border counts even where the message behind it is not taken."""
    steps: list[list[int]] = []
    last = -1
    for index in taken:
        if not steps or any(borders[last + 1 : index + 1]):
            steps.append([])
        steps[-1].append(index)
        last = index
    return [tuple(step) for step in steps]


def _recent(borders: Sequence[bool], keep: int) -> int:
    """Where the last `keep` messages begin, widened so that no call loses its result."""
    start = max(len(borders) - 1 - keep, 0)
    while not borders[start]:
        start -= 1
    return start


def _borders(messages: Sequence[Message]) -> list[bool]:
    """Before which messages, and whether behind the last, a cut may fall: never between a call and its result.

    A result without a call belongs to the message before it, as those of an older kind do.
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


# -- what the caller gets ---------------------------------------------------------------------------------------------


def with_snapshots(
    offloaded: Offloaded, snapshots: Sequence[tuple[str, str]], *, role: SnapshotRole
) -> list[bytes | Raw]:
    """The messages with a snapshot for each group: its text, and the path of its originals."""
    taken = offloaded.taken
    kept = [raw for index, raw in enumerate(offloaded.raws) if index not in taken]
    if not snapshots:
        return kept
    pairs = zip(offloaded.groups, snapshots, strict=True)
    blocks = [summary.framed(text, len(group), path) for group, (text, path) in pairs]
    leading = next((place for place, raw in enumerate(kept) if not is_system(raw)), len(kept))
    return CHAT.with_snapshot(kept, leading, "\n\n".join([summary.NOTICE, *blocks]), role)


def group_turns(offloaded: Offloaded, messages: Sequence[Message], group: Iterable[int]) -> list[Section]:
    """A group for the model that summarises it: as the messages stand, with references in the place of what moved."""
    tools = {call: name for message in messages for call, name in message.calls}
    return [turn for index in group for turn in _turns(offloaded.raws[index], index, messages[index], tools)]


def group_file(raws: Iterable[bytes | Raw]) -> bytes:
    """The untouched messages as a JSON array, each on lines of its own, so that searching and paging work on it."""
    return b"[\n" + b",\n".join(raws) + b"\n]\n"


def group_stem(chat_id: str) -> str:
    """How the names of a chat's group files begin; its number and `.json` follow.

    The id is the caller's and may be anything. One that cannot stand in a name is told apart by its digest.
    """
    safe = _odd.sub("_", chat_id)[:64]
    mark = "" if safe == chat_id else "-" + hashlib.sha256(chat_id.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    return f"compressed_group_{safe}{mark}_"


def _turns(raw: bytes | Raw, index: int, message: Message, tools: Mapping[str, str]) -> list[Section]:
    if not _is_older(raw):
        with suppress(NotJson):
            return CHAT.sections(raw, index, message, tools.get(message.answers, ""))
    return [Section(f"{index + 1} {message.role.name.lower()}", bytes(raw).decode("utf-8", "replace"), message.role)]
