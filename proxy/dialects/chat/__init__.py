"""Chat completions, `POST .../chat/completions`."""

from __future__ import annotations

import re
from itertools import groupby

from msgspec import Raw

from proxy import rawjson
from proxy.dialects.base import Dialect
from proxy.dialects.chat import request
from proxy.dialects.chat.reply import ChatTurn, error_event
from proxy.dialects.entries import Entry
from proxy.plan.plan import Role
from proxy.plan.summary import SummaryAnswer
from proxy.policy import SnapshotRole
from proxy.rawjson import Members, text_of


class ChatDialect(Dialect):
    name = "chat"
    path = re.compile(rb".*/chat/completions")
    own = re.compile(rb"/chat/completions(?:/|\Z)")
    turns = ChatTurn
    requests = request.ChatRoundRequest
    who = ("user", "safety_identifier")
    how = ("prompt_cache_key", "cache_control", "service_tier", "reasoning_effort", *request.LIMITS)
    carriers = ("text", "input_text")

    parsed = staticmethod(request.parse)
    opened = staticmethod(request.opened)
    contents = staticmethod(request.contents)
    knows = staticmethod(request.knows)
    content = staticmethod(request.content)
    error_event = staticmethod(error_event)

    def with_snapshot(self, entries: list[Entry], leading: int, block: str, role: SnapshotRole) -> list[Entry]:
        """A user message gets the name in the one that it stands before, so that the two can be joined."""
        if role is SnapshotRole.SYSTEM or (role is SnapshotRole.AUTO and leading):
            return super().with_snapshot(entries, leading, block, role)
        first = rawjson.members(entries[leading]) if leading < len(entries) else {}
        named = {"name": first["name"]} if "name" in first and text_of(first.get("role")) == "user" else {}
        added = rawjson.encode({"role": "user", **named, "content": block})
        return [*entries[:leading], added, *entries[leading:]]

    def joined(self, entries: list[Entry]) -> list[Entry]:
        """Many chat templates refuse user messages in a row, so a cut must not create them."""
        found: list[Entry] = []
        for name, run in groupby(entries, key=self._speaker):
            first, *others = run
            found += [first, *others] if name is None or not others else [request.merged(first, *others)]
        return found

    def _speaker(self, entry: Entry) -> str | None:
        """Return the name in a user message in which we know everything; None for everything else."""
        return text_of(rawjson.members(entry).get("name")) if self.known_as(Role.USER, entry) else None

    def followed(self, entries: list[Entry], task: Entry) -> list[Entry]:
        """The task goes on with the last message if that is the user's, whatever the name in it."""
        if entries and self._speaker(entries[-1]) is not None:
            return [*entries[:-1], request.merged(entries[-1], task)]
        return [*entries, task]

    @staticmethod
    def with_limit(members: Members, most: int) -> Members:
        """The limit is in the client's fields, because servers know one or the other, or in the older one."""
        limits = [name for name in request.LIMITS if members.pop(name, None) is not None] or request.LIMITS[:1]
        return members | (dict.fromkeys(limits, Raw(b"%d" % most)) if most else {})

    @staticmethod
    def answer_in(reply: Members) -> tuple[str, bool]:
        choice, *_ = map(rawjson.members, rawjson.elements(reply["choices"]))
        found = request.contents(Role.ASSISTANT, rawjson.members(choice["message"]))
        return "".join(found.said), text_of(choice.get("finish_reason")) == "stop"

    def summary_answer(self, status: int, body: bytes) -> SummaryAnswer:
        read = super().summary_answer(status, body)
        if status == 400 and not read.too_long and request.LIMITS[1].encode() in body:
            return SummaryAnswer(status, again=_with_newer_limit)
        return read


def _with_newer_limit(body: bytes) -> bytes:
    """Return the body of a call with the reply's limit in the newer field, which some models insist on."""
    old, new = request.LIMITS
    return rawjson.encode({new if name == old else name: value for name, value in rawjson.members(body).items()})


CHAT = ChatDialect()
