"""A chat request made ready: read, planned, its records fetched, and rendered. Pure parts are in `core`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import msgspec
from msgspec import Raw

from proxy.core import rawjson, summary
from proxy.core.history import History, Reading, Terms, Transcript, moved_pieces
from proxy.core.plan import Plan, Role, Room, SummaryBoundary, live
from proxy.core.policy import Inject, Mode, Policy
from proxy.core.retrieval import tools
from proxy.dialects.chat import render
from proxy.dialects.chat.files import Files, moved_files, piece_loader
from proxy.dialects.chat.messages import cache_breakpoint, compacted, with_cache_breakpoint
from proxy.dialects.chat.render import ActiveSnapshot, HiddenRound
from proxy.dialects.chat.request import ChatRequest, function_tool, has_tools, with_tools
from proxy.dialects.chat.turn import LIMITS

if TYPE_CHECKING:
    from proxy.requests.message_cache import MessageCache

OUR_TOOLS_TOKENS = 400
"""Our two definitions, about; set aside whenever we may have to send them."""
IDENTITY = ("user", "safety_identifier")
SUMMARY_MEMBERS = (*IDENTITY, "prompt_cache_key", "cache_control", "service_tier", "reasoning_effort")
"""What a summary call takes over of the request that it is made for: who asks, how it is cached, how it thinks. Another
model may know none of it but who asks."""


class PlannedRequest(msgspec.Struct, frozen=True):
    """A request's history with the plan for it. `policy` is the one for the request's model."""

    request: ChatRequest
    policy: Policy
    transcript: Transcript
    past: History
    plan: Plan
    room: Room
    names: tuple[str, str]

    @property
    def reading(self) -> Reading:
        return Reading.of(self.policy.offload)

    @property
    def concerns_us(self) -> bool:
        """Whether anything may have to be changed."""
        return self.policy.tools.inject is Inject.ALWAYS or not self.plan.empty

    @property
    def tokens(self) -> int:
        """The messages as the client sent them."""
        return self.past.tokens

    @property
    def chain(self) -> list[bytes]:
        """Entry *i* identifies what the first *i* messages mean."""
        return self.past.links

    def reply_links(self) -> dict[int, bytes]:
        """Where a reply may have hidden rounds from the client: its index → the digest of the history that it ends."""
        first = 0 if self.policy.tools.inject is Inject.ALWAYS else self.plan.first
        roles = [message.role for message in self.transcript.messages]
        return {index: self.chain[index + 1] for index in range(first, len(roles)) if roles[index] is Role.ASSISTANT}

    def snapshot_name(self, boundary: SummaryBoundary) -> str:
        """The record's name: what the cut's history means, and what else decided the words of a summary."""
        variant = hashlib.sha256(f"{summary.PROMPT_VERSION}\n{self.summary_model}".encode()).hexdigest()[:8]
        return f"{self.chain[boundary.end].hex()}-{variant}"

    def originals_path(self, boundary: SummaryBoundary) -> str:
        return f"{self.policy.offload.store_dir}/{summary.file_name(self.chain[boundary.end])}"

    @property
    def summary_model(self) -> str:
        return self.policy.offload.compress.model or self.request.model

    @property
    def summary_limit(self) -> int:
        """Most tokens that a summary's reply may have."""
        return self.policy.offload.compress.snapshot_tokens + summary.SCRATCHPAD_TOKENS

    @property
    def conversation(self) -> str:
        """What identifies where this history began: everything up to its first user message."""
        roles = [message.role for message in self.transcript.messages]
        first = roles.index(Role.USER) + 1 if Role.USER in roles else 0
        return self.chain[first].hex()


async def plan(
    asked: ChatRequest, policy: Policy, window: int | None, reader: MessageCache, caller: str = ""
) -> PlannedRequest | None:
    """Read and plan. None: nothing may be changed in this request. Raises Unplannable."""
    names = asked.our_names()
    if policy.offload.mode is Mode.OFF or names is None or asked.obstacle():
        return None
    defined = await reader.tool_tokens(asked.known.tools, asked.model, caller)
    room = Room(window, defined + asked.reply_tokens + OUR_TOOLS_TOKENS)
    tool_definition_tokens = OUR_TOOLS_TOKENS if policy.tools.inject is Inject.WHEN_OFFLOADING else 0
    past = await reader.past(asked.messages, Terms(asked.model, policy.offload, room, tool_definition_tokens), caller)
    return PlannedRequest(asked, policy, past.transcript(asked.messages), past, past.plan(), room, names)


