"""Entries for upstream and for readers: a snapshot added, a hidden round put back, an entry as readable sections."""

from __future__ import annotations

from functools import partial

from msgspec import Raw

from proxy import rawjson
from proxy.dialects import entries
from proxy.dialects.entries import appended, call_section, sources, title
from proxy.dialects.responses import items
from proxy.dialects.responses.items import call_of, reasoning, text_message, texts
from proxy.dialects.responses.request import COMPACTIONS, items_of, kind, members_of
from proxy.dialects.values import object_of, string, text_of
from proxy.plan.history import Message, ToolCall
from proxy.plan.plan import Role
from proxy.plan.recognition import kept_calls
from proxy.plan.summary import Section
from proxy.plan.turn import HiddenRound
from proxy.policy import SnapshotRole

Entry = bytes | Raw


def with_snapshot(entries: list[Entry], leading: int, block: str, role: SnapshotRole) -> list[Entry]:
    """Return the entries, which begin with `leading` system messages, with the snapshot `block` added.

    `instructions` are not touched: they come before all entries, so an item at their beginning is just as good. What
    upstream itself has summarised at the beginning is older than the snapshot, and precedes it.
    """
    while leading < len(entries) and kind(entries[leading]).type in COMPACTIONS:
        leading += 1
    if role is SnapshotRole.USER:
        return [*entries[:leading], text_message("user", block), *entries[leading:]]
    if leading and items.is_known(members_of(Raw(entries[0])), kind(entries[0])):
        return [appended(entries[0], "\n\n" + block, "input_text"), *entries[1:]]
    return [*entries[:leading], text_message("developer", block), *entries[leading:]]


def said(entry: Entry) -> tuple[str, list[ToolCall]]:
    """Return the text and the calls of a reply. Raises NotJson."""
    return items.said(items_of(entry))


def reinserted(hidden: HiddenRound, visible: Entry) -> list[Entry]:
    """Return all entries of a turn whose client saw `visible`.

    A record's `instead` is one JSON value, so it is an array of the reply's items. If the client has rewritten its
    calls, its own reply stays, and only what came before is put back.
    """
    if hidden.instead is not None:
        answered = {_answered(entry) for entry in hidden.after}
        if not kept_calls(items.said(rawjson.elements(hidden.instead))[1], answered, said(visible)[1]):
            return [*hidden.before, visible]
    reply = visible if hidden.instead is None else hidden.instead.strip()[1:-1]
    return [*hidden.before, *([reply] if bytes(reply) else []), *hidden.after]


def _calls(entry: bytes) -> list[ToolCall]:
    items = rawjson.elements(entry) if rawjson.is_array(Raw(entry)) else items_of(entry)
    return [call_of(rawjson.members(item), "function_call") for item in items if kind(item).type == "function_call"]


def _answered(entry: bytes) -> str:
    items = items_of(entry)
    answers = len(items) == 1 and kind(items[0]).type == "function_call_output"
    return text_of(rawjson.members(items[0]).get("call_id")) if answers else ""


def _replaced(entry: bytes, text: str) -> bytes:
    return rawjson.encode(rawjson.members(entry) | {"output": string(text)})


shrunk = partial(entries.shrunk, calls=_calls, answered=_answered, replaced=_replaced)


# -- for readers ------------------------------------------------------------------------------------------------------


def sections(entry: Entry, index: int, message: Message, tool: str) -> list[Section]:
    """Return one entry in readable form; `tool` is the tool whose result it is. Raises NotJson."""
    heading = title(index, message, tool)
    made = [section for item in items_of(entry) for section in _sections(item, heading, message.role)]
    return made or [Section(heading, "", message.role)]


def _sections(item: Raw, title: str, role: Role) -> list[Section]:
    type, members = kind(item).type, members_of(item)
    if type == "reasoning":
        thought = reasoning(members)
        return [Section(f"{title} reasoning", thought, role)] if thought else []
    if type == "message" or role is Role.TOOL:
        said = [Section(title, text, role) for _, text in texts(rawjson.encode(members))]
        parts = map(object_of, items.listed(members.get("content")))
        said += [section for part in parts for section in sources(title, part, role)]
        return said or [Section(title, bytes(item).decode("utf-8", "replace"), role)]
    call = call_of(members, type)
    return [call_section(title, call, role)]
