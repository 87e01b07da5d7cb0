"""What the proxy needs to know about an API.

A dialect is one folder in this package. It knows how its API writes history, tools, replies and errors. It is pure, and
no other part of the proxy names a field of its API. The proxy never translates one API into another: unknown fields,
encrypted reasoning and signatures survive only because untouched entries keep their bytes.

An *entry* is the unit of history in which the plan counts. In chat completions it is a message.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar

import msgspec
from msgspec import Raw

from proxy import rawjson
from proxy.dialects import measuring, refusals
from proxy.dialects.cache_marks import Mark
from proxy.dialects.entries import left_out
from proxy.dialects.refusals import RawHeaders
from proxy.dialects.request import RoundRequest, has_tools, lowered, opened
from proxy.dialects.turn import Turn
from proxy.errors import ProxyError
from proxy.plan.compacting import Compacting
from proxy.plan.message import Count, Message, Reading, ToolCall
from proxy.plan.plan import Role
from proxy.plan.recognise import kept_calls
from proxy.plan.summary import Section, SummaryAnswer
from proxy.plan.turn import Complaint, Continuation, Hidden, Request, Unplannable
from proxy.policy import SnapshotRole
from proxy.rawjson import NULL, Members, NotJson, object_of, text_of, whole
from proxy.tools.definitions import NAMES, Names

Entry = bytes | Raw
"""One entry of a history as JSON."""

MOST = 64
"""Characters of a member that are looked at to tell requests apart."""
POINTER_BYTES = 4
"""Bytes of a token of the line that replaces an answer of our tools, about."""


class Dialect(ABC):
    """One API. All methods are pure functions of their arguments."""

    name: ClassVar[str]
    """The name of the dialect's folder."""
    counts = False
    """Whether its requests only ask how many tokens they have, so that no model replies and nothing is recorded."""
    takes: ClassVar[frozenset[str]] = frozenset()
    """The types of images and files that a tool's result can hold."""
    turns: ClassVar[type[Turn]]
    requests: ClassVar[type[RoundRequest]]
    deciding: ClassVar[tuple[tuple[str, ...], ...]]
    """The paths of members that decide whether upstream takes our additions."""

    @abstractmethod
    def serves(self, method: str, path: bytes) -> bool:
        """Whether a request with this method and path (without the query) asks this API for a model's reply."""

    @abstractmethod
    def owns(self, path: bytes, names: Collection[bytes]) -> bool:
        """Whether another request belongs to this API, as its path or a header's name tells (in lower case)."""

    # -- a request --

    def parse(self, body: bytes) -> Request:
        """Parse a decompressed body. Raises Unplannable if it is no request of this API: upstream says so better."""
        try:
            return self.parsed(body, opened(body))
        except (NotJson, msgspec.MsgspecError) as error:
            raise Unplannable(str(error)) from error

    @staticmethod
    @abstractmethod
    def parsed(body: bytes, members: Members, /) -> Request:
        """Return the request with these members. Raises NotJson or MsgspecError if it is none."""

    def turn(
        self,
        request: Request,
        entries: Sequence[Entry],
        tools: Sequence[bytes],
        max_rounds: int,
        usage: bool = True,
        left: int | None = None,
    ) -> Turn:
        """Return a turn that sends `entries` instead of the request's own and adds our `tools`.

        `tools` are JSON objects with `name`, `description` and `parameters`. Everything else is sent as the client
        wrote it, except that the turn asks for the `usage` of a stream if the client does not, for the metrics. After
        `max_rounds` hidden rounds, calls of our tools are no longer answered. The reply's limit is lowered as
        `reply_limit` says if it is known how many tokens are `left` for it.
        """
        return self.turns(self.requests(request, entries, tools, max_rounds, usage, left))

    def reply_limit(self, asked: Request, left: int) -> int | None:
        """Return the lower limit that the reply gets if the window leaves it so many tokens; None if its own fits.

        It is not below a thinking budget, nor so low that the reply would be of no use.
        """
        return min(map(whole, lowered(asked.members, self.requests.limits, left).values()), default=None)

    def with_lower_limit(self, asked: Request, left: int) -> bytes:
        """Return the body of the request with that limit and no other change."""
        return rawjson.encode(asked.members | lowered(asked.members, self.requests.limits, left))

    @staticmethod
    def continued(request: Request, continuation: Continuation) -> bytes:
        """Return the body of a request that goes on from a reply with hidden rounds, for upstream, if that keeps them.
        Otherwise every request has the whole history."""
        return request.body

    # -- compaction that the client asks for --

    def compaction_asked(self, path: bytes, request: Request) -> Compacting | None:
        """Return how a request for this path asks for compaction."""
        return None

    def target(self, target: bytes) -> bytes:
        """Return the path and query where a model replies, for a request that has these."""
        return target

    def uncompacted(self, request: Request) -> bytes:
        """Return the body without the wish for compaction."""
        return request.body

    def references(self, request: Request) -> list[str]:
        """Return our references that the request has in the place of upstream's summaries."""
        return []

    def restored(self, request: Request, texts: Mapping[str, str]) -> bytes:
        """Return the body with these texts in the place of references."""
        return request.body

    def compacted(self, path: bytes, request: Request, text: str, tokens: tuple[int, int], now: int) -> bytes:
        """Return the reply to a request for the compaction of its whole history: the reference to the snapshot `text`.
        `tokens` are those of the history and of the snapshot, and `now` is in seconds."""
        raise NotImplementedError

    def shape(self, request: Request) -> str:
        """Return what else in the request decides whether upstream takes our additions, such as JSON mode."""
        found = [_decisive(request.members, path) for path in self.deciding]
        found += ["tools" if has_tools(request.tools) else "", "stream" if request.stream else ""]
        return " ".join(filter(None, found))

    # -- an entry --

    @staticmethod
    @abstractmethod
    def read(entry: Entry, /, reading: Reading, count: Count) -> Message:
        """Measure an entry: role, meaning, tokens, texts that can be moved, calls, answers. Raises Unplannable.

        The meaning is part of record keys. Two dialects must never return the same one, or a record of one API would
        be put into requests of the other.
        """

    @staticmethod
    @abstractmethod
    def texts(entry: Entry, /) -> list[tuple[int | None, str]]:
        """Return the texts that may be replaced: one text without a place, or each text part with its place; and images
        and files as JSON, in the form of a result's part if `takes` has it. Raises NotJson."""

    @staticmethod
    @abstractmethod
    def replace(entry: Entry, texts: Mapping[int | None, str], /) -> bytes:
        """Return the entry with the texts at these places replaced. All other members keep their bytes."""

    @staticmethod
    @abstractmethod
    def said(entry: Entry, /) -> tuple[str, list[ToolCall]]:
        """Return the text and the calls of a reply. Raises NotJson."""

    @staticmethod
    @abstractmethod
    def answered(entry: Entry, /) -> str:
        """Return the id of the call that an answer of our tools belongs to; empty for any other entry."""

    @staticmethod
    @abstractmethod
    def sections(entry: Entry, index: int, message: Message, tool: str, /) -> list[Section]:
        """Return the entry in readable form, for the file of originals. Raises NotJson.

        `index` is the entry's place in the history, and `tool` is the name of the tool whose result it is, or empty.
        """

    @staticmethod
    @abstractmethod
    def with_snapshot(entries: list[Entry], leading: int, block: str, role: SnapshotRole, /) -> list[Entry]:
        """Return the entries with the snapshot's text `block` added at the place for `role`.

        `leading` is the number of system messages with which the entries begin. An entry of its own stands directly
        after them.
        """

    @staticmethod
    def joined(entries: list[Entry], /) -> list[Entry]:
        """Return the entries with each run of user messages as one, if the API may refuse user messages in a row.

        Messages of users with different names stay apart, and so does everything else.
        """
        return entries

    @staticmethod
    @abstractmethod
    def marked(entry: Entry, mark: Mark, /) -> Entry:
        """Return the entry with this cache breakpoint of ours at its end, unless it cannot carry one."""

    def reply_meaning(self, text: str, calls: Sequence[ToolCall]) -> bytes:
        """Return the `Message.meaning` of a reply with this text and these calls when the client sends it back."""
        return measuring.meaning(self.name, Role.ASSISTANT, text, calls)

    # -- a hidden round --

    def reinserted(self, hidden: Hidden, visible: Entry) -> list[Entry]:
        """Return a hidden round together with the reply that the client saw, in their original order.

        If the client has rewritten its calls, its own reply stays, and only what came before is put back.
        """
        if hidden.instead is None:
            return [*hidden.before, visible, *hidden.after]
        wrote = self.written(hidden.instead)
        answers = {self.answered(entry) for entry in hidden.after}
        calls = [call for entry in wrote for call in self.said(entry)[1]]
        if not kept_calls(calls, answers, self.said(visible)[1]):
            return [*hidden.before, visible]
        return [*hidden.before, *wrote, *hidden.after]

    @staticmethod
    def written(instead: bytes) -> list[Entry]:
        """Return the entry that `Hidden.instead` holds; none if the model wrote nothing."""
        return [instead]

    def shrunk(self, hidden: Hidden, least: int, names: Names = NAMES) -> Hidden:
        """Return the round with a line in place of each answer above `least` tokens that says how to get it again. The
        tool is called what it is called now (`names`): the client may have got one of its own with the name that it
        had."""
        entries, sizes = [*hidden.before, *hidden.after], hidden.sizes_of_each()
        if all(size <= least for size in sizes):
            return hidden
        made = [*entries, *(self.written(hidden.instead) if hidden.instead is not None else ())]
        known = {call.id: call for entry in made for call in self.said(entry)[1] if call.id}
        for place, (entry, size) in enumerate(zip(entries, sizes, strict=True)):
            call = known.get(self.answered(entry)) if size > least else None
            pointer = self.replace(entry, {None: left_out(call, names)}) if call else entry
            if len(pointer) < len(entry):
                entries[place], sizes[place] = pointer, len(pointer) // POINTER_BYTES
        first = len(hidden.before)
        before, after = tuple(entries[:first]), tuple(entries[first:])
        return msgspec.structs.replace(hidden, before=before, after=after, tokens=sum(sizes), sizes=tuple(sizes))

    # -- a summary --

    @staticmethod
    @abstractmethod
    def summary_request(text: str, model: str, request: Request | None = None, most: int = 0) -> bytes:
        """Return the body of a summary call whose only input is `text`.

        The call copies from `request` the members that say who asks. If `request` is for the same model, the call also
        copies how to cache and how to reason. The reply may have `most` tokens, without a limit if that is 0.
        """

    @staticmethod
    @abstractmethod
    def summary_on_prefix(
        text: str, request: Request, entries: Sequence[Entry], tools: Sequence[bytes], most: int, end: int
    ) -> bytes:
        """Return the body of a summary call that continues `entries`, which upstream has cached, with the task `text`.

        `end` is the place in the client's history where the entries end. If the client set a cache breakpoint after it,
        the task gets that breakpoint. `tools` and `most` are as above; the model may not call any of the tools.
        """

    @staticmethod
    @abstractmethod
    def summary_answer(status: int, body: bytes) -> SummaryAnswer:
        """Read the reply to a summary call. Accepts any body; the answer has no text if the body cannot be read."""

    # -- refusals and errors --

    @staticmethod
    def forgiving(body: bytes, headers: RawHeaders) -> tuple[bytes, RawHeaders]:
        """Return the request so that upstream drops thinking that no longer fits what precedes it, if it can."""
        return body, headers

    @staticmethod
    def complaint(status: int, body: bytes) -> Complaint:
        """Return what this refusal of a request that we changed is about.

        Status 200 means that `body` is an error in the place of a reply, as in `Turn.refusal`.
        """
        return refusals.complaint(status, body)

    @staticmethod
    def error_body(fault: ProxyError) -> bytes:
        """Return the body of an error reply from the proxy itself: in OpenAI's shape, unless the API has another."""
        return fault.body()

    @staticmethod
    @abstractmethod
    def error_event(fault: ProxyError, said: bytes = b"") -> bytes:
        """Return the event that ends a stream after a failure.

        `said` is the body of upstream's refusal, if that is the failure. It is used instead of `fault` if it has the
        shape that clients of this API know.
        """


def _decisive(members: Members, path: Sequence[str]) -> str:
    """Return the type of the member at this path, or the beginning of a value without one; empty for none."""
    *outer, name = path
    for key in outer:
        members = object_of(members.get(key))
    value = members.get(name, NULL)
    type = text_of(object_of(value).get("type"))
    return (type or bytes(b"" if rawjson.is_null(value) else value).decode("utf-8", "replace"))[:MOST]
