"""What the proxy needs to know about an API, and how a request of one is parsed.

A dialect is one folder in this package. It knows how its API writes history, tools, replies and errors. It is pure, and
no other part of the proxy names a field of its API. The proxy never translates one API into another: unknown fields,
encrypted reasoning and signatures survive only because untouched entries keep their bytes.

An *entry* is the unit of history in which the plan counts. In chat completions it is a message.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec
from msgspec import Raw

from proxy import rawjson
from proxy.dialects import refusals
from proxy.dialects.entries import Mark, left_out, meaning
from proxy.dialects.refusals import RawHeaders
from proxy.dialects.request import ALLOWED, RoundRequest, lowered
from proxy.dialects.turn import Turn
from proxy.errors import ProxyError
from proxy.plan.compacting import Compacting
from proxy.plan.message import Count, Message, Reading, ToolCall
from proxy.plan.plan import Role
from proxy.plan.recognise import kept_calls
from proxy.plan.summary import Section, SummaryAnswer
from proxy.plan.turn import Complaint, Continuation, Hidden, Reason, Request, Unplannable
from proxy.policy import SnapshotRole
from proxy.rawjson import Members, NotJson, TooManyElements, object_of, text_of, whole
from proxy.tools.definitions import NAMES, OTHER_NAMES, Names

Entry = bytes | Raw
"""One entry of a history as JSON."""

POINTER_BYTES = 4
"""Bytes of a token of the line that replaces an answer of our tools, about."""


class Dialect(ABC):
    """One API. All methods are pure functions of their arguments."""

    name: ClassVar[str]
    """The name of the dialect's folder."""
    path: re.Pattern[bytes]
    """The paths, without the query, at which it answers a POST with a model's reply."""
    own: ClassVar[re.Pattern[bytes]]
    """What the paths of its other requests contain."""
    version_header = b""
    """A header that all of its requests have, in lower case; empty if there is none."""
    counts = False
    """Whether its requests only ask how many tokens they have, so that no model replies and nothing is recorded."""
    takes: ClassVar[frozenset[str]] = frozenset()
    """The types of images and files that a tool's result can hold."""
    turns: ClassVar[type[Turn]]
    requests: ClassVar[type[RoundRequest]]

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
        """Return the entry, which stands at `index`, in readable form for the file of originals. `tool` is the name of
        the tool whose result it is, or empty. Raises NotJson."""

    @staticmethod
    @abstractmethod
    def with_snapshot(entries: list[Entry], leading: int, block: str, role: SnapshotRole, /) -> list[Entry]:
        """Return the entries with the snapshot's text `block` added at the place for `role`. As an entry of its own it
        stands directly after the `leading` system messages."""

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
        return meaning(self.name, Role.ASSISTANT, text, calls)

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
        """Return what this refusal of a request that we changed is about. Status 200 means that `body` is an error in
        the place of a reply, as in `Turn.refusal`."""
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


# -- parsing -----------------------------------------------------------------------------------------------------------

MAX_MODEL = 1_000
"""The most bytes of the model's name. A request with more is forwarded unchanged, because caches and patterns use the
name at every request and for each message."""
MAX_OTHERS = 20_000
"""The most commas outside of the history and the tools. A request with more is forwarded unchanged, because each comma
may separate top-level members, and each member becomes an object. A large schema for the reply has a thousand."""
MAX_TOOLS = 128
"""OpenAI's limit for the tools of one request. Our two tools count towards it."""

DEFINING = (b'"tool_definition"', b'"tool_search_output"', b'"additional_tools"')
"""The types of blocks and items in a history that define further tools."""

SEPARATORS = (b'"', b".", b":", b"/")
"""What can stand before a tool's own name."""

FREE = ("", "auto", "any", "required", "validated", ALLOWED)
"""A `tool_choice`, or its type, with which the model may call our tools. With all others it may call none, or one tool
of the client's."""


