"""What the proxy needs to know about an API.

A dialect is one folder in this package. It knows how its API writes history, tools, replies and
errors. It is pure, and no other part of the proxy names a field of its API. The proxy translates
nothing into another API but calls of its own tools: unknown fields, encrypted reasoning and
signatures survive only because untouched entries keep their bytes.

An *entry* is the unit of history in which the plan counts. In chat completions it is a message.
Each API walks over one for its `contents`; what is made of them is the same for all.
"""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import msgspec
from msgspec import Raw

from proxy import rawjson
from proxy.dialects import refusals
from proxy.dialects.entries import (
    Contents,
    Entry,
    Harmless,
    Mark,
    appended,
    marked,
    marks_in,
    meaning,
    measured,
    unreadable,
    with_texts,
)
from proxy.dialects.refusals import RawHeaders
from proxy.dialects.request import (
    RoundRequest,
    bounded,
    forbids_ours,
    lowered,
    model_of,
    opened,
    our_names,
    with_tools,
)
from proxy.dialects.turn import Turn
from proxy.dialects.usage import Reported, reported
from proxy.errors import ProxyError
from proxy.plan.compacting import Compacting
from proxy.plan.plan import Count, Message, Reading, Role, ToolCall
from proxy.plan.preview import has_place, names_in
from proxy.plan.recognise import Hidden, kept_calls
from proxy.plan.summary import Section, SummaryAnswer
from proxy.plan.turn import Complaint, Continuation, Reason, Request, Unplannable
from proxy.policy import SnapshotRole
from proxy.rawjson import NULL, Members, NotJson, elements_of, integer, string
from proxy.tools.definitions import NAMES, OTHER_NAMES, Names

LEFT_OUT = "(this answer was shown before and is left out now; to have it again call {} with {})"
"""The line in the place of an answer of our tools that was read long ago."""
POINTER_BYTES = 4
"""Bytes of a token of that line, about."""

ANSWER_BYTES = 4 << 20
"""The most bytes of a reply to a summary call that are parsed. A record takes a few thousand, and
parsing more would block the event loop for more than 10 ms."""


