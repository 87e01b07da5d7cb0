"""Entries for upstream and for readers: a snapshot added, an entry as readable sections, summaries, compaction."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec import Raw

from proxy import rawjson
from proxy.dialects.entries import appended, call_section, media_section, sources, title
from proxy.dialects.request import read_summary, summary_members, uncalled
from proxy.dialects.responses import items
from proxy.dialects.responses.items import call_of, reasoning, spoken, text_message
from proxy.dialects.responses.reply import as_events
from proxy.dialects.responses.request import (
    COMPACTIONS,
    LIMITS,
    TRIGGER,
    function_tool,
    items_of,
    joined,
    kind,
    members_of,
)
from proxy.plan.compacting import Compacting, reference, referred
from proxy.plan.message import Message
from proxy.plan.plan import Role
from proxy.plan.summary import Section, SummaryAnswer
from proxy.plan.turn import Request
from proxy.policy import SnapshotRole
from proxy.rawjson import Members, elements_of, object_of, text_of

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
    requests, because only then it finds what entries name by an id."""
    members = _asking(request.model, request, most)
    members["store"] = request.members.get("store", Raw(b"true"))
    if "instructions" in request.members:
        members["instructions"] = request.members["instructions"]
    members |= uncalled(request, [function_tool(raw) for raw in tools], b'"none"')
    return rawjson.encode(members | {"input": joined([*entries, text_message("user", text)])})


def _asking(model: str, request: Request | None, most: int) -> Members:
    """Return all members except input, instructions and tools. Upstream keeps nothing of a call."""
    limit = {LIMITS[0]: Raw(b"%d" % most)} if most else {}
    return summary_members(model, request, WHO, HOW) | {"store": Raw(b"false")} | limit


def summary_answer(status: int, body: bytes) -> SummaryAnswer:
    return read_summary(status, body, _summary)


def _summary(reply: Members) -> tuple[str, bool]:
    return spoken(rawjson.elements(reply["output"]))[0], text_of(reply.get("status")) == "completed"


# -- compaction that a client asks for: `POST .../responses/compact`, `compaction_trigger`, `context_management` -------

ENDPOINT = re.compile(rb".*/responses/compact")
MANAGED = "context_management"
"""The client gets an item `compaction` whose `encrypted_content` is our reference, and sends it back in the place of
its history. Upstream then gets the snapshot as a user message. Items of upstream's own are left alone."""


def compaction_asked(path: bytes, request: Request) -> Compacting | None:
    if ENDPOINT.fullmatch(path) or request.obstacle == TRIGGER:
        return Compacting.WHOLE
    return Compacting.MANAGED if request.obstacle == MANAGED else None


def target(target: bytes) -> bytes:
    return re.sub(rb"(/responses)/compact(?=\?|\Z)", rb"\1", target)


def uncompacted(request: Request) -> bytes:
    members = {name: raw for name, raw in request.members.items() if name != MANAGED}
    if rawjson.is_array(members.get("input")):
        kept = [item for item in _items(request) if kind(item).type != TRIGGER]
        members["input"] = Raw(rawjson.array(kept))
    return rawjson.encode(members)


def references(request: Request) -> list[str]:
    return [found for item in elements_of(request.members.get("input")) if (found := _reference(item))]


def restored(request: Request, texts: Mapping[str, str]) -> bytes:
    items = (_message(texts[name]) if (name := _reference(item)) in texts else item for item in _items(request))
    return rawjson.encode(request.members | {"input": Raw(rawjson.array(items))})


def compacted(path: bytes, request: Request, text: str, tokens: tuple[int, int], now: int) -> bytes:
    """The reply is an object, or the events of one if the client streams."""
    id = hashlib.sha256(f"{now} {text}".encode("utf-8", "surrogatepass")).hexdigest()[:32]
    item = {"id": f"cmp_{id}", "type": "compaction", "encrypted_content": reference(text)}
    before, after = tokens
    usage: dict[str, Any] = {"input_tokens": before, "output_tokens": after, "total_tokens": before + after}
    usage |= {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
    made: dict[str, Any] = {"id": f"resp_{id}", "created_at": now, "usage": usage}
    if ENDPOINT.fullmatch(path):
        said = [item for item in _items(request) if text_of(members_of(item).get("role")) == "user"]
        output = Raw(rawjson.array([*said, rawjson.encode(item)]))
        return rawjson.encode(made | {"object": "response.compaction", "output": output})
    made |= {"object": "response", "status": "completed", "model": request.model, "output": [item], "error": None}
    made |= {"incomplete_details": None, "metadata": {}, "parallel_tool_calls": True, "tool_choice": "auto"}
    whole = rawjson.encode(made | {"tools": []})
    if not request.stream:
        return whole
    events = enumerate(as_events(rawjson.members(whole)))
    return b"".join(event.encoded({"sequence_number": Raw(b"%d" % number)}) for number, event in events)


def _items(request: Request) -> Iterable[Raw]:
    given = request.members["input"]
    return rawjson.elements(given) if rawjson.is_array(given) else [given]


def _reference(item: Raw) -> str:
    """Return the digest in our reference, if this is an item that has one."""
    if kind(item).type not in COMPACTIONS:
        return ""
    return referred(text_of(members_of(item).get("encrypted_content")))


def _message(text: str) -> bytes:
    return rawjson.encode({"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]})
