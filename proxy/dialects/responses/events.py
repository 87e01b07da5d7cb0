"""The events of the Responses API: as upstream sends them, and as they are made of a whole reply."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from msgspec import Raw

from proxy import rawjson
from proxy.dialects.reply import Event
from proxy.rawjson import NULL, Members, object_of, string, text_of

BEGINNINGS = ("response.created", "response.queued", "response.in_progress")
ENDINGS = {"response.completed": "completed", "response.incomplete": "incomplete", "response.failed": "failed"}
"""The events that end a stream, and the status of the reply."""
ADDED, DONE = "response.output_item.added", "response.output_item.done"


class _Head(msgspec.Struct, frozen=True):
    type: str
    sequence_number: Raw = NULL
    output_index: Raw = NULL
    item_id: Raw = NULL
    item: Raw = NULL
    response: Raw = NULL
    delta: Raw = NULL


class ItemEvent(Event):
    """One event of a reply."""

    decoder = msgspec.json.Decoder(_Head)


def as_events(members: Members) -> Iterator[ItemEvent]:
    """Return a whole reply as the events of a stream."""
    status = text_of(members.get("status")) or "completed"
    begun = members | {"status": string("in_progress"), "output": Raw(b"[]"), "usage": NULL}
    yield _made("response.created", response=begun)
    for index, raw in enumerate(rawjson.elements(members["output"])):
        yield from item_events(index, raw)
    ending = next((type for type, ends in ENDINGS.items() if ends == status), "response.completed")
    yield _made(ending, response=members)


def item_events(index: int, raw: Raw) -> Iterator[ItemEvent]:
    item = object_of(raw)
    about = {"output_index": index, "item_id": item.get("id", NULL)}
    yield _made(ADDED, output_index=index, item=_begun(item))
    for event in _contents(item):
        yield _made(str(event.pop("type")), **event, **about)
    yield _made(DONE, output_index=index, item=raw)


def _begun(item: Members) -> Members:
    """Return an item as it is announced: without what its other events will bring."""
    type = text_of(item.get("type"))
    empty = {"message": {"content": Raw(b"[]")}, "function_call": {"arguments": Raw(b'""')}}.get(type, {})
    return item | empty | ({"status": string("in_progress")} if "status" in item else {})


def _contents(item: Members) -> Iterator[dict[str, object]]:
    """Yield the members of the events between an item's beginning and its end."""
    type = text_of(item.get("type"))
    if type == "function_call":
        arguments = item.get("arguments", NULL)
        yield {"type": "response.function_call_arguments.delta", "delta": arguments}
        yield {"type": "response.function_call_arguments.done", "arguments": arguments, "name": item.get("name", NULL)}
    if type == "message" and rawjson.is_array(item.get("content")):
        for place, part in enumerate(map(object_of, rawjson.elements(item["content"]))):
            kind = "refusal" if "refusal" in part else "text"
            named = "refusal" if kind == "refusal" else "output_text"
            text, about = part.get(kind, NULL), {"content_index": place}
            more: dict[str, object] = {} if kind == "refusal" else {"logprobs": []}
            yield {"type": "response.content_part.added", "part": part | {kind: Raw(b'""')}, **about}
            yield {"type": f"response.{named}.delta", "delta": text, **about, **more}
            yield {"type": f"response.{named}.done", kind: text, **about, **more}
            yield {"type": "response.content_part.done", "part": part, **about}


def _made(type: str, **members: object) -> ItemEvent:
    """Return an event whose number is set when it is shown."""
    return ItemEvent.made(type, sequence_number=0, **members)
