"""A request as we read it, and what is sent for it: in each round's body only those of the client's
members change that must."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import cache, cached_property
from typing import Any, ClassVar, TypeVar

import msgspec
from msgspec import Raw

from proxy import rawjson
from proxy.plan.turn import Reason, Request, Unplannable
from proxy.rawjson import NULL, Members, TooManyElements, elements_of, integer, object_of, text_of
from proxy.tools.definitions import NAMES, OTHER_NAMES, Names

T = TypeVar("T", bound=msgspec.Struct)


def decoded(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """Decode the known members of an event, without creating objects for what is Raw. Raises
    NotJson."""
    rawjson.check_utf8(body)
    found, masked = rawjson.decode(decoder, body)
    if not masked:
        return found
    values = msgspec.structs.astuple(found)
    return type(found)(
        *(rawjson.unmasked(value) if isinstance(value, Raw) else value for value in values)
    )


ALLOWED = "allowed_tools"
"""The type of a `tool_choice` with a list of tools."""

# -- parsing ---------------------------------------------------------------------------------------

MAX_MODEL = 1_000
"""The most bytes of the model's name. A request with more is forwarded unchanged, because caches
and patterns use the name at every request and for each message."""
MAX_OTHERS = 20_000
"""The most top-level members, and in a large body the most commas outside of the history and the
tools. A request with more is forwarded unchanged, because each comma may separate members, and each
member becomes an object. A large schema for the reply has a thousand commas."""

SEPARATORS = (b'"', b".", b":", b"/")
"""What can stand before a tool's own name."""
_ENDS = {
    name: [b'%b%b"' % (before, name.encode()) for before in SEPARATORS]
    for name in (*NAMES, *OTHER_NAMES)
}

FREE = ("", "auto", "any", "required", "validated", ALLOWED)
"""A `tool_choice`, or its type, with which the model may call our tools. With all others it may
call one tool of the client's, or no tool."""


class _Large(msgspec.Struct, frozen=True):
    """The top-level members that may be large, in any API."""

    messages: Raw = NULL
    input: Raw = NULL
    tools: Raw = NULL
    system: Raw = NULL
    instructions: Raw = NULL


_large = msgspec.json.Decoder(_Large)


def opened(body: bytes, size: int = 0) -> Members:
    """Return the top-level members of a body, or of one of this `size` of which a part is left out
    in a large member. Raises NotJson, and Unplannable if there is too much besides these."""
    rawjson.check_utf8(body)
    if max(len(body), size) > rawjson.UNCOUNTED:
        found, _ = rawjson.decode(_large, body)
        large = msgspec.structs.astuple(found)
        if len(body) - sum([len(memoryview(raw)) for raw in large]) > MAX_OTHERS:
            _check_others(rawjson.commas(body) - sum(map(rawjson.commas, large)))
    members = rawjson.members(body, checked=True)
    _check_others(len(members))
    return members


def _check_others(number: int) -> None:
    if number > MAX_OTHERS:
        said = f"more than {MAX_OTHERS} members or commas beside messages and tools"
        raise Unplannable(said, Reason.TOO_MANY_MEMBERS)


def model_of(members: Members) -> str:
    """Return the name of the model, empty if there is none. Raises Unplannable if it is too long,
    and NotJson."""
    model = members.get("model", NULL)
    check_model(model)
    return "" if rawjson.is_null(model) else rawjson.text(model)


def check_model(name: bytes | Raw) -> None:
    """Raises Unplannable if this is too long for a model's name, as a body or a path has it."""
    if len(memoryview(name)) > MAX_MODEL:
        raise Unplannable(f"the model's name has more than {MAX_MODEL} bytes")


@cache
def _glance(refers: tuple[str, ...]) -> msgspec.json.Decoder[Any]:
    """Return a decoder of what a body says at its top to whoever only passes it on."""
    fields = [("model", str, ""), ("stream", bool, False), *((one, Raw, NULL) for one in refers)]
    return msgspec.json.Decoder(msgspec.defstruct("Glance", fields, frozen=True))


GLANCE = 8
"""How many times as fast as reading a body it is to glance at it."""


def glanced(body: bytes, refers: tuple[str, ...]) -> Request | None:
    """Return a request of which only the model and the stream are read, as for one that nothing is
    done about. None if the body has one of the members `refers`, or has to be read in full to be
    understood."""
    try:
        found, _ = rawjson.decode(_glance(refers), body)
    except rawjson.NotJson:
        return None
    masked = "\x7f" in found.model
    referring = not all(rawjson.is_null(getattr(found, name)) for name in refers)
    if masked or len(found.model) > MAX_MODEL or referring:
        return None
    return Request(
        body=body,
        members={},
        entries=[],
        model=found.model,
        stream=found.stream,
        tools=NULL,
        reply_tokens=0,
        names=None,
        theirs=frozenset(),
        obstacle="",
    )


def forbids_ours(choice: Raw | None) -> bool:
    """Whether the model may not call our tools by this `tool_choice`."""
    return (text_of(choice) or text_of(object_of(choice).get("type"))) not in FREE