class RenderedRequest(msgspec.Struct, frozen=True):
    """A request ready to be sent: a value, from which the turn is made. `plan` is what it shows of the history's."""

    history: PlannedRequest
    plan: Plan
    shown: ActiveSnapshot | None
    rounds: Mapping[int, HiddenRound]
    messages: list[bytes | Raw]
    tokens: int
    """Of the messages as sent."""

    @property
    def changed(self) -> bool:
        """Whether anything differs from what the client sent."""
        return self.injecting or not self.plan.empty or bool(self.rounds)

    @property
    def injecting(self) -> bool:
        """Whether our tools go along. Decisions are final, so that once they do they always will.

        An event that was shown while the request was too large may be waiting again: its calls of our tools are there.
        """
        inject = self.history.policy.tools.inject
        offloading = not self.plan.empty or bool(self.rounds)
        return inject is Inject.ALWAYS or (inject is Inject.WHEN_OFFLOADING and offloading)

    @property
    def moves_name(self) -> str:
        """What stands for all texts that are moved: the history up to the last of them, and which they are."""
        moves = self.plan.moves
        return f"{self.history.chain[max(moves, default=-1) + 1].hex()}-{len(self.plan.events)}-{hash(tuple(moves)):x}"

    def files(self) -> Files:
        """Those of an event that waits as well: it may have been shown before."""
        history = self.history
        boundary = self.shown.boundary if self.shown else None
        store_dir = history.policy.offload.store_dir
        return moved_files(history.transcript, history.plan, store_dir, boundary, history.chain)

    def definitions(self) -> list[bytes]:
        return definitions(self.history) if self.injecting else []

    def compressed(self) -> int:
        return len(render.taken(self.history.transcript, self.shown.boundary)) if self.shown else 0

    def compacted(self) -> int:
        start = self.shown.boundary.end if self.shown else 0
        return sum(index >= start for index in self.plan.moves)


def rendered(
    history: PlannedRequest,
    shown: ActiveSnapshot | None,
    rounds: Mapping[int, HiddenRound],
    reader: MessageCache,
    plan: Plan | None = None,
) -> RenderedRequest:
    """Render the plan with the records that exist. `plan`: where it is not to be what these alone let it show."""
    plan = plan or history.plan.shown(shown.boundary if shown else None)
    role = history.policy.offload.compress.snapshot_role
    messages = render.render(
        history.transcript, plan, _compactor(history, reader), shown=shown, role=role, rounds=rounds
    )
    return RenderedRequest(history, plan, shown, rounds, messages, _size(history, plan, shown, rounds, reader))


def riding(
    history: PlannedRequest,
    boundary: SummaryBoundary,
    shown: ActiveSnapshot | None,
    rounds: Mapping[int, HiddenRound],
    left: int,
) -> Callable[[bytes], bytes]:
    """The body of a summary call on the prefix that upstream has cached, which leaves `left` tokens for the reply.

    That is the conversation up to the cut as it was sent before the cut's event, byte for byte; the task stands behind.
    A cache that looks only where it is told to is told at the task, for the client's own words stand behind the cut.
    For any thread: it leaves the reader's caches alone.
    """
    transcript, shape = history.transcript, history.reading.shape

    def shrunk(index: int, first_preview: bool) -> bytes:
        return compacted(transcript.raws[index], transcript.messages[index], shape, first_preview)

    before = history.plan.before(boundary.event)
    role = history.policy.offload.compress.snapshot_role
    messages = render.render(transcript, before, shrunk, shown=shown, role=role, rounds=rounds, end=boundary.end)
    offered = not before.empty or history.policy.tools.inject is Inject.ALWAYS
    defined = with_tools(history.request.members.get("tools"), definitions(history) if offered else [])
    without_calls = {"tools": defined, "tool_choice": Raw(b'"none"')} if defined and has_tools(defined) else {}
    members = summary_members(history, left) | without_calls
    marks = [mark for raw in transcript.raws[boundary.end :] if (mark := cache_breakpoint(raw))]

    def body(task: bytes) -> bytes:
        last = with_cache_breakpoint(task, marks[-1]) if marks else task
        return rawjson.encode(members | {"messages": Raw(rawjson.array([*messages, last]))})

    return body


def summary_members(history: PlannedRequest, left: int | None = None) -> dict[str, Raw]:
    """What a summary call has besides messages and tools; its reply may take `left` tokens. Never `store`."""
    members = history.request.members
    own = history.summary_model == history.request.model
    kept = {name: members[name] for name in (SUMMARY_MEMBERS if own else IDENTITY) if name in members}
    most = history.summary_limit if left is None else min(history.summary_limit, left)
    limits = [name for name in LIMITS if own and name in members]
    return {"model": Raw(rawjson.encode(history.summary_model)), **kept, **dict.fromkeys(limits, Raw(b"%d" % most))}


def definitions(history: PlannedRequest) -> list[bytes]:
    """Our tools as they stand behind the client's."""
    return [function_tool(raw) for raw in tools.definitions(history.names, history.policy.offload.store_dir)]


def originals(ready: RenderedRequest) -> dict[str, Callable[[], str]]:
    """Every moved text by its file's name, for the store."""
    transcript = ready.history.transcript
    return {
        piece.name: piece_loader(transcript, index, piece.part)
        for index, move in ready.plan.moves.items()
        for piece in moved_pieces(transcript.messages[index], move.event == 0)
    }


def _compactor(history: PlannedRequest, reader: MessageCache) -> render.Compacted:
    return reader.compactor(history.transcript, history.reading.shape)


def _size(
    history: PlannedRequest,
    plan: Plan,
    shown: ActiveSnapshot | None,
    rounds: Mapping[int, HiddenRound],
    reader: MessageCache,
) -> int:
    """The messages as sent, in tokens."""
    start = shown.boundary.end if shown else 0
    total = sum(hidden.tokens for index, hidden in rounds.items() if index >= start)
    if shown:
        total += reader.count(render.shown_block(history.transcript, shown), history.request.model)
    for index, item in enumerate(history.past.items):
        if shown and index < shown.boundary.end and not render.stays(history.transcript, shown.boundary, index):
            continue
        total += live(item, plan.moves.get(index))
    return total
