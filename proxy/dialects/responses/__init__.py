"""Responses, `POST .../responses`."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar
from urllib.parse import unquote

from msgspec import Raw

from proxy import rawjson
from proxy.dialects.base import Dialect
from proxy.dialects.entries import Entry
from proxy.dialects.responses import items, reply, request
from proxy.dialects.responses.reply import as_events
from proxy.dialects.responses.request import COMPACTIONS, TRIGGER, given, items_of, kind, members_of
from proxy.plan.compacting import Compacting, reference, referred
from proxy.plan.plan import ToolCall
from proxy.plan.recognise import Hidden
from proxy.plan.turn import Request
from proxy.policy import SnapshotRole
from proxy.rawjson import Members, elements_of, object_of, string, text_of

_KEPT = re.compile(rb".*/responses/([^/]+)")

ENDPOINT = re.compile(rb".*/responses/compact")
MANAGED = "context_management"
"""The client gets an item `compaction` whose `encrypted_content` is our reference, and sends it
back in the place of its history. Upstream then gets the snapshot as a user message. Items of
upstream's own are left alone."""


class ResponsesDialect(Dialect):
    name = "responses"
    media_types = items.MEDIA
    turns = reply.ResponsesTurn
    requests = request.ResponsesRoundRequest
    path = re.compile(rb".*/responses(?:/compact)?")
    further_paths = re.compile(rb"/responses(?:/|\Z)")
    known = request.KNOWN
    barred = request.BARRED
    defining = (b'"tool_search_output"', b'"additional_tools"')
    refers = ("previous_response_id",)
    caller_members = ("user", "safety_identifier")
    cache_members = (
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "service_tier",
        "reasoning",
    )
    copied_members: ClassVar[Mapping[str, Raw | None]] = {
        "instructions": None,
        "store": Raw(b"true"),
    }
    """Upstream keeps such a call as it keeps the client's requests, because only then it finds what
    entries name by an id."""
    system = "developer"
    carriers = ("input_text", "input_image", "input_file")

    listing = "input"
    split = staticmethod(request.split)
    continued = staticmethod(request.continued)
    opened = staticmethod(items.opened)
    contents = staticmethod(items.contents)
    unknown = staticmethod(items.unknown)
    content = staticmethod(items.content)
    calling = staticmethod(items.calling)
    complaint = staticmethod(items.complaint)
    forgiving = staticmethod(items.forgiving)

    @staticmethod
    def ends(element: Raw) -> bool:
        """The items of a reply are one entry."""
        return not kind(element).replies

    @staticmethod
    def answer(id: str, text: str, part: str) -> Entry:
        return items.output(id, text, part, {})

    def alone(self, rounds: Sequence[Hidden], visible: Entry) -> bytes | None:
        """Reasoning that the client has seen leaves with the hidden call behind it."""
        gone: set[str] = set()
        for hidden in rounds:
            calls = {*map(self.answered, (*hidden.before, *hidden.after))} - {""}
            made = [
                *hidden.before,
                *(() if hidden.instead is None else self.written(hidden.instead)),
            ]
            gone |= items.thinking_before(calls, made)
        left = items.without_thinking(visible, gone)
        return rawjson.array(left) if len(left) < len(items_of(visible)) else None

    def reply_parts(self, entry: Entry) -> tuple[str, list[ToolCall]]:
        """An item of a type that nobody knows yet is a call like any other, also if it stands
        alone."""
        return items.spoken(items_of(entry))

    def kept_id(self, method: str, path: bytes) -> str:
        """Return the id of the reply that a request shows or deletes where upstream keeps it; empty
        for others."""
        found = _KEPT.fullmatch(path) if method in ("GET", "DELETE") else None
        return unquote(found[1].decode("latin-1")) if found else ""

    def with_snapshot(
        self, entries: list[Entry], leading: int, block: str, role: SnapshotRole
    ) -> list[Entry]:
        """`instructions` are not touched: they come before all entries, so an item at their
        beginning is just as good. What upstream itself has summarised at the beginning is older
        than the snapshot, and precedes it."""
        while leading < len(entries) and kind(entries[leading]).type in COMPACTIONS:
            leading += 1
        return super().with_snapshot(entries, leading, block, role)

    @staticmethod
    def task(text: str) -> Entry:
        return string(text)

    @staticmethod
    def with_limit(members: Members, most: int) -> Members:
        """Upstream keeps nothing of a call unless it continues the client's history."""
        limit = {request.LIMITS[0]: Raw(b"%d" % most)} if most else {}
        return members | {"store": Raw(b"false")} | limit

    @staticmethod
    def answer_in(reply: Members) -> tuple[str, bool]:
        text, _ = items.spoken(rawjson.elements(reply["output"]))
        return text, text_of(reply.get("status")) == "completed"

    # -- compaction that a client asks for --

    def compaction_asked(self, path: bytes, request: Request) -> Compacting | None:
        if ENDPOINT.fullmatch(path) or request.obstacle == TRIGGER:
            return Compacting.WHOLE
        if request.obstacle != MANAGED or not _only_compaction(request.members[MANAGED]):
            return None
        triggered = any(kind(item).type == TRIGGER for item in given(request.members))
        return Compacting.WHOLE if triggered else Compacting.MANAGED

    def target(self, target: bytes) -> bytes:
        return re.sub(rb"(/responses)/compact(?=\?|\Z)", rb"\1", target)

    def uncompacted(self, request: Request) -> bytes:
        members = {name: raw for name, raw in request.members.items() if name != MANAGED}
        if rawjson.is_array(members.get("input")):
            kept = [item for item in given(members) if kind(item).type != TRIGGER]
            members["input"] = Raw(rawjson.array(kept))
        return rawjson.encode(members)

    def references(self, request: Request) -> list[str]:
        return [
            found
            for item in elements_of(request.members.get("input"))
            if (found := _reference(item))
        ]

    def restored(self, request: Request, texts: Mapping[str, str]) -> bytes:
        made: list[Entry] = []
        for item in given(request.members):
            text = texts.get(_reference(item))
            said = {
                "type": "message",
                "role": "user",
                "content": [{"type": "input_text", "text": text}],
            }
            made.append(item if text is None else rawjson.encode(said))
        return rawjson.encode(request.members | {"input": Raw(rawjson.array(made))})

    def compaction_reply(
        self,
        path: bytes,
        request: Request,
        text: str,
        digest: str,
        tokens: tuple[int, int],
        now: int,
    ) -> bytes:
        """The reply is an object, or the events of one if the client streams."""
        id = hashlib.sha256(f"{now} {text}".encode("utf-8", "surrogatepass")).hexdigest()[:32]
        item = {"id": f"cmp_{id}", "type": "compaction", "encrypted_content": reference(digest)}
        before, after = tokens
        usage: dict[str, Any] = {
            "input_tokens": before,
            "output_tokens": after,
            "total_tokens": before + after,
        }
        usage |= {
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": 0},
        }
        made: dict[str, Any] = {"id": f"resp_{id}", "created_at": now, "usage": usage}
        if ENDPOINT.fullmatch(path):
            said = [
                item
                for item in given(request.members)
                if text_of(members_of(item).get("role")) == "user"
            ]
            output = Raw(rawjson.array([*said, rawjson.encode(item)]))
            return rawjson.encode(made | {"object": "response.compaction", "output": output})
        made |= {
            "object": "response",
            "status": "completed",
            "model": request.model,
            "output": [item],
            "error": None,
        }
        made |= {
            "incomplete_details": None,
            "metadata": {},
            "parallel_tool_calls": True,
            "tool_choice": "auto",
        }
        whole = rawjson.encode(made | {"tools": []})
        if not request.stream:
            return whole
        events = enumerate(as_events(rawjson.members(whole)))
        return b"".join(
            event.encoded({"sequence_number": Raw(b"%d" % number)}) for number, event in events
        )


def _only_compaction(wishes: Raw) -> bool:
    """Whether nothing is asked for but what this API had when this was written."""
    kinds = [text_of(object_of(wish).get("type")) for wish in elements_of(wishes)]
    return rawjson.is_array(wishes) and all(one == "compaction" for one in kinds)


def _reference(item: Raw) -> str:
    """Return the digest in our reference, if this is an item that has one."""
    if kind(item).type not in COMPACTIONS:
        return ""
    return referred(text_of(members_of(item).get("encrypted_content")))


RESPONSES = ResponsesDialect()