def bounded(raw: Raw, reason: Reason) -> list[Raw]:
    """Return an array's elements. Raises Unplannable with this reason if there are too many."""
    try:
        return rawjson.elements(raw)
    except TooManyElements as error:
        raise Unplannable(str(error), reason) from error


_ESCAPED = re.compile(rb"\\u00([2-7][0-9a-fA-F])")
"""ASCII as JSON may write it: `\\u0067rep` is a name of ours, too."""


def our_names(defined: bytes) -> tuple[Names | None, frozenset[str]]:
    """Return what our tools are called in this request, None if the client has all of our names;
    and those of our names that the client has for tools of its own, in any case. `defined` has all
    definitions.

    A name is taken if a string in the definitions is it, or ends with it after a separator: models
    write those before ours. What is no name does no harm.
    """
    if defined == b"null":
        return NAMES, frozenset()
    defined = _ESCAPED.sub(lambda found: bytes.fromhex(found[1].decode()), defined)
    taken = {name for name, forms in _ENDS.items() if any(form in defined for form in forms)}
    free = (names for names in (NAMES, OTHER_NAMES) if taken.isdisjoint(names))
    folded = defined.lower()
    return next(free, None), frozenset(name for name in NAMES if b'"%b"' % name.encode() in folded)


# -- the request of each round ---------------------------------------------------------------------

WITH_TOOLS = ("tools", "tool_choice", "parallel_tool_calls")
"""Members that upstreams refuse in a request without tools, `tools` itself if it is empty."""

LEAST_REPLY = 1_000
"""The fewest tokens to which a limit is lowered. A shorter reply is of no use; upstream's refusal
says more."""

ADDED_TOKEN_BYTES = 3
"""Bytes of JSON for each token of the entries that a later round adds; English text has four or
more."""

MADE = re.compile(rb'"[a-z]+_[0-9a-f]{16}_\d+"')
"""The id of a call that we gave it."""

THINKING = (
    ("thinking", "budget_tokens"),
    ("reasoning", "max_tokens"),
    ("thinking_budget",),
    ("extra_body", "google", "thinking_config", "thinking_budget"),
)
"""The paths of members that set a budget for thinking: Anthropic's, OpenRouter's, Qwen's and
Gemini's. Upstreams refuse a limit that is not above this budget."""


