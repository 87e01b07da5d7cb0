"""Entries for upstream and for readers: a snapshot added, a hidden round put back, an entry as readable sections."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Raw

from proxy import rawjson
from proxy.dialects.entries import appended, call_section, media_section, sources, title
from proxy.dialects.request import read_summary, summary_members, uncalled
from proxy.dialects.responses import items
from proxy.dialects.responses.items import call_of, reasoning, spoken, text_message
from proxy.dialects.responses.request import COMPACTIONS, LIMITS, function_tool, items_of, joined, kind, members_of
from proxy.plan.message import Message
from proxy.plan.plan import Role
from proxy.plan.summary import Section, SummaryAnswer
from proxy.plan.turn import Request
from proxy.policy import SnapshotRole
from proxy.rawjson import Members, object_of, text_of

Entry = bytes | Raw


def with_snapshot(entries: list[Entry], leading: int, block: str, role: SnapshotRole) -> list[Entry]:
    """`instructions` are not touched: they come before all entries, so an item at their beginning is just as good. What
    upstream itself has summarised at the beginning is older than the snapshot, and precedes it.
    """
    while leading < len(entries) and kind(entries[leading]).type in COMPACTIONS:
        leading += 1
    if role is SnapshotRole.USER:
        return [*entries[:leading], text_message("user", block), *entries[leading:]]
    if leading and items.is_known(members_of(Raw(entries[0])), kind(entries[0])):
        return [appended(entries[0], "\n\n" + block, "input_text"), *entries[1:]]
    return [*entries[:leading], text_message("developer", block), *entries[leading:]]


def written(instead: bytes) -> list[Entry]:
    """It is one JSON value, so it is an array of the reply's items."""
    reply = instead.strip()[1:-1]
    return [reply] if reply else []


# -- for readers ------------------------------------------------------------------------------------------------------


def sections(entry: Entry, index: int, message: Message, tool: str) -> list[Section]:
    heading = title(index, message, tool)
    made = [section for item in items_of(entry) for section in _sections(item, heading, message.role)]
    return made or [Section(heading, "", message.role)]


def _sections(item: Raw, title: str, role: Role) -> list[Section]:
    type, members = kind(item).type, members_of(item)
    media = [media_section(title, part, role) for _, part in items.media_of(members)]
    if type == "reasoning":
        thought = reasoning(members)
        return [Section(f"{title} reasoning", thought, role)] if thought else []
    if type == "message" or role is Role.TOOL:
        said = [Section(title, text, role) for _, text in items.texts_of(members)]
        parts = map(object_of, items.listed(members.get("content")))
        said += [section for part in parts for section in sources(title, part, role)]
        if type == "computer_call_output" or not (said or media):
            said = [Section(title, _rest(members), role)]
        return [*said, *media]
    return [call_section(title, call_of(items.without_media(members), type), role), *media]


def _rest(members: Members) -> str:
    """Return an item as JSON, without its screenshot."""
    return rawjson.encode({key: raw for key, raw in members.items() if key != "output"}).decode("utf-8", "replace")


# -- summary calls ----------------------------------------------------------------------------------------------------

WHO = ("user", "safety_identifier")
HOW = ("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "service_tier", "reasoning")


def summary_request(text: str, model: str, request: Request | None = None, most: int = 0) -> bytes:
    return rawjson.encode(_asking(model, request, most) | {"input": text})


def summary_on_prefix(
    text: str, request: Request, entries: Sequence[Entry], tools: Sequence[bytes], most: int, end: int
) -> bytes:
    """The instructions and the tools are part of what is cached. Upstream keeps the call as it keeps the client's
    request if an entry names what it has kept, because it finds that only then."""
    members = _asking(request.model, request, most)
    if any(map(_names_kept, entries)):
        members["store"] = request.members.get("store", Raw(b"true"))
    if "instructions" in request.members:
        members["instructions"] = request.members["instructions"]
    members |= uncalled(request, [function_tool(raw) for raw in tools], b'"none"')
    return rawjson.encode(members | {"input": joined([*entries, text_message("user", text)])})


def _names_kept(entry: Entry) -> bool:
    """Whether an item of this entry is found by its id alone: a reference, or reasoning that is not in the item."""
    if not any(name in bytes(entry) for name in (b'"reasoning"', b'"item_reference"')):
        return False
    for item in map(members_of, items_of(entry)):
        kind = text_of(item.get("type"))
        if kind == "item_reference" or (kind == "reasoning" and not text_of(item.get("encrypted_content"))):
            return True
    return False


def _asking(model: str, request: Request | None, most: int) -> Members:
    """Return all members except input, instructions and tools. Upstream stores nothing of a call."""
    limit = {LIMITS[0]: Raw(b"%d" % most)} if most else {}
    return summary_members(model, request, WHO, HOW) | {"store": Raw(b"false")} | limit


def summary_answer(status: int, body: bytes) -> SummaryAnswer:
    return read_summary(status, body, _summary)


def _summary(reply: Members) -> tuple[str, bool]:
    return spoken(rawjson.elements(reply["output"]))[0], text_of(reply.get("status")) == "completed"
