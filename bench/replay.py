"""A recorded run turn by turn, as a strategy for small contexts would have sent it: run → calls to
the upstream.

Nothing is really sent. The proxy's strategy is its own plan; each summary is canned, `SUMMARY`
tokens long.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from hashlib import sha256

import msgspec

from bench.caches import Model, Prompt, Segment
from proxy.dialects.chat import CHAT
from proxy.plan.history import History, Terms
from proxy.plan.plan import Item, Message, Plan, Reading, Role, Room, SummaryBoundary, live
from proxy.plan.planner import Fold
from proxy.policy import Inject, Offload, Tools, Wait
from proxy.requests.planned import OUR_TOOLS_TOKENS
from proxy.tokens import Tokens
from tests.transcripts import Json, Run

SUMMARY = 800
"""Tokens of a snapshot in the context."""
SUMMARY_OUTPUT = 2 * SUMMARY
"""Tokens that the model writes for a snapshot: the task asks for a scratchpad first."""
TASK = 500
"""Tokens of the task at the end of a summary call."""
OUTPUT_PRICE = 5
"""An output token in input tokens: 5 at Anthropic's, 4 to 8 at OpenAI's price lists."""
READ_CALL = 60
"""Tokens of a call of `read_file`."""
SHRUNK = 50
"""Tokens of the line to which an answer shrinks once its turn is over."""
LIMITS = Tools()


class Kind(Enum):
    """The reason for a call to the upstream."""

    CLIENT = "the client asked"
    ROUND = "a round of the proxy's tools goes on"
    SUMMARY = "a snapshot is made"


class Call(msgspec.Struct, frozen=True):
    """One request to the upstream. `output`: tokens that the model writes besides the run's own
    reply."""

    prompt: Prompt
    output: int = 0
    kind: Kind = Kind.CLIENT


class Recorded(msgspec.Struct, frozen=True):
    """A run as the plan and the caches see it: messages, the content blocks of each, the tokens of
    its tools."""

    id: str
    source: str
    items: list[Item]
    blocks: list[int]
    tools: int
    messages: list[Json]
    points: list[int]
    """The number of messages in each request: the client asked before every assistant message."""
    kind: str = ""
    """What the agent was for, as `Run.kind`."""


Strategy = Callable[[Recorded], Iterable[Call]]
"""A strategy turns a run into its calls to the upstream, in order."""


def recorded(run: Run, tokens: Tokens) -> Recorded:
    """The run as the plan sees it. Raises Unplannable."""
    raws = [json.dumps(message, ensure_ascii=False).encode() for message in run.messages]
    terms = Terms("gpt-4o", Offload(), Room(), OUR_TOOLS_TOKENS)
    items = History(terms).extended([measured(raw, tokens) for raw in raws]).items
    blocks = [content_blocks(message) for message in run.messages]
    points = [index for index, item in enumerate(items) if index and item.role is Role.ASSISTANT]
    defined = tokens.count(json.dumps(run.tools), "gpt-4o") if run.tools else 0
    return Recorded(run.id, run.source, items, blocks, defined, run.messages, points, run.kind)


def measured(raw: bytes, tokens: Tokens) -> Message:
    """A message with its tokens, as the proxy counts them. Raises Unplannable."""
    return CHAT.read(raw, Reading.of(Offload()), lambda text: tokens.count(text, "gpt-4o"))


def content_blocks(message: Json) -> int:
    """The content blocks of a message as Anthropic counts them: each text and each tool call is
    one."""
    return max(bool(message.get("content")) + len(message.get("tool_calls") or ()), 1)


def plainly(run: Recorded) -> Iterator[Call]:
    """The strategy of sending everything, without a proxy."""
    for point in run.points:
        yield Call(prompt(run, whole(run, range(point))))


class Proxied(msgspec.Struct, frozen=True):
    """The proxy's strategy."""

    offload: Offload
    inject: Inject = Inject.AGENTS
    reading: float = 0.0
    """The chance that the model reads a moved result back, once; it reads one in a request."""

    def __call__(self, run: Recorded) -> Iterator[Call]:
        return _Replay(run, self).calls()


def cost(calls: Iterable[Call], model: Model) -> float:
    """The cost in input tokens, without the replies that the client asked for: every strategy pays
    for these."""
    cache = model.cold()
    return sum(cache.charge(call.prompt) + OUTPUT_PRICE * call.output for call in calls)


def whole(run: Recorded, indexes: Iterable[int]) -> Iterator[Segment]:
    """The segments of these messages as the client sent them."""
    for index in indexes:
        yield index, run.items[index].tokens, run.blocks[index]


def prompt(
    run: Recorded, messages: Iterable[Segment], *tools: Segment, moved: Sequence[int] = ()
) -> Prompt:
    """The prompt that goes upstream: the client's tools, then ours, then the messages.

    `moved`: the messages before and behind which the proxy sets its own breakpoints.
    """
    defined = [("tools", run.tools, 1), *tools]
    segments = [*defined, *messages]
    places = (
        [_mark(run, segments, index) for index in (min(moved), max(moved) + 1)] if moved else []
    )
    return Prompt(
        segments, head=len(defined), marks=[place for place in places if place is not None]
    )


