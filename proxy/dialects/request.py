"""What is sent for a request: the body of each round, in which only those of the client's members change that must, and
the bodies of summary calls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar, TypeVar

import msgspec
from msgspec import Raw

from proxy import rawjson
from proxy.dialects import refusals
from proxy.dialects.entries import last_in, marked_content
from proxy.dialects.usage import Reported, reported
from proxy.plan.summary import SummaryAnswer
from proxy.plan.turn import Request
from proxy.rawjson import Members, NotJson, elements_of, object_of, string, text_of, whole

T = TypeVar("T", bound=msgspec.Struct)


def decoded(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """Decode the known members of an event, without creating objects for what is Raw. Raises NotJson."""
    rawjson.check_utf8(body)
    found, masked = rawjson.decode(decoder, body)
    if not masked:
        return found
    values = msgspec.structs.astuple(found)
    return type(found)(*(rawjson.unmasked(value) if isinstance(value, Raw) else value for value in values))


# -- the request of each round -----------------------------------------------------------------------------------------

WITH_TOOLS = ("tools", "tool_choice", "parallel_tool_calls")
"""Members that upstreams refuse in a request without tools, `tools` itself if it is empty."""
ALLOWED = "allowed_tools"
"""The type of a `tool_choice` with a list of tools."""

LEAST_REPLY = 1_000
"""The fewest tokens to which a limit is lowered. A shorter reply is of no use; upstream's refusal says more."""

ENTRY_BYTES = 3
"""Bytes of JSON for each token of the entries that a later round adds; English text has four or more."""

THINKING = (
    ("thinking", "budget_tokens"),
    ("reasoning", "max_tokens"),
    ("thinking_budget",),
    ("extra_body", "google", "thinking_config", "thinking_budget"),
)
"""The paths of members that set a budget for thinking: Anthropic's, OpenRouter's, Qwen's and Gemini's. Upstreams refuse
a limit that is not above this budget."""


class RoundRequest(ABC):
    """The input of a turn.

    `entries` are sent instead of the request's own, and `tools` are ours. `usage` says whether to ask for the usage of
    a stream if the client does not. `left` are the tokens of the window that `entries` leave for the reply; None if
    the window is not known.
    """

    limits: ClassVar[tuple[str, ...]]
    """Members that limit a reply. Each round has the client's limit, so hidden ones take nothing from its answer."""

    listed: ClassVar[str | None] = None
    """The member of a `tool_choice` that holds the list of allowed tools; empty if the choice itself does, and None
    where an API has no such choice."""

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
        self.own = request.body
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

    @property
    @abstractmethod
    def wants_json(self) -> bool:
        """Whether the text has to be JSON. Two JSON texts are not JSON."""

    @property
    def asks_usage(self) -> bool:
        """Whether the request asks for the usage of its stream although the client did not."""
        return False

    @abstractmethod
    def _assembled(self, entries: Sequence[bytes | Raw]) -> Members:
        """Return the members that consist of these entries."""

    def first(self) -> bytes:
        """The body of the first round."""
        return rawjson.encode(self._members(self.entries, self.tools))

    def later(self, entries: Sequence[bytes | Raw], *, last: bool, bare: bool = False) -> bytes:
        """Return the body of a later round.

        In the last round no call of our tools is answered, as the newest answer says. If there are no other tools,
        calls are forbidden. Ours are left out only if `bare`, because tools come first in a prompt: without them, the
        whole prompt is read anew.
        """
        others = has_tools(self.members.get("tools"))
        members = self._members(entries, [] if bare and others else self.tools)
        if (last or bare) and not others:
            members = self._without_calls(members, bare=bare)
        return rawjson.encode(members)

    def _members(self, entries: Sequence[bytes | Raw], ours: Sequence[bytes]) -> Members:
        limits = lowered(self.members, self.limits, self._left, entries[len(self.entries) :])
        tools = with_tools(self.members.get("tools"), ours)
        defined = {} if tools is None else {"tools": tools}
        return self.members | limits | self._assembled(entries) | defined | (self._allowed() if ours else {})

    def _allowed(self) -> Members:
        """Return the choice of tools with ours among those that the client allows, if it names some: without them, the
        model could not follow a reference."""
        choice = object_of(self.members.get("tool_choice"))
        if self.listed is None or text_of(choice.get("type")) != ALLOWED:
            return {}
        listing = object_of(choice.get(self.listed)) if self.listed else choice
        theirs = elements_of(listing.get("tools"))
        if not theirs:  # it allows no call at all
            return {}
        named = [{"function": {"name": name}} if self.listed else {"name": name} for name in self.names]
        ours = [rawjson.encode({"type": "function", **one}) for one in named]
        listing = listing | {"tools": Raw(rawjson.array([*theirs, *ours]))}
        choice = choice | {self.listed: Raw(rawjson.encode(listing))} if self.listed else listing
        return {"tool_choice": Raw(rawjson.encode(choice))}

    def _without_calls(self, members: Members, *, bare: bool) -> Members:
        """Return the members of a request with no tools but ours so that none is called.

        If `bare`, the tools are left out, because some servers call what is forbidden.
        """
        return _without(members, WITH_TOOLS) if bare else members | {"tool_choice": Raw(b'"none"')}