class RoundRequest(ABC):
    """What a turn sends: the request as the client wrote it, but for what is said here.

    `entries` are sent instead of the request's own, and `tools`, JSON objects with `name`,
    `description` and `parameters`, are ours. After `max_rounds` hidden rounds, calls of them are no
    longer answered. `usage` says whether to ask for the usage of a stream if the client does not.
    `left` are the tokens of the window that `entries` leave for the reply, whose limit is lowered
    to that; None if the window is not known.
    """

    limits: ClassVar[tuple[str, ...]]
    """Members that limit a reply. Each round has the client's limit, so hidden ones take nothing
    from its answer."""

    listed: ClassVar[str | None] = None
    """The member of a `tool_choice` that holds the list of allowed tools; empty if the choice
    itself does, and None where an API has no such choice."""

    forms: ClassVar[tuple[tuple[str, ...], ...]]
    """The paths of members that say in which form the text has to be."""

    updates: ClassVar[bytes] = b""
    """What an entry contains that changes members of the request from there on; empty if none
    can."""

    no_call: ClassVar[Raw] = Raw(b'"none"')
    """The `tool_choice` with which no tool is called."""

    needs_tools: ClassVar[bool] = False
    """Whether a history with calls is refused if no tools are defined."""

    client_tools: ClassVar[re.Pattern[str]] = re.compile("|function|custom")
    """The types of tools that the client runs."""
    tool_servers: ClassVar[str] = ""
    """The member with servers of tools that upstream calls."""
    schema: ClassVar[str] = "parameters"
    """The member of a tool that says what its arguments are."""

    def __init__(
        self,
        request: Request,
        entries: Sequence[bytes | Raw],
        tools: Sequence[bytes],
        max_rounds: int,
        usage: bool = True,
        left: int | None = None,
    ) -> None:
        self.members = request.members
        self._known = request.known
        self.client_body = request.body
        """The client's own body."""
        self.streams = request.stream
        self.names = request.names or ("", "")
        """What our tools are called."""
        self.theirs = request.theirs
        self.entries = entries
        self.tools = list(map(self.tool, tools))
        self.max_rounds = max_rounds
        self.usage = usage
        self._left = left

    @staticmethod
    @abstractmethod
    def tool(definition: bytes) -> bytes:
        """Return one of our tools in the form that this API expects."""

    @classmethod
    def all_strict(cls, tools: Raw) -> bool:
        """Whether each of these tools that has a schema is strict about it; others take free
        text."""
        if b'"strict"' not in bytes(tools):
            return False
        members = map(object_of, elements_of(tools))
        functions = [object_of(tool.get("function")) or tool for tool in members]
        checked = [one for one in functions if "strict" in one or cls.schema in one]
        return {bytes(one.get("strict", NULL)) for one in checked} == {b"true"}

    @classmethod
    def upstream_runs(cls, request: Request) -> bool:
        """Whether upstream itself runs some of the client's tools, as it does web searches."""
        kinds = (text_of(object_of(tool).get("type")) for tool in elements_of(request.tools))
        clients = all(cls.client_tools.fullmatch(kind) for kind in kinds)
        return not clients or cls.tool_servers in request.members

    @property
    def wants_json(self) -> bool:
        """Whether the text has to be JSON. Two JSON texts are not JSON."""
        told = [self.members]
        # a beginning has no such entries
        if self.updates and not self._known and self.updates in self.client_body:
            told += [
                object_of(Raw(entry)) for entry in self.entries if self.updates in bytes(entry)
            ]
        found = (
            [form for members in told if (form := _within(members, path))] for path in self.forms
        )
        return any(text_of(forms[-1].get("type")) not in ("", "text") for forms in found if forms)

    @cached_property
    def native(self) -> bool:
        """Whether upstream has called our tools before, as calls. Those that it wrote as text have
        ids of ours."""
        named = [
            b'"name":%b"%b"' % (space, name.encode())
            for name in self.names
            if name
            for space in (b"", b" ")
        ]
        raws = (bytes(entry) for entry in self.entries)
        return any(any(one in raw for one in named) and not MADE.search(raw) for raw in raws)

    @property
    def asks_usage(self) -> bool:
        """Whether the request asks for the usage of its stream although the client did not."""
        return False

    @staticmethod
    @abstractmethod
    def assembled(members: Members, entries: Sequence[bytes | Raw], /) -> Members:
        """Return the members that consist of these entries, in a request with these others."""

    def first(self) -> bytes:
        """The body of the first round."""
        return rawjson.encode(self._members(self.entries, self.tools))

    def later(self, entries: Sequence[bytes | Raw], *, last: bool, bare: bool = False) -> bytes:
        """Return the body of a later round.

        In the last round no call of our tools is answered, as the newest answer says. If there are
        no other tools, calls are forbidden. Ours are left out only if `bare`, because tools come
        first in a prompt: without them, the whole prompt is read anew.
        """
        others = bool(elements_of(self.members.get("tools")))
        members = self._members(entries, [] if bare and others else self.tools)
        if bare and not others and not self.needs_tools:  # some servers call what is forbidden
            members = {name: raw for name, raw in members.items() if name not in WITH_TOOLS}
        elif (last or bare) and not others:
            members["tool_choice"] = self.no_call
        return rawjson.encode(members)

    def _members(self, entries: Sequence[bytes | Raw], ours: Sequence[bytes]) -> Members:
        limits = lowered(self.members, self.limits, self._left, entries[len(self.entries) :])
        tools = with_tools(self.members.get("tools"), ours)
        defined = {} if tools is None else {"tools": tools}
        made = self.members | limits | self.assembled(self.members, entries)
        return made | defined | (self._allowed() if ours else {})

    def _allowed(self) -> Members:
        """Return the choice of tools with ours among those that the client allows, if it names
        some: without them, the model could not follow a reference."""
        choice = object_of(self.members.get("tool_choice"))
        if self.listed is None or text_of(choice.get("type")) != ALLOWED:
            return {}
        listing = object_of(choice.get(self.listed)) if self.listed else choice
        theirs = elements_of(listing.get("tools"))
        if not theirs:  # it allows no call at all
            return {}
        named = [
            {"function": {"name": name}} if self.listed else {"name": name} for name in self.names
        ]
        ours = [rawjson.encode({"type": "function", **one}) for one in named]
        listing = listing | {"tools": Raw(rawjson.array([*theirs, *ours]))}
        choice = choice | {self.listed: Raw(rawjson.encode(listing))} if self.listed else listing
        return {"tool_choice": Raw(rawjson.encode(choice))}


def with_tools(defined: Raw | None, ours: Sequence[bytes]) -> Raw | None:
    """Return the client's array of tools followed by ours, or None if there are no tools at all."""
    return Raw(rawjson.array([*elements_of(defined), *ours])) if ours else defined


# -- the limit for a reply -------------------------------------------------------------------------


def lowered(
    members: Members, limits: Iterable[str], left: int | None, added: Sequence[bytes | Raw] = ()
) -> Members:
    """Return those of the members `limits` that have to change, with lower numbers.

    `left` is how many tokens of the window were left for the reply to the client's own request;
    None if the window is not known. `added` are the entries that this round has besides.
    """
    if left is None:
        return {}
    room = max(left - sum(len(memoryview(raw)) for raw in added) // ADDED_TOKEN_BYTES, LEAST_REPLY)
    room = max(room, *(integer(_within(members, path).get(name)) + 1 for *path, name in THINKING))
    return {limit: Raw(b"%d" % room) for limit in limits if integer(members.get(limit)) > room}


def _within(members: Members, path: Iterable[str]) -> Members:
    """Return the members of the object at this path; none if there is no such object."""
    for key in path:
        members = object_of(members.get(key))
    return members