def _mark(run: Recorded, segments: Sequence[Segment], end: int) -> int | None:
    """The place of the last message before `end` that can carry a breakpoint: no call, and no round
    of ours."""
    place = next(
        (at for at, (key, _, _) in enumerate(segments) if isinstance(key, tuple) and key[0] == end),
        0,
    )
    for at in range(place - 1, -1, -1):
        key = segments[at][0]
        index = key[0] if isinstance(key, tuple) else None
        if isinstance(index, int) and run.items[index].role is not Role.ASSISTANT:
            return at
    return None


class _Replay:
    """The proxy's calls for one run."""

    def __init__(self, run: Recorded, strategy: Proxied) -> None:
        self._run = run
        self._offload = strategy.offload
        self._at_once = strategy.inject is Inject.ALWAYS or (
            strategy.inject is Inject.AGENTS and run.tools > 0
        )
        self._reading = strategy.reading
        self._room = Room()
        # a snapshot that nobody waits for exists from the next request on
        self._late = int(strategy.offload.compress.wait is not Wait.ALWAYS)
        self._shown: SummaryBoundary | None = None
        self._made: tuple[int, SummaryBoundary] | None = (
            None  # the summary under way, and the request that will have it
        )
        self._rounds: dict[int, list[int]] = {}  # before which reply: tokens of what was read there
        self._read: set[int] = set()

    def calls(self) -> Iterator[Call]:
        state = Fold(self._offload, self._room, 0 if self._at_once else OUR_TOOLS_TOKENS)
        for number, point in enumerate(self._run.points):
            for item in self._run.items[self._run.points[number - 1] if number else 0 : point]:
                state.add(item)
            plan = state.plan()
            self._arrive(number)
            boundary = plan.boundaries[-1] if plan.boundaries else None
            if boundary and boundary != self._shown and not self._made:
                yield self._summary(plan, boundary)
                self._made = number + self._late, boundary
                self._arrive(number)
            yield from self._turn(plan.shown(self._shown), point)

    def _arrive(self, number: int) -> None:
        if self._made and self._made[0] <= number:
            self._shown = self._made[1]
            self._made = None

    def _turn(self, plan: Plan, point: int) -> Iterator[Call]:
        unread = next(
            (index for index in plan.moves if index not in self._read and self._is_read(index)),
            None,
        )
        if unread is None:
            yield Call(self._sent(plan, point))
            return
        self._read.add(unread)
        yield Call(self._sent(plan, point), READ_CALL)
        pages = list(_pages(self._run.items[unread].tokens))
        for shown in range(1, len(pages) + 1):
            self._rounds[point] = pages[:shown]
            asks_again = READ_CALL if shown < len(pages) else 0
            yield Call(self._sent(plan, point, self._round(plan, point)), asks_again, Kind.ROUND)

    def _is_read(self, index: int) -> bool:
        """Whether the model reads this result back: by lot, the same one for every strategy."""
        lot = sha256(f"{self._run.id} {index}".encode()).digest()
        return int.from_bytes(lot[:4]) < self._reading * 2**32

    def _summary(self, plan: Plan, boundary: SummaryBoundary) -> Call:
        """The call that makes a snapshot: the conversation as it was sent before the boundary's
        event, and the task."""
        before = plan.before(boundary.event)
        return Call(
            self._sent(before, boundary.end, [(("task", boundary.end), TASK, 1)]),
            SUMMARY_OUTPUT,
            Kind.SUMMARY,
        )

    def _sent(self, plan: Plan, end: int, after: Iterable[Segment] = ()) -> Prompt:
        """The messages before `end` as the upstream gets them, under the plan and the current
        snapshot."""
        ours = self._at_once or not plan.empty
        tools = [("our tools", OUR_TOOLS_TOKENS, 1)] if ours else []
        return prompt(self._run, [*self._messages(plan, end), *after], *tools, moved=_moved(plan))

    def _messages(self, plan: Plan, end: int) -> Iterator[Segment]:
        boundary = self._shown
        items = self._run.items
        snapshot: list[Segment] = [(("snapshot", boundary.end), SUMMARY, 0)] if boundary else []
        if items[0].role is not Role.SYSTEM:
            yield from snapshot
        for index in range(end):
            if (
                boundary
                and index < boundary.end
                and items[index].role is not Role.SYSTEM
                and index not in boundary.pins
            ):
                continue
            yield from self._round(plan, index)
            move = plan.moves.get(index)
            yield (
                (index, move and bool(move.event)),
                live(items[index], move),
                self._run.blocks[index],
            )
            if index == 0 and items[0].role is Role.SYSTEM:
                yield from snapshot

    def _round(self, plan: Plan, index: int) -> Iterator[Segment]:
        """The answers that the model read before that reply; of large ones only a line once they
        were used."""
        for page, tokens in enumerate(self._rounds.get(index, ())):
            large = tokens > self._offload.max_tool_message_tokens
            size = READ_CALL + (SHRUNK if large and index < plan.used else tokens)
            yield ("read", index, page, size), size, 2


def _moved(plan: Plan) -> list[int]:
    """The messages that the newest event moved; none where it has a snapshot, which precedes
    them."""
    event = len(plan.events)
    if not event or (plan.boundaries and plan.boundaries[-1].event == event):
        return []
    return [index for index, move in plan.moves.items() if move.event == event]


def _pages(tokens: int) -> Iterator[int]:
    """The sizes in tokens of the pages in which `read_file` returns a result."""
    left = min(tokens, LIMITS.max_retrieved_tokens)
    while left > 0:
        yield min(left, LIMITS.max_answer_tokens)
        left -= LIMITS.max_answer_tokens