def _without(members: Members, names: Sequence[str]) -> Members:
    return {name: raw for name, raw in members.items() if name not in names}


# -- the limit for a reply --------------------------------------------------------------------------------------------


def lowered(members: Members, limits: Iterable[str], left: int | None, added: Sequence[bytes | Raw] = ()) -> Members:
    """Return those of the members `limits` that have to change, with lower numbers.

    `left` is how many tokens of the window were left for the reply to the client's own request; None if the window is
    not known. `added` are the entries that this round has besides.
    """
    if left is None:
        return {}
    left -= sum(len(memoryview(raw)) for raw in added) // ENTRY_BYTES
    room = max(left, LEAST_REPLY, *(_number(members, path) + 1 for path in THINKING))
    return {limit: Raw(b"%d" % room) for limit in limits if whole(members.get(limit)) > room}


def _number(members: Members, path: Sequence[str]) -> int:
    for key in path[:-1]:
        members = object_of(members.get(key))
    return whole(members.get(path[-1]))


# -- arrays of tools, which every API has -----------------------------------------------------------------------------


def with_tools(defined: Raw | None, ours: Sequence[bytes]) -> Raw | None:
    """Return the client's array of tools followed by ours, or None if there are no tools at all."""
    return Raw(rawjson.array([*elements_of(defined), *ours])) if ours else defined


def has_tools(defined: Raw | None) -> bool:
    """Whether an array of tools has any. Upstream refuses a `tool_choice` without tools."""
    return bool(elements_of(defined))


# -- summary calls -----------------------------------------------------------------------------------------------------

ANSWER_BYTES = 4 << 20
"""The most bytes of a reply that are parsed. A record takes a few thousand, and parsing more would block the event loop
for more than 10 ms."""


def summary_members(model: str, request: Request | None, who: Sequence[str], how: Sequence[str]) -> Members:
    """Return the model and what a call copies from its request: `who` asks and, if the model is the request's own,
    `how` to cache and to reason. Another model may not know those members. Where the request's path names the model,
    the body does not."""
    if request is None:
        return {"model": string(model)}
    names = (*who, *how) if model == request.model else who
    copied = {name: request.members[name] for name in names if name in request.members}
    return {"model": string(model)} | copied if "model" in request.members else copied


def uncalled(request: Request, ours: Sequence[bytes], choice: bytes) -> Members:
    """Return the tools of the request and `ours`, as upstream has cached them, and the `choice` of none; or nothing."""
    defined = with_tools(request.members.get("tools"), ours)
    return {"tools": defined, "tool_choice": Raw(choice)} if defined is not None and has_tools(defined) else {}


def summary_task(text: str, request: Request, end: int) -> bytes:
    """Return the task as a user message. Some caches store a prefix only up to a breakpoint that the client sets. If
    the client set one after entry `end`, the task gets the same, since the client's own is not part of the call."""
    marks = [mark for raw in request.entries[end:] if (mark := last_in(raw))]
    content = marked_content(string(text), marks[-1]) if marks else None
    return rawjson.encode({"role": "user", "content": content or string(text)})


def read_summary(status: int, body: bytes, read: Callable[[Members], tuple[str, bool]]) -> SummaryAnswer:
    """Read the reply to a call. The answer has no text if the body cannot be read. `read` returns the text of a reply,
    and whether the model ended it by itself."""
    if refusals.is_overflow(status, body):
        return SummaryAnswer(status, too_long=True, window=refusals.window(body))
    if len(body) > ANSWER_BYTES:
        return SummaryAnswer(status)
    try:
        text, finished = read(rawjson.members(Raw(body)))
    except (NotJson, KeyError, ValueError):
        return SummaryAnswer(status)
    said = reported(body) or Reported(0, 0, 0)
    return SummaryAnswer(status, text, said.prompt, said.completion, said.cached or 0, finished=finished)