class _Large(msgspec.Struct, frozen=True):
    """The top-level members that may be large, in any API."""

    messages: Raw = rawjson.NULL
    input: Raw = rawjson.NULL
    tools: Raw = rawjson.NULL
    system: Raw = rawjson.NULL
    instructions: Raw = rawjson.NULL


_large = msgspec.json.Decoder(_Large)


def opened(body: bytes) -> Members:
    """Return the top-level members of a body. Raises NotJson, and Unplannable if there is too much besides the large
    ones."""
    rawjson.check_utf8(body)
    found, _ = rawjson.decode(_large, body)
    large = msgspec.structs.astuple(found)
    if len(body) - sum([len(memoryview(raw)) for raw in large]) > MAX_OTHERS:
        others = rawjson.commas(body) - sum(map(rawjson.commas, large))
        if others > MAX_OTHERS:
            raise Unplannable(f"more than {MAX_OTHERS} commas outside of messages and tools", Reason.TOO_MANY_MEMBERS)
    return rawjson.members(body, checked=True)


def parsed(
    body: bytes,
    members: Members,
    entries: list[Raw],
    *,
    limits: Sequence[str],
    known: frozenset[str],
    obstacle: str,
    **more: Any,
) -> Request:
    """Return the request with these entries. `limits` are members that limit the reply, and `known` are the members
    with which a history means what it means without them."""
    tools, model = members.get("tools", rawjson.NULL), members.get("model", rawjson.NULL)
    if len(memoryview(model)) > MAX_MODEL:
        raise Unplannable(f"the model's name has more than {MAX_MODEL} bytes")
    names, theirs = our_names(body, tools)
    choice = members.get("tool_choice")
    return Request(
        body=body,
        members=members,
        entries=entries,
        model="" if rawjson.is_null(model) else rawjson.text(model),
        stream=bytes(members.get("stream", b"")) == b"true",
        tools=tools,
        reply_tokens=max(whole(members.get(limit)) for limit in limits),
        names=names,
        theirs=theirs,
        bound=(text_of(choice) or text_of(object_of(choice).get("type"))) not in FREE,
        obstacle=obstacle or ("" if names else "tools"),
        unknown=tuple(sorted(key for key in members.keys() - known if not rawjson.is_null(members[key]))),
        **more,
    )


def bounded(raw: Raw, reason: Reason) -> list[Raw]:
    """Return an array's elements. Raises Unplannable with this reason if there are too many."""
    try:
        return rawjson.elements(raw)
    except TooManyElements as error:
        raise Unplannable(str(error), reason) from error


_ESCAPED = re.compile(rb"\\u00([2-7][0-9a-fA-F])")
"""ASCII as JSON may write it: `\\u0067rep` is a name of ours, too."""


def our_names(body: bytes, tools: Raw) -> tuple[Names | None, frozenset[str]]:
    """Return what our tools are called in this request, None if there is no room for them; and those of our names that
    the client has for tools of its own, in any case.

    A name is taken if a string in the definitions is it, or ends with it after a separator: models write those before
    ours. What is no name does no harm.
    """
    if len(bounded(tools, Reason.TOO_MANY_TOOLS) if not rawjson.is_null(tools) else ()) > MAX_TOOLS - len(NAMES):
        return None, frozenset()
    defined = body if any(map(body.__contains__, DEFINING)) else bytes(tools)
    defined = _ESCAPED.sub(lambda found: bytes.fromhex(found[1].decode()), defined)
    ends = {name: [b'%b%b"' % (before, name.encode()) for before in SEPARATORS] for name in (*NAMES, *OTHER_NAMES)}
    taken = {name for name, forms in ends.items() if any(form in defined for form in forms)}
    free = (names for names in (NAMES, OTHER_NAMES) if taken.isdisjoint(names))
    folded = defined.lower()
    return next(free, None), frozenset(name for name in NAMES if b'"%b"' % name.encode() in folded)
