"""Messages, `POST .../messages`."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, ClassVar

from msgspec import Raw

from proxy import rawjson
from proxy.dialects.base import Dialect
from proxy.dialects.entries import Entry
from proxy.dialects.messages import blocks, reply, request
from proxy.dialects.messages.reply import as_events
from proxy.dialects.messages.request import has_new_edits, thinking_edits
from proxy.plan.compacting import MARK, Compacting, reference, referred
from proxy.plan.turn import Request
from proxy.policy import SnapshotRole
from proxy.rawjson import Members, elements_of, integer, object_of, string, text_of

PATH = rb"(?:(?:/[^/]+)*/v1|)/messages"
"""Other APIs have paths that end alike, such as `/v1/threads/ID/messages`."""
VERTEX = rb"(?:/v1)?/projects/[^/]+/locations/[^/]+/publishers/anthropic/models/"
"""The beginning of Vertex's paths. They name the model, which the body does not."""

DEFAULT_LIMIT = 8_192
"""Tokens of a summary whose length is not limited: this API insists on a limit, and every model
takes this one."""
FINISHED = ("end_turn", "stop_sequence")

WHOLE = "compaction"
MANAGED = "context_management"
"""How a client asks for compaction: of the whole history, or by edits. It gets a block `compaction`
with the snapshot, whose `signature` is our reference, and sends it back in the place of its
history. Upstream then gets the snapshot as the user's text. Blocks of upstream's own are left
alone."""


class MessagesDialect(Dialect):
    name = "messages"
    media_types = blocks.MEDIA
    turns = reply.MessagesTurn
    requests = request.MessagesRoundRequest
    known = request.KNOWN
    barred: ClassVar[Mapping[str, bytes]] = {"thread": b"null", WHOLE: b"null"}
    defining = (b'"tool_definition"',)
    refers = (request.CREDIT,)
    path = re.compile(PATH + rb"|" + VERTEX + rb"(?!count-tokens:)[^/:]+:(?:rawP|streamRawP)redict")
    vertex = re.compile(VERTEX + rb"[^/:]+:(?:rawP|streamRawP)redict")
    """Vertex's paths, those that count tokens among them."""
    further_paths = re.compile(rb"(?:/v1|^)/messages(?:/|\Z)")
    version_header = b"anthropic-version"
    beta_header = request.BETA
    signs = (
        b'"system":',
        b'"stop_sequences":',
        b'"input_schema":',
        b'"tool_use_id":',
        b'"anthropic_version":',
    )
    """What a body has, and one of chat, which has messages as well, has not."""
    caller_members = ("metadata", "anthropic_version")
    cache_members = ("cache_control", "service_tier", "thinking", "context_management")
    copied_members: ClassVar[Mapping[str, Raw | None]] = {"system": None}
    carriers = blocks.CARRIERS

    split = staticmethod(request.split)
    complaint = staticmethod(request.complaint)
    forgiving = staticmethod(request.forgiving)
    opened = staticmethod(blocks.opened)
    contents = staticmethod(blocks.contents)
    unknown = staticmethod(blocks.unknown)
    content = staticmethod(blocks.content)
    error_body = staticmethod(reply.error_body)
    calling = staticmethod(blocks.calling)
    answer = staticmethod(blocks.result)

    counting: Dialect
    """The one of requests that only ask how many tokens they have."""

    def with_snapshot(
        self, entries: list[Entry], leading: int, block: str, role: SnapshotRole
    ) -> list[Entry]:
        """It goes to the system prompt's end, or in front of everything said. The prompt's own
        blocks and breakpoints stay in front of it, so that upstream's cache still has them."""
        if role is SnapshotRole.USER:
            return super().with_snapshot(entries, leading, block, role)
        return [rawjson.encode(block), *entries]

    def joined(self, entries: list[Entry]) -> list[Entry]:
        """Anthropic takes them in a row, but other servers of this API fill them into chat
        templates that refuse that."""
        made: list[Entry] = []
        run: list[Raw] = []
        for entry in entries:
            said = blocks.said_by_user(entry)
            if said is not None and run:
                run += said
                made[-1] = request.user_message(run)
            else:
                run = said or []
                made.append(entry)
        return made

    def followed(self, entries: list[Entry], task: Entry) -> list[Entry]:
        """The task goes on with the last blocks, if they are a part of the user's message."""
        if (
            entries
            and not request.is_text(entries[-1])
            and request.parts_of(entries[-1])[0] is None
        ):
            return [*entries, b",".join(request.blocks_in(task) or [])]
        return super().followed(entries, task)

    @staticmethod
    def with_limit(members: Members, most: int) -> Members:
        """What the model thinks counts as part of a reply."""
        thinking = integer(object_of(members.get("thinking")).get("budget_tokens"))
        return members | {request.LIMITS[0]: Raw(b"%d" % ((most or DEFAULT_LIMIT) + thinking))}

    @staticmethod
    def answer_in(reply: Members) -> tuple[str, bool]:
        text, _ = blocks.spoken(map(rawjson.members, rawjson.elements(reply["content"])))
        return text, text_of(reply.get("stop_reason")) in FINISHED

    # -- compaction that a client asks for --

    def compaction_asked(self, path: bytes, request: Request) -> Compacting | None:
        if (
            request.obstacle == WHOLE
            and text_of(object_of(request.members[WHOLE]).get("type")) != "summarize"
        ):
            return None  # what no API had when this was written
        if request.obstacle == MANAGED and has_new_edits(request.members):
            return None
        return {WHOLE: Compacting.WHOLE, MANAGED: Compacting.MANAGED}.get(request.obstacle)

    def target(self, target: bytes) -> bytes:
        return target.replace(b":streamRawPredict", b":rawPredict")

    def uncompacted(self, request: Request) -> bytes:
        """Edits that clear thinking stay."""
        members = {
            name: raw for name, raw in request.members.items() if name not in (WHOLE, MANAGED)
        }
        if kept := thinking_edits(request.members):
            members[MANAGED] = Raw(rawjson.encode({"edits": kept}))
        return rawjson.encode(members)

    def references(self, request: Request) -> list[str]:
        messages = elements_of(request.members.get("messages"))
        return [
            found
            for message in messages
            for block in _marked_blocks(message)
            if (found := _reference(block))
        ]

    def restored(self, request: Request, texts: Mapping[str, str]) -> bytes:
        messages = elements_of(request.members.get("messages"))
        made = [one for message in messages for one in _restored(message, texts)]
        return rawjson.encode(request.members | {"messages": Raw(rawjson.array(made))})

    def compaction_reply(
        self,
        path: bytes,
        request: Request,
        text: str,
        digest: str,
        tokens: tuple[int, int],
        now: int,
    ) -> bytes:
        """The reply is a message, or the events of one if the client streams."""
        id = hashlib.sha256(f"{now} {text}".encode("utf-8", "surrogatepass")).hexdigest()[:24]
        block = {"type": WHOLE, "content": text, "signature": reference(digest)}
        made: dict[str, Any] = {
            "id": f"msg_{id}",
            "type": "message",
            "role": "assistant",
            "model": request.model,
        }
        made |= {"content": [block], "stop_reason": WHOLE, "stop_sequence": None}
        made |= {"usage": dict(zip(("input_tokens", "output_tokens"), tokens, strict=True))}
        whole = rawjson.encode(made)
        return (
            b"".join(event.encoded({}) for event in as_events(rawjson.members(whole)))
            if request.stream
            else whole
        )