class Dialect(ABC):
    """One API. All methods are pure functions of their arguments."""

    name: ClassVar[str]
    """The name of the dialect's folder."""
    path: re.Pattern[bytes]
    """The paths, without the query, at which it answers a POST with a model's reply."""
    further_paths: ClassVar[re.Pattern[bytes]]
    """What the paths of its other requests contain."""
    version_header = b""
    """A header that all of its requests have, in lower case; empty if there is none."""
    counts = False
    """Whether its requests only ask how many tokens they have, so that no model replies and nothing
    is recorded."""
    media_types: ClassVar[frozenset[str]] = frozenset()
    """The types of images and files that a tool's result can hold."""
    turns: ClassVar[type[Turn]]
    requests: ClassVar[type[RoundRequest]]

    listing: ClassVar[str] = "messages"
    """The member with the list that the entries are made of."""
    known: ClassVar[frozenset[str]]
    """The top-level members with which a history means what it means without them. A request with
    others passes unplanned; the policy's `upstream.members` adds to them."""
    barred: ClassVar[Mapping[str, bytes]]
    """Members that our tools do not go with, unless they are null or have this value."""
    defining: ClassVar[tuple[bytes, ...]] = ()
    """The types, in quotation marks, of what defines further tools within a history."""

    refers: ClassVar[tuple[str, ...]] = ()
    """Members that may refer to what our records have."""
    caller_members: ClassVar[tuple[str, ...]]
    """Members that say who asks. A summary call has them, too."""
    cache_members: ClassVar[tuple[str, ...]]
    """Members that say how to cache and to reason. A summary call of the same model has them,
    too."""
    copied_members: ClassVar[Mapping[str, Raw | None]] = {}
    """Members that a summary call which continues the history copies from the request, with their
    defaults."""
    system = "system"
    """The role of a message that instructs the model."""
    carriers: ClassVar[tuple[str, ...]]
    """The parts of a content that can carry a cache breakpoint. A single text becomes one of the
    first kind."""

    # -- a request --

    def parse(self, body: bytes) -> Request:
        """Parse a decompressed body. Raises Unplannable if it is no request of this API: upstream
        says so better."""
        try:
            return self.request_of(body, opened(body))
        except (NotJson, msgspec.MsgspecError) as error:
            raise Unplannable(str(error)) from error

    def request_of(self, body: bytes, members: Members) -> Request:
        """Return the request with these members. Raises NotJson, MsgspecError and Unplannable."""
        entries, obstacle, more = self.split(members)
        tools = members.get("tools", NULL)
        if not rawjson.is_null(tools):
            bounded(tools, Reason.TOO_MANY_TOOLS)
        names, theirs = our_names(
            body if any(type in body for type in self.defining) else bytes(tools)
        )
        given = {name: raw for name, raw in members.items() if not rawjson.is_null(raw)}
        barred = (
            name
            for name, plain in self.barred.items()
            if name in given and bytes(given[name]) != plain
        )
        return Request(
            body=body,
            members=members,
            entries=entries,
            model=model_of(members),
            stream=bytes(members.get("stream", b"")) == b"true",
            tools=tools,
            reply_tokens=max(integer(members.get(limit)) for limit in self.requests.limits),
            names=names,
            theirs=theirs,
            forbids_ours=forbids_ours(members.get("tool_choice")),
            obstacle=next(barred, obstacle) or ("" if names else "tools"),
            unknown=tuple(sorted(given.keys() - self.known)),
            listing=self.listing,
            **more,
        )

    @staticmethod
    def ends(element: Raw) -> bool:
        """Whether an entry ends with this element of `listing`, whatever follows it."""
        return True

    @staticmethod
    @abstractmethod
    def split(members: Members, /) -> tuple[list[Raw], str, dict[str, Any]]:
        """Return a request's entries, what else than a `barred` member our tools do not go with,
        and the members of `Request` that only this API has. Raises NotJson or MsgspecError if it is
        no request."""

    def turn(
        self,
        request: Request,
        entries: Sequence[Entry],
        tools: Sequence[bytes],
        max_rounds: int,
        usage: bool = True,
        left: int | None = None,
    ) -> Turn:
        """Return the turn of a request; `RoundRequest` says what is sent."""
        return self.turns(self.requests(request, entries, tools, max_rounds, usage, left))

    def reply_limit(self, request: Request, left: int) -> int | None:
        """Return the lower limit that the reply gets if the window leaves it so many tokens; None
        if its own fits.

        It is not below a thinking budget, nor so low that the reply would be of no use.
        """
        return min(
            map(integer, lowered(request.members, self.requests.limits, left).values()),
            default=None,
        )

    def with_lower_limit(self, request: Request, left: int) -> bytes:
        """Return the body of the request with that limit and no other change."""
        return rawjson.encode(
            request.members | lowered(request.members, self.requests.limits, left)
        )

    @staticmethod
    def continued(request: Request, continuation: Continuation) -> bytes:
        """Return the body of a request that goes on from a reply with hidden rounds, for upstream,
        if that keeps them. Otherwise every request has the whole history."""
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

    def compaction_reply(
        self,
        path: bytes,
        request: Request,
        text: str,
        digest: str,
        tokens: tuple[int, int],
        now: int,
    ) -> bytes:
        """Return the reply to a request for the compaction of its whole history: the reference to
        the snapshot `text`. `tokens` are those of the history and of the snapshot, and `now` is in
        seconds."""
        raise NotImplementedError

    # -- an entry, as each API has it --

    @staticmethod
    @abstractmethod
    def opened(entry: Entry, /) -> tuple[Role, Any]:
        """Return whose an entry is, also if more cannot be read of it, and its parts, for the next
        two. Raises NotJson."""

    @staticmethod
    @abstractmethod
    def contents(role: Role, parts: Any, /) -> Contents:
        """Return what is in an entry. Raises NotJson.

        Images and files have the form of a result's part if `takes` has it.
        """

    @staticmethod
    @abstractmethod
    def unknown(contents: Contents, parts: Any, harmless: Harmless, /) -> str:
        """Return the path of something in an entry that we do not know; empty if we know
        everything, so that it may be moved, cut or merged. Raises NotJson."""

    @staticmethod
    @abstractmethod
    def content(entry: Entry, result: bool, /) -> tuple[Raw | None, Callable[[Raw], bytes]]:
        """Return an entry's content, or that of the `result` in it, and what returns the entry with
        another one. All other members keep their bytes. Raises NotJson."""

    # -- an entry, as all APIs have it --

    def read(self, entry: Entry, reading: Reading, count: Count) -> Message:
        """Measure an entry: role, meaning, tokens, texts that can be moved, calls, answers. Raises
        Unplannable.

        The meaning is part of record keys. Two dialects must never return the same one, or a record
        of one API would be put into requests of the other.
        """
        try:
            role, parts = self.opened(entry)
        except (NotJson, msgspec.MsgspecError) as error:
            raise Unplannable(str(error)) from error
        try:
            found = self.contents(role, parts)
            sealed = self.unknown(found, parts, reading.harmless)
            message = measured(self.name, entry, found, reading, count, sealed=sealed)
        except (NotJson, msgspec.MsgspecError):
            message = unreadable(self.name, entry, role, count)
        names = names_in(bytes(entry))
        there = has_place(bytes(entry), reading.shape.store_dir)
        if not there and not names:
            return message
        return msgspec.structs.replace(message, has_place=there, names=names)

    def _contents(self, entry: Entry) -> Contents:
        """Return what is in an entry. One that cannot be read is shown to readers as it is, and has
        nothing else."""
        try:
            return self.contents(*self.opened(entry))
        except NotJson:
            found = Contents(Role.SEALED)
            found.other(Raw(entry))
            return found

    def texts(self, entry: Entry) -> list[tuple[int | None, str]]:
        """Return the texts that may be replaced: one text without a place, or each text part with
        its place."""
        return self._contents(entry).texts

    def pieces(self, entry: Entry) -> list[tuple[int | None, str]]:
        """Return the texts that may be replaced, and images and files as JSON."""
        found = self._contents(entry)
        return [
            *found.texts,
            *((place, part.decode("utf-8", "replace")) for place, part, _ in found.media),
        ]

    def reply_parts(self, entry: Entry) -> tuple[str, list[ToolCall]]:
        """Return the text and the calls of a reply."""
        found = self._contents(entry)
        return "".join(found.spoken), found.calls

    def answered(self, entry: Entry) -> str:
        """Return the id of the call that a result belongs to; empty for any other entry."""
        return self._contents(entry).answers

    def sections(self, entry: Entry, index: int, message: Message, tool: str) -> list[Section]:
        """Return the entry, which stands at `index`, in readable form for the file of originals.
        `tool` is the name of the tool whose result it is, or empty."""
        return self._contents(entry).sections(index, message, tool)

    def replace(self, entry: Entry, texts: Mapping[int | None, str]) -> bytes:
        """Return the entry with the texts at these places replaced. All other members keep their
        bytes."""
        if not texts:
            return bytes(entry)
        content, put = self.content(entry, True)
        return put(with_texts(content or rawjson.NULL, texts, self.carriers[0]))

    def marked(self, entry: Entry, mark: Mark) -> Entry:
        """Return the entry with this cache breakpoint of ours at its end, unless it cannot carry
        one."""
        content, put = self.content(entry, False)
        made = marked(content, mark, self.carriers)
        return entry if made is None else put(made)

    def known_as(self, role: Role, entry: Entry) -> bool:
        """Whether it is an entry of this role, in which we know everything."""
        try:
            own, parts = self.opened(entry)
            return own is role and not self.unknown(self.contents(role, parts), parts, ())
        except NotJson:
            return False

    def with_snapshot(
        self, entries: list[Entry], leading: int, block: str, role: SnapshotRole
    ) -> list[Entry]:
        """Return the entries with the snapshot's text `block` added at the place for `role`: at the
        end of the first system message, unless it might mean what nobody knows, or as an entry
        directly after the `leading` ones."""
        if role is not SnapshotRole.USER and leading and self.known_as(Role.SYSTEM, entries[0]):
            content, put = self.content(entries[0], False)
            return [put(appended(content, "\n\n" + block, self.carriers[0])), *entries[1:]]
        system = rawjson.encode({"role": self.system, "content": block})
        added = self.task(block) if role is SnapshotRole.USER else system
        return self.inserted(entries, leading, added)

    def inserted(self, entries: list[Entry], place: int, added: Entry) -> list[Entry]:
        """Return the entries with one more at this place, joined with the one behind it if both are
        the user's."""
        return [
            *entries[:place],
            *self.joined([added, *entries[place : place + 1]]),
            *entries[place + 1 :],
        ]

    def joined(self, entries: list[Entry]) -> list[Entry]:
        """Return the entries with each run of user messages as one, if the API may refuse user
        messages in a row.

        Messages of users with different names stay apart, and so does everything else.
        """
        return entries

    def followed(self, entries: list[Entry], task: Entry) -> list[Entry]:
        """Return the entries followed by a task of the user's, joined with what the user said
        last."""
        return [*entries[:-1], *self.joined([*entries[-1:], task])]

    def reply_meaning(self, text: str, calls: Sequence[ToolCall]) -> bytes:
        """Return the `Message.meaning` of a reply with this text and these calls when the client
        sends it back."""
        return meaning(self.name, Role.ASSISTANT, text, calls)

    # -- a hidden round --

    def paired(self, hidden: Hidden, visible: Entry) -> Hidden:
        """Return a hidden round as it goes with the reply that the client sent back. If the client
        has rewritten its calls, its own reply stays, behind all that the round has."""
        if hidden.instead is None:
            return hidden
        answers = {self.answered(entry) for entry in hidden.after}
        calls = [
            call for entry in self.written(hidden.instead) for call in self.reply_parts(entry)[1]
        ]
        if kept_calls(calls, answers, self.reply_parts(visible)[1]):
            return hidden
        ahead = self.ahead(hidden, self, anew=False)
        return msgspec.structs.replace(ahead, instead=self.alone([hidden], visible))

    def ahead(self, hidden: Hidden, source: Dialect, *, anew: bool) -> Hidden:
        """Return a hidden round of which everything precedes the reply that the client sent back,
        because the model did not write it so. Our calls that stood beside the client's become a
        reply before it.

        `source` has written the round. With `anew`, only the calls and answers of all its replies
        are taken over.
        """
        first = len(hidden.before)
        sizes = hidden.sizes or (0,) * (first + len(hidden.after))
        made = list(zip(hidden.before, sizes[:first], strict=True))
        beside = self.written(hidden.instead) if hidden.after and hidden.instead is not None else []
        others = [*((entry, 0) for entry in beside), *zip(hidden.after, sizes[first:], strict=True)]
        made = (
            self._retold([*made, *others], source)
            if anew
            else [*made, *self._retold(others, source)]
        )
        before = tuple(entry for entry, _ in made)
        return Hidden(before, None, (), tuple(size for _, size in made), self.name, hidden.model)

    def _retold(
        self, entries: Sequence[tuple[Entry, int]], source: Dialect
    ) -> list[tuple[Entry, int]]:
        """Return the calls of ours and their answers in these entries of `source`, as this API has
        them. An entry comes with its tokens. No other API takes this one's ids, images and
        files."""
        foreign = source.name != self.name
        found = [source._contents(entry) for entry, _ in entries]
        answered = {one.answers for one in found} - {""}
        seed = hashlib.sha256(b"\n".join(bytes(entry) for entry, _ in entries)).hexdigest()[:16]
        ids: dict[str, str] = {}
        made: list[tuple[Entry, int]] = []
        for one, (_, size) in zip(found, entries, strict=True):
            if one.answers:
                text = "\n".join(text for _, text in one.texts)
                parts = (
                    [] if foreign else [part.decode("utf-8", "replace") for _, part, _ in one.media]
                )
                made.append(
                    (
                        self.answer(ids.get(one.answers, one.answers), text, next(iter(parts), "")),
                        size,
                    )
                )
            elif calls := [call for call in one.calls if call.id in answered]:
                if foreign:
                    ids = {
                        call.id: f"{self.turns.call_ids}_{seed}_{len(made) + at}"
                        for at, call in enumerate(calls)
                    }
                    calls = [msgspec.structs.replace(call, id=ids[call.id]) for call in calls]
                asking = self.calling(calls)
                made.append((asking, len(asking) // POINTER_BYTES))
        return made

    @staticmethod
    @abstractmethod
    def calling(calls: Sequence[ToolCall], /) -> Entry:
        """Return a reply with these calls of functions, and with nothing else."""

    @staticmethod
    @abstractmethod
    def answer(id: str, text: str, part: str, /) -> Entry:
        """Return the result of a call, with an image or a file behind its text if there is a
        `part`."""

    def alone(self, rounds: Sequence[Hidden], visible: Entry) -> bytes | None:
        """Return the reply that the client sent back as upstream takes it without what was hidden
        of it, for `Hidden.instead`. None: as it is."""
        return None

    def reinserted(self, hidden: Hidden, visible: Entry) -> list[Entry]:
        """Return a hidden round together with the reply that the client saw, in their original
        order."""
        shown = [visible] if hidden.instead is None else self.written(hidden.instead)
        return [*hidden.before, *shown, *hidden.after]

    @staticmethod
    def written(instead: bytes) -> list[Entry]:
        """Return the entry that `Hidden.instead` holds; an empty list if the model wrote
        nothing."""
        reply = instead.strip()[1:-1]
        return [reply] if reply else []

    def shrunk(self, hidden: Hidden, least: int, names: Names = NAMES) -> Hidden:
        """Return the round with a line in place of each answer above `least` tokens that says how
        to get it again. The tool is called what it is called now (`names`): the client may have got
        one of its own with the name that it had."""
        entries = [*hidden.before, *hidden.after]
        sizes = [*hidden.sizes]
        if all(size <= least for size in sizes):
            return hidden
        made = [*entries, *(self.written(hidden.instead) if hidden.instead is not None else ())]
        calls = {call.id: call for entry in made for call in self.reply_parts(entry)[1] if call.id}
        for place, (entry, size) in enumerate(zip(entries, sizes, strict=True)):
            if size <= least or not (call := calls.get(self.answered(entry))):
                continue
            name = next(
                (names[own.index(call.name)] for own in (NAMES, OTHER_NAMES) if call.name in own),
                call.name,
            )
            pointer = self.replace(entry, {None: LEFT_OUT.format(name, call.arguments)})
            if len(pointer) < len(entry):
                entries[place] = pointer
                sizes[place] = len(pointer) // POINTER_BYTES
        first = len(hidden.before)
        before = tuple(entries[:first])
        after = tuple(entries[first:])
        return msgspec.structs.replace(hidden, before=before, after=after, sizes=tuple(sizes))

    # -- a summary --

    def summary_request(
        self, text: str, model: str, request: Request | None = None, most: int = 0
    ) -> bytes:
        """Return the body of a summary call whose only input is `text`.

        The call copies from `request` the members that say who asks. If `request` is for the same
        model, the call also copies how to cache and how to reason. The reply may have `most`
        tokens, without a limit if that is 0.
        """
        return rawjson.encode(
            self._asking(model, request, most) | self.requests.assembled({}, [self.task(text)])
        )

    def summary_on_prefix(
        self,
        text: str,
        request: Request,
        entries: Sequence[Entry],
        tools: Sequence[bytes],
        most: int,
        end: int,
    ) -> bytes:
        """Return the body of a summary call that continues `entries`, which upstream has cached,
        with the task `text`.

        `end` is the place in the client's history where the entries end. Some caches store a prefix
        only up to a breakpoint that the client sets: if it set one after `end`, the task gets the
        same. `tools` and `most` are as above; the model may not call any of the tools.
        """
        members = self._asking(request.model, request, most)
        members |= {
            name: raw
            for name, own in self.copied_members.items()
            if (raw := request.members.get(name, own)) is not None
        }
        defined = with_tools(request.members.get("tools"), list(map(self.requests.tool, tools)))
        if elements_of(defined):
            members |= {"tools": defined or rawjson.NULL, "tool_choice": self.requests.no_call}
        marks = [mark for entry in request.entries[end:] for mark in marks_in(entry)]
        task = self.marked(self.task(text), marks[-1]) if marks else self.task(text)
        return rawjson.encode(
            members | self.requests.assembled(request.members, self.followed([*entries], task))
        )

    def _asking(self, model: str, request: Request | None, most: int) -> Members:
        """Return the model and what a call copies from its request. Another model may not know how
        to cache and to reason. Where the request's path names the model, the body does not."""
        if request is None:
            return self.with_limit({"model": string(model)}, most)
        names = (
            (*self.caller_members, *self.cache_members)
            if model == request.model
            else self.caller_members
        )
        copied = {name: request.members[name] for name in names if name in request.members}
        return self.with_limit(
            ({"model": string(model)} if "model" in request.members else {}) | copied, most
        )

    @staticmethod
    def task(text: str) -> Entry:
        """Return a message of the user's."""
        return rawjson.encode({"role": "user", "content": text})

    @staticmethod
    @abstractmethod
    def with_limit(members: Members, most: int, /) -> Members:
        """Return a summary call's members with the limit of its reply; none if `most` is 0."""

    @staticmethod
    @abstractmethod
    def answer_in(reply: Members, /) -> tuple[str, bool]:
        """Return the text of a whole reply, and whether the model ended it by itself. Raises
        NotJson, KeyError or ValueError."""

    def summary_answer(self, status: int, body: bytes) -> SummaryAnswer:
        """Read the reply to a summary call. Accepts any body; the answer has no text if the body
        cannot be read."""
        if refusals.is_overflow(status, body):
            return SummaryAnswer(status, too_long=True, window=refusals.window(body))
        if len(body) > ANSWER_BYTES:
            return SummaryAnswer(status)
        try:
            text, finished = self.answer_in(rawjson.members(Raw(body)))
        except (NotJson, KeyError, ValueError):
            return SummaryAnswer(status)
        said = reported(body) or Reported(0, 0, 0)
        return SummaryAnswer(
            status, text, said.prompt, said.completion, said.cached or 0, finished=finished
        )

    # -- refusals and errors --

    @staticmethod
    def forgiving(body: bytes, headers: RawHeaders) -> tuple[bytes, RawHeaders]:
        """Return the request so that upstream drops thinking that no longer fits what precedes it,
        if it can."""
        return body, headers

    @staticmethod
    def complaint(status: int, body: bytes) -> Complaint:
        """Return what this refusal of a request that we changed is about. Status 200 means that
        `body` is an error in the place of a reply, as in `Turn.refusal`."""
        return refusals.complaint(status, body)

    @staticmethod
    def error_body(fault: ProxyError) -> bytes:
        """Return the body of an error reply from the proxy itself: in the API's shape, which by
        default is OpenAI's."""
        return fault.body()

    def error_event(self, fault: ProxyError) -> bytes:
        """Return the event that ends a stream that is only relayed after a failure."""
        return self.turns.failure(fault, b"", 0)
