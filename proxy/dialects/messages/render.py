"""Entries for upstream and for readers: a snapshot added, an entry as readable sections, summaries, compaction."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

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
from proxy.dialects.messages.reply import DELTA, START, STOP, ReplyEvent, as_events
from proxy.dialects.messages.request import (
    FRAME,
    LIMITS,
    RESULT,
    THINKING_EDITS,
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
from proxy.plan.compacting import MARK, Compacting, reference, referred
from proxy.plan.message import Message
from proxy.plan.plan import Role
from proxy.plan.summary import Section, SummaryAnswer
from proxy.plan.turn import Request
from proxy.policy import SnapshotRole
from proxy.rawjson import Members, elements_of, object_of, string, text_of, whole


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
        if not rawjson.is_array(content):
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

WHO = ("metadata", "anthropic_version")
HOW = ("cache_control", "service_tier", "thinking", "context_management")
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


# -- compaction that a client asks for: `compaction` of the whole history, or edits in `context_management` ------------

WHOLE, MANAGED = "compaction", "context_management"
"""The client gets a block `compaction` with the snapshot, whose `signature` is our reference, and sends it back in the
place of its history. Upstream then gets the snapshot as the user's text. Blocks of upstream's own are left alone."""


def compaction_asked(path: bytes, request: Request) -> Compacting | None:
    return {WHOLE: Compacting.WHOLE, MANAGED: Compacting.MANAGED}.get(request.obstacle)


def uncompacted(request: Request) -> bytes:
    """Edits that clear thinking stay."""
    members = {name: raw for name, raw in request.members.items() if name not in (WHOLE, MANAGED)}
    edits = elements_of(object_of(request.members.get(MANAGED)).get("edits"))
    kept = [edit for edit in edits if text_of(object_of(edit).get("type")).startswith(THINKING_EDITS)]
    if kept:
        members[MANAGED] = Raw(rawjson.encode({"edits": kept}))
    return rawjson.encode(members)


def references(request: Request) -> list[str]:
    messages = elements_of(request.members.get("messages"))
    return [found for message in messages for block in _marked_blocks(message) if (found := _reference(block))]


def restored(request: Request, texts: Mapping[str, str]) -> bytes:
    messages = elements_of(request.members.get("messages"))
    made = [one for message in messages for one in _restored(message, texts)]
    return rawjson.encode(request.members | {"messages": Raw(rawjson.array(made))})


def compacted(path: bytes, request: Request, text: str, tokens: tuple[int, int], now: int) -> bytes:
    """The reply is a message, or the events of one if the client streams."""
    id = hashlib.sha256(f"{now} {text}".encode("utf-8", "surrogatepass")).hexdigest()[:24]
    block = {"type": WHOLE, "content": text, "signature": reference(text)}
    made: dict[str, Any] = {"id": f"msg_{id}", "type": "message", "role": "assistant", "model": request.model}
    made |= {"content": [block], "stop_reason": WHOLE, "stop_sequence": None}
    made |= {"usage": dict(zip(("input_tokens", "output_tokens"), tokens, strict=True))}
    if not request.stream:
        return rawjson.encode(made)
    first, *_, closing, end = as_events(rawjson.members(rawjson.encode(made | {"content": []})))
    events = (
        first,
        ReplyEvent.made(START, index=0, content_block=block | {"content": None}),
        ReplyEvent.made(DELTA, index=0, delta={"type": "compaction_delta", "content": text}),
        ReplyEvent.made(STOP, index=0),
        closing,
        end,
    )
    return b"".join(event.encoded({}) for event in events)


def _marked_blocks(message: Raw) -> Sequence[Raw]:
    """Return the blocks of a message that may have references."""
    return elements_of(object_of(message).get("content")) if MARK in bytes(message) else []


def _reference(block: Raw) -> str:
    """Return the digest in our reference, if this is a block that has one."""
    members = object_of(block)
    return referred(text_of(members.get("signature"))) if text_of(members.get("type")) == WHOLE else ""


def _restored(message: Raw, texts: Mapping[str, str]) -> Iterator[bytes | Raw]:
    """Yield the message with texts in the place of references, as messages of the user."""
    runs = [(ours, list(run)) for ours, run in groupby(_marked_blocks(message), lambda one: _reference(one) in texts)]
    if not any(ours for ours, _ in runs):
        yield message
        return
    members = object_of(message)
    for ours, blocks in runs:
        said = [_text_block(block, texts[_reference(block)]) for block in blocks] if ours else blocks
        role = {"role": string("user")} if ours else {}
        yield rawjson.encode(members | role | {"content": Raw(rawjson.array(said))})


def _text_block(block: Raw, text: str) -> bytes:
    marks = {key: raw for key, raw in object_of(block).items() if key == "cache_control"}
    return rawjson.encode({"type": "text", "text": text, **marks})
