"""The events of the Responses API: as upstream sends them, and as they are made of a whole reply."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from msgspec import Raw

from proxy import rawjson
from proxy.dialects.reply import Event
from proxy.rawjson import NULL, Members, string, text_of

BEGINNINGS = ("response.created", "response.queued", "response.in_progress")
ENDINGS = {"response.completed": "completed", "response.incomplete": "incomplete", "response.failed": "failed"}
"""The events that end a stream, and the status of the reply."""
ADDED, DONE = "response.output_item.added", "response.output_item.done"


class _Head(msgspec.Struct, frozen=True):
    type: str
    sequence_number: Raw = NULL
    output_index: Raw = NULL
    item: Raw = NULL
    response: Raw = NULL
    delta: Raw = NULL


class ItemEvent(Event):
    """One event of a reply."""

    decoder = msgspec.json.Decoder(_Head)


def as_events(members: Members) -> Iterator[ItemEvent]:
    """Return a whole reply as the events of a stream: of each item, that it begins and that it is done. Their numbers
    are set when they are shown."""
    status = text_of(members.get("status")) or "completed"
    begun = members | {"status": string("in_progress"), "output": Raw(b"[]"), "usage": NULL}
    yield ItemEvent.made("response.created", sequence_number=0, response=begun)
    for index, raw in enumerate(rawjson.elements(members["output"])):
        for type in (ADDED, DONE):
            yield ItemEvent.made(type, sequence_number=0, output_index=index, item=raw)
    ending = next((type for type, ends in ENDINGS.items() if ends == status), "response.completed")
    yield ItemEvent.made(ending, sequence_number=0, response=members)
