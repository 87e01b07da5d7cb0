"""Compaction that a client asks for: `compaction` of the whole history, or edits in `context_management`.

The client gets a block `compaction` with the snapshot, whose `signature` is our reference. It sends the block back in
the place of its history, where upstream then gets the snapshot as the user's text. Blocks of upstream's own are left
alone, and so are edits that clear thinking.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import Raw

from proxy import rawjson
from proxy.dialects.messages.reply import DELTA, START, STOP, ReplyEvent, as_events
from proxy.dialects.messages.request import THINKING_EDITS
from proxy.plan.compacting import MARK, Compacting, reference, referred
from proxy.plan.turn import Request
from proxy.rawjson import Members, object_of, string, text_of

WHOLE, MANAGED = "compaction", "context_management"


def asked(path: bytes, request: Request) -> Compacting | None:
    return {WHOLE: Compacting.WHOLE, MANAGED: Compacting.MANAGED}.get(request.obstacle)


def without(request: Request) -> bytes:
    members = {name: raw for name, raw in request.members.items() if name not in (WHOLE, MANAGED)}
    edits = object_of(request.members.get(MANAGED)).get("edits")
    given = rawjson.elements(edits) if rawjson.is_array(edits) else []
    kept = [edit for edit in given if text_of(object_of(edit).get("type")).startswith(THINKING_EDITS)]
    if kept:
        members[MANAGED] = Raw(rawjson.encode({"edits": kept}))
    return rawjson.encode(members)


def references(request: Request) -> list[str]:
    return [found for message in _messages(request) for block in _blocks(message) if (found := _reference(block))]


def restored(request: Request, texts: Mapping[str, str]) -> bytes:
    messages = [made for message in _messages(request) for made in _restored(message, texts)]
    return rawjson.encode(request.members | {"messages": Raw(rawjson.array(messages))})


def reply(path: bytes, request: Request, text: str, tokens: tuple[int, int], now: int) -> bytes:
    """The reply is a message, or the events of one if the client streams."""
    id = hashlib.sha256(f"{now} {text}".encode("utf-8", "surrogatepass")).hexdigest()[:24]
    block = {"type": WHOLE, "content": text, "signature": reference(text)}
    made: dict[str, Any] = {"id": f"msg_{id}", "type": "message", "role": "assistant", "model": request.model}
    made |= {"content": [block], "stop_reason": WHOLE, "stop_sequence": None}
    made |= {"usage": dict(zip(("input_tokens", "output_tokens"), tokens, strict=True))}
    if not request.stream:
        return rawjson.encode(made)
    first, *_, closing, end = as_events(rawjson.members(rawjson.encode(made | {"content": []})))
    growing = {"type": "compaction_delta", "content": text}
    events = (
        first,
        ReplyEvent.made(START, index=0, content_block=block | {"content": None}),
        ReplyEvent.made(DELTA, index=0, delta=growing),
        ReplyEvent.made(STOP, index=0),
        closing,
        end,
    )
    return b"".join(event.encoded({}) for event in events)


def _messages(request: Request) -> list[Raw]:
    given = request.members.get("messages")
    return rawjson.elements(given) if rawjson.is_array(given) else []


def _blocks(message: Raw) -> Sequence[Raw]:
    content = object_of(message).get("content") if MARK in bytes(message) else None
    return rawjson.elements(content) if rawjson.is_array(content) else []


def _reference(block: Raw) -> str:
    """Return the digest in our reference, if this is a block that has one."""
    members = object_of(block)
    return referred(text_of(members.get("signature"))) if text_of(members.get("type")) == WHOLE else ""


def _restored(message: Raw, texts: Mapping[str, str]) -> Iterator[bytes | Raw]:
    """Yield the message with texts in the place of references, as messages of the user."""
    members, rest = object_of(message), list[Raw]()
    blocks = _blocks(message)
    if not any(_reference(block) in texts for block in blocks):
        yield message
        return
    for block in blocks:
        if (name := _reference(block)) not in texts:
            rest.append(block)
            continue
        if rest:
            yield _message(members, rest)
            rest = []
        marked = {key: raw for key, raw in object_of(block).items() if key == "cache_control"}
        text = rawjson.encode({"type": "text", "text": texts[name], **marked})
        yield _message(members | {"role": string("user")}, [text])
    if rest:
        yield _message(members, rest)


def _message(members: Members, blocks: Sequence[bytes | Raw]) -> bytes:
    return rawjson.encode(members | {"content": Raw(rawjson.array(blocks))})