def _marked_blocks(message: Raw) -> Sequence[Raw]:
    """Return the blocks of a message that may have references."""
    return elements_of(object_of(message).get("content")) if MARK in bytes(message) else []


def _reference(block: Raw) -> str:
    """Return the digest in our reference, if this is a block that has one."""
    members = object_of(block)
    return (
        referred(text_of(members.get("signature"))) if text_of(members.get("type")) == WHOLE else ""
    )


def _restored(message: Raw, texts: Mapping[str, str]) -> Iterator[Entry]:
    """Yield the message with texts in the place of references, as messages of the user."""
    blocks = _marked_blocks(message)
    if not any(_reference(block) in texts for block in blocks):
        yield message
        return
    for ours, run in groupby(blocks, lambda block: _reference(block) in texts):
        said = [_as_text(block, texts[_reference(block)]) if ours else block for block in run]
        role = {"role": string("user")} if ours else {}
        yield rawjson.encode(object_of(message) | role | {"content": Raw(rawjson.array(said))})


def _as_text(block: Raw, text: str) -> Entry:
    marks = {key: raw for key, raw in object_of(block).items() if key == "cache_control"}
    return rawjson.encode({"type": "text", "text": text, **marks})


class CountingDialect(MessagesDialect):
    """`POST .../messages/count_tokens`, which takes what would be sent."""

    path = re.compile(PATH + rb"/count_tokens|" + VERTEX + rb"count-tokens:rawPredict")
    counts = True

    def compaction_asked(self, path: bytes, request: Request) -> Compacting | None:
        return Compacting.MANAGED if super().compaction_asked(path, request) else None


MESSAGES = MessagesDialect()
MESSAGES.counting = CountingDialect()
