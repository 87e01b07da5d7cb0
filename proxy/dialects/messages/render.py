"""Entries for upstream and for readers: a snapshot added, a hidden round put back, an entry as readable sections."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Raw

from proxy import rawjson
from proxy.dialects.entries import call_section, media_section, sources, title
from proxy.dialects.messages.blocks import (
    MEDIA,
    THINKING,
    blocks_of,
    call_of,
    medium,
    spoken,
    text_message,
)
from proxy.dialects.messages.request import (
    FRAME,
    LIMITS,
    RESULT,
    Entry,
    assembled,
    blocks_in,
    client_tool,
    is_blocks,
    is_text,
    parts_of,
    user_message,
)
from proxy.dialects.request import read_summary, summary_members, summary_task, uncalled
from proxy.plan.message import Message
from proxy.plan.plan import Role
from proxy.plan.summary import Section, SummaryAnswer
from proxy.plan.turn import Request
from proxy.policy import SnapshotRole
from proxy.rawjson import Members, object_of, text_of, whole


def with_snapshot(entries: list[Entry], leading: int, block: str, role: SnapshotRole) -> list[Entry]:
    """It goes to the system prompt's end, or in front of everything said.

    The system prompt's own blocks and breakpoints stay in front of it, so that upstream's cache still has them.
    """
    if role is SnapshotRole.USER:
        return [*entries[:leading], text_message("user", block), *entries[leading:]]
    return [rawjson.encode(block), *entries]


def joined(entries: list[Entry]) -> list[Entry]:
    """Anthropic takes them in a row, but other servers of
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


def written(instead: bytes) -> list[Entry]:
    return [instead] if blocks_of(instead) else []


def _said_by_user(entry: Entry) -> list[Raw] | None:
    """Return the blocks of what the user said; None for anything else, also for results, which wait for the others of
    their message."""
    if is_text(entry):
        return None
    message, found = parts_of(entry)
    if message is None:
        return None if any(text_of(rawjson.members(raw).get("type")) == RESULT for raw in found) else found
    return blocks_in(entry) if text_of(message.get("role")) == "user" and message.keys() <= FRAME else None


# -- for readers ------------------------------------------------------------------------------------------------------


def sections(entry: Entry, index: int, message: Message, tool: str) -> list[Section]:
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
    part = medium(block)
    if part is not None and kind in MEDIA:
        return [media_section(title, part, role)]
    if part is not None:
        fetched = object_of(block["content"])
        rest = block | {"content": Raw(rawjson.encode({key: raw for key, raw in fetched.items() if key != "content"}))}
        return [Section(title, rawjson.encode(rest).decode("utf-8", "replace"), role), media_section(title, part, role)]
    return [Section(title, rawjson.encode(block).decode("utf-8", "replace"), role)]


# -- summary calls ----------------------------------------------------------------------------------------------------

WHO = ("metadata",)
HOW = ("cache_control", "service_tier", "thinking", "context_management", "anthropic_version")
DEFAULT_LIMIT = 8_192
"""Tokens of a summary whose length nobody limits: this API insists on a limit, and every model takes this one."""
FINISHED = ("end_turn", "stop_sequence")


def summary_request(text: str, model: str, request: Request | None = None, most: int = 0) -> bytes:
    return rawjson.encode(_asking(model, request, most) | {"messages": [{"role": "user", "content": text}]})


def summary_on_prefix(
    text: str, request: Request, entries: Sequence[Entry], tools: Sequence[bytes], most: int, end: int
) -> bytes:
    """The system prompt and the tools are part of what is cached."""
    members = _asking(request.model, request, most)
    members |= {"system": request.members["system"]} if "system" in request.members else {}
    members |= uncalled(request, [client_tool(raw) for raw in tools], b'{"type":"none"}')
    task = summary_task(text, request, end)
    return rawjson.encode(members | assembled(members, followed(list(entries), task)))


def _asking(model: str, request: Request | None, most: int) -> Members:
    """Return all members except messages, system prompt and tools. What the model thinks counts as part of a reply."""
    members = summary_members(model, request, WHO, HOW)
    thinking = whole(object_of(members.get("thinking")).get("budget_tokens"))
    return members | {LIMITS[0]: Raw(b"%d" % ((most or DEFAULT_LIMIT) + thinking))}


def summary_answer(status: int, body: bytes) -> SummaryAnswer:
    return read_summary(status, body, _summary)


def _summary(reply: Members) -> tuple[str, bool]:
    text, _ = spoken(map(rawjson.members, rawjson.elements(reply["content"])))
    return text, text_of(reply.get("stop_reason")) in FINISHED
