"""Compaction that a client asks for: `POST .../responses/compact`, an item `compaction_trigger`, `context_management`.

The client gets an item `compaction` whose `encrypted_content` is our reference. It sends the item back in the place of
its history, where upstream then gets the snapshot as a user message. Items of upstream's own are left alone.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import Raw

from proxy import rawjson
from proxy.dialects.responses.events import as_events
from proxy.dialects.responses.request import COMPACTIONS, TRIGGER, kind, members_of
from proxy.plan.compacting import Compacting, reference, referred
from proxy.plan.turn import Request
from proxy.rawjson import text_of

ENDPOINT = re.compile(rb".*/responses/compact")
MANAGED = "context_management"


def asked(path: bytes, request: Request) -> Compacting | None:
    if ENDPOINT.fullmatch(path) or request.obstacle == TRIGGER:
        return Compacting.WHOLE
    return Compacting.MANAGED if request.obstacle == MANAGED else None


def target(target: bytes) -> bytes:
    return re.sub(rb"(/responses)/compact(?=\?|\Z)", rb"\1", target)


def without(request: Request) -> bytes:
    members = {name: raw for name, raw in request.members.items() if name != MANAGED}
    if rawjson.is_array(members.get("input")):
        kept = [item for item in _items(request) if kind(item).type != TRIGGER]
        members["input"] = Raw(rawjson.array(kept))
    return rawjson.encode(members)


def references(request: Request) -> list[str]:
    if not rawjson.is_array(request.members.get("input")):
        return []
    return [found for item in _items(request) if (found := _reference(item))]


def restored(request: Request, texts: Mapping[str, str]) -> bytes:
    items = (_message(texts[name]) if (name := _reference(item)) in texts else item for item in _items(request))
    return rawjson.encode(request.members | {"input": Raw(rawjson.array(items))})


def reply(path: bytes, request: Request, text: str, tokens: tuple[int, int], now: int) -> bytes:
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
    made |= {
        "incomplete_details": None,
        "metadata": {},
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
    }
    whole = rawjson.encode(made)
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
    parts = [{"type": "input_text", "text": text}]
    return rawjson.encode({"type": "message", "role": "user", "content": parts})
