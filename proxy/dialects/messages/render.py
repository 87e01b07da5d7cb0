"""Entries for upstream and for readers: a snapshot added, a hidden round put back, an entry as readable sections."""

from __future__ import annotations

from functools import partial

from msgspec import Raw

from proxy import rawjson
from proxy.dialects import entries
from proxy.dialects.entries import call_section, sources, title
from proxy.dialects.messages import blocks
from proxy.dialects.messages.blocks import THINKING, blocks_of, call_of, result, text_message
from proxy.dialects.messages.request import FRAME, RESULT, Entry, blocks_in, is_blocks, is_text, parts_of, user_message
from proxy.dialects.values import Members, text_of
from proxy.plan.history import Message, ToolCall
from proxy.plan.plan import Role
from proxy.plan.recognition import kept_calls
from proxy.plan.summary import Section
from proxy.plan.turn import HiddenRound
from proxy.policy import SnapshotRole


def with_snapshot(entries: list[Entry], leading: int, block: str, role: SnapshotRole) -> list[Entry]:
    """Return the entries with the snapshot `block` added: to the system prompt's end, or in front of everything said.

    The system prompt's own blocks and breakpoints stay in front of it, so that upstream's cache still has them.
    """
    if role is SnapshotRole.USER:
        return [*entries[:leading], text_message("user", block), *entries[leading:]]
    return [rawjson.encode(block), *entries]


def joined(entries: list[Entry]) -> list[Entry]:
    """Return the entries with each run of user messages as one. Anthropic takes them in a row, but other servers of
    this API fill them into chat templates that refuse that."""
    made: list[Entry] = []
    run: list[Raw] = []
    for entry in entries:
        said = _said_by_user(entry)
        if said is not None and run:
            run += said
            made[-1] = user_message(run)
            continue
        run = said or []
        made.append(entry)
    return made


def followed(entries: list[Entry], task: Entry) -> list[Entry]:
    """Return the entries followed by a user message, which goes on with the last one if that is the user's, too."""
    if entries and is_blocks(entries[-1]):
        return [*entries, b",".join(bytes(block) for block in _said_by_user(task) or [])]
    return [*entries[:-1], *joined([*entries[-1:], task])]


def said(entry: Entry) -> tuple[str, list[ToolCall]]:
    """Return the text and the calls of a reply. Raises NotJson."""
    return blocks.said(blocks_of(entry))


def reinserted(hidden: HiddenRound, visible: Entry) -> list[Entry]:
    """Return all entries of a turn whose client saw `visible`.

    A record's `instead` is a message. If the client has rewritten its calls, its own reply stays, and only what came
    before is put back.
    """
    if hidden.instead is None:
        return [*hidden.before, visible, *hidden.after]
    answered = {_answered(entry) for entry in hidden.after}
    if not kept_calls(said(hidden.instead)[1], answered, said(visible)[1]):
        return [*hidden.before, visible]
    return [*hidden.before, *([hidden.instead] if blocks_of(hidden.instead) else []), *hidden.after]


def _said_by_user(entry: Entry) -> list[Raw] | None:
    """Return the blocks of what the user said; None for anything else, also for results, which wait for the others of
    their message."""
    if is_text(entry):
        return None
    message, found = parts_of(entry)
    if message is None:
        return None if any(text_of(rawjson.members(raw).get("type")) == RESULT for raw in found) else found
    return blocks_in(entry) if text_of(message.get("role")) == "user" and message.keys() <= FRAME else None


def _calls(entry: bytes) -> list[ToolCall]:
    message, _ = parts_of(entry)
    return [] if message is None else said(entry)[1]


def _answered(entry: bytes) -> str:
    _, found = parts_of(entry)
    members = rawjson.members(found[0]) if len(found) == 1 else {}
    return text_of(members.get("tool_use_id")) if text_of(members.get("type")) == RESULT else ""


def _replaced(entry: bytes, text: str) -> bytes:
    return result(_answered(entry), text)


shrunk = partial(entries.shrunk, calls=_calls, answered=_answered, replaced=_replaced)


# -- for readers ------------------------------------------------------------------------------------------------------


def sections(entry: Entry, index: int, message: Message, tool: str) -> list[Section]:
    """Return one entry in readable form; `tool` is the tool whose result it is. Raises NotJson."""
    heading = title(index, message, tool)
    made = [section for block in blocks_of(entry) for section in _sections(block, heading, message.role)]
    return made or [Section(heading, "", message.role)]


def _sections(block: Members, title: str, role: Role) -> list[Section]:
    kind = text_of(block.get("type"))
    if kind == "text":
        return [Section(title, text_of(block.get("text")), role), *sources(title, block, role)]
    if kind in THINKING:
        thought = text_of(block.get("thinking"))
        return [Section(f"{title} reasoning", thought, role)] if thought else []
    if kind == RESULT:
        content = block.get("content")
        if content is None or not rawjson.is_array(content):
            return [Section(title, text_of(content), role)]
        return [made for raw in rawjson.elements(content) for made in _sections(rawjson.members(raw), title, role)]
    if kind.endswith("tool_use"):
        return [call_section(title, call_of(block), role)]
    return [Section(title, rawjson.encode(block).decode("utf-8", "replace"), role)]
