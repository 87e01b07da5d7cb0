"""Plan and records → the messages that go upstream. The same plan and the same records give the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec
from msgspec import Raw

from proxy.core import rawjson, summary
from proxy.core.history import Message, ToolCall, Transcript
from proxy.core.plan import Plan, Role, SummaryBoundary
from proxy.core.policy import SnapshotRole
from proxy.core.summary import Section
from proxy.dialects.chat.messages import reasoning, text_message, tool_calls


class ActiveSnapshot(msgspec.Struct, frozen=True):
    """A cut whose snapshot exists: `text` is what stands between its tags, `path` where its originals are read."""

    boundary: SummaryBoundary
    text: str
    path: str


class HiddenRound(msgspec.Struct, frozen=True):
    """What a reply hid from the client: messages before it, itself where it was shown otherwise, messages behind it."""

    before: tuple[bytes, ...]
    instead: bytes | None
    after: tuple[bytes, ...]
    tokens: int
    """What reinserting it adds, about: before it is shrunk."""


Compacted = Callable[[int, bool], bytes]
"""Message index, whether as a glimpse → the message with previews and references. Whoever gives it may cache."""


def render(
    transcript: Transcript,
    plan: Plan,
    compacted: Compacted,
    *,
    shown: ActiveSnapshot | None = None,
    role: SnapshotRole = SnapshotRole.SYSTEM,
    rounds: Mapping[int, HiddenRound] | None = None,
    end: int | None = None,
) -> list[bytes | Raw]:
    """The first `end` messages (all, by default) as they go upstream; `rounds` by their reply's index."""
    messages: list[bytes | Raw] = []
    start = shown.boundary.end if shown else 0
    for index, raw in enumerate(transcript.raws[:end]):
        if shown and index < start and not stays(transcript, shown.boundary, index):
            continue
        move = plan.moves.get(index)
        message = compacted(index, move.event == 0) if move else raw
        hidden = rounds.get(index) if rounds and index >= start else None
        if hidden is None:
            messages.append(message)
        else:
            messages += reinserted(hidden, message, shrunk=index < plan.turn)
    return with_snapshot(messages, _leading_systems(transcript), shown_block(transcript, shown), role)


def stays(transcript: Transcript, boundary: SummaryBoundary, index: int) -> bool:
    """Whether a cut leaves this message of those before it alone."""
    return index in boundary.pins or transcript.messages[index].role is Role.SYSTEM


def taken(transcript: Transcript, boundary: SummaryBoundary) -> list[int]:
    """The messages that a cut's snapshot stands for."""
    return [index for index in range(boundary.end) if not stays(transcript, boundary, index)]


def shown_block(transcript: Transcript, shown: ActiveSnapshot | None) -> str:
    return summary.block(shown.text, len(taken(transcript, shown.boundary)), shown.path) if shown else ""


def with_snapshot(messages: list[bytes | Raw], leading: int, block: str, role: SnapshotRole) -> list[bytes | Raw]:
    """The messages with the snapshot in its place. `leading`: how many system messages they begin with."""
    if not block:
        return messages
    if role is SnapshotRole.USER:
        return [*messages[:leading], text_message("user", block), *messages[leading:]]
    for place, raw in enumerate(messages):
        if is_system(raw):
            return [*messages[:place], appended(raw, "\n\n" + block), *messages[place + 1 :]]
    return [text_message("system", block), *messages]


def appended(raw: bytes | Raw, text: str) -> bytes:
    """A message with more text at its end; what it had keeps its bytes."""
    members = rawjson.members(raw)
    content = members.get("content")
    if content is None or rawjson.is_null(content):
        grown = rawjson.encode(text)
    elif rawjson.is_string(content):
        grown = bytes(content)[:-1] + rawjson.encode(text)[1:]
    else:
        part = rawjson.encode({"type": "text", "text": text})
        grown = rawjson.array([*rawjson.elements(content), part])
    return rawjson.encode(members | {"content": Raw(grown)})


def reinserted(hidden: HiddenRound, visible: bytes | Raw, shrunk: bool) -> list[bytes | Raw]:
    """A turn put together again. `shrunk`: answers of our tools become a line that says how to have them again."""
    reply = visible if hidden.instead is None else hidden.instead
    whole: list[bytes | Raw] = [*hidden.before, reply, *hidden.after]
    return _without_answers(whole) if shrunk else whole


def _without_answers(messages: Sequence[bytes | Raw]) -> list[bytes | Raw]:
    calls: dict[str, ToolCall] = {}
    kept: list[bytes | Raw] = []
    for raw in messages:
        members = rawjson.members(raw)
        calls |= {call.id: call for call in tool_calls(members)}
        call = calls.get(rawjson.string(members["tool_call_id"])) if "tool_call_id" in members else None
        kept.append(_pointer(members, call, raw) if call else raw)
    return kept


def _pointer(members: dict[str, Raw], call: ToolCall, raw: bytes | Raw) -> bytes | Raw:
    line = (
        f"(this answer was shown before and is left out now; to have it again call {call.name} with {call.arguments})"
    )
    shorter = rawjson.encode(members | {"content": line})
    return shorter if len(shorter) < len(bytes(raw)) else raw


def is_system(raw: bytes | Raw) -> bool:
    """Whether the message is a system message, by either name."""
    return rawjson.string(rawjson.members(raw)["role"]) in ("system", "developer")


def _leading_systems(transcript: Transcript) -> int:
    roles = [message.role for message in transcript.messages]
    return next((place for place, role in enumerate(roles) if role is not Role.SYSTEM), len(roles))


# -- the originals of a cut ------------------------------------------------------------------------------------------


def originals(transcript: Transcript, boundary: SummaryBoundary, since: SummaryBoundary | None = None) -> list[Section]:
    """Everything that a cut takes out of the context, in order, in the words it came in.

    `since`: only what an earlier cut had not yet taken.
    """
    before = set(taken(transcript, since)) if since else set()
    return [turn for index in taken(transcript, boundary) if index not in before for turn in _turns(transcript, index)]


def _turns(transcript: Transcript, index: int) -> list[Section]:
    return turns(transcript.raws[index], index, transcript.messages[index], transcript.tools[index])


def turns(raw: bytes | Raw, index: int, message: Message, tool: str) -> list[Section]:
    """One message for a reader; `tool` is whose result it is. Raises NotJson."""
    members = rawjson.members(raw)
    title = f"{index + 1} {message.role.name.lower()}"
    if message.role is Role.TOOL:
        title = f"{title} {_one_line(message.answers)} {_one_line(tool)}"
    thought = reasoning(members)
    made = [Section(f"{title} reasoning", thought, message.role)] if thought else []
    made += [Section(title, text, message.role) for text in _contents(members.get("content"))]
    calls = tool_calls(members)
    made += [
        Section(f"{title} calls {_one_line(call.name)} {_one_line(call.id)}", call.arguments, message.role)
        for call in calls
    ]
    return made or [Section(title, "", message.role)]


def _contents(content: Raw | None) -> list[str]:
    """Texts as they read, other parts as their JSON."""
    if content is None or rawjson.is_null(content):
        return []
    if rawjson.is_string(content):
        return [rawjson.string(content)]
    parts = [(part, rawjson.members(part)) for part in rawjson.elements(content)]
    return [
        rawjson.string(members["text"]) if rawjson.is_string(members.get("text")) else bytes(part).decode()
        for part, members in parts
    ]


def _one_line(text: str) -> str:
    """An id or a name is the client's and may be anything; in a header it must not end the line."""
    return " ".join(text.split())[:64]
