"""Adds up what one policy would have done to recorded requests."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from proxy.cli.recordings import RecordedRequest
from proxy.plan.forecast import by_kind, event_at, told
from proxy.plan.plan import Role
from proxy.plan.prices import price_of
from proxy.plan.turn import Reason, Unplannable
from proxy.policy import Mode, Policy
from proxy.requests.cache import MessageCache
from proxy.requests.outcome import foreseen
from proxy.requests.planned import OUR_TOOLS_TOKENS, Planned, plan

COURSES = 2_000
"""Sessions of which the points are kept."""

WORDS = 100
"""Requests of a session of which the report says in words what the plan does."""


class SessionKey(NamedTuple):
    """What all requests of a session share."""

    api: str
    model: str
    beginning: bytes
    """Identifies the messages up to the user's first."""
    caller: str
    """Who asked, if that is known."""


class Point(NamedTuple):
    """One request: its tokens as it came, those of each kind as planned, and its cost both ways."""

    came: int
    kinds: tuple[int, ...]
    before: int
    after: int


KINDS = ("system", "tools", "user", "assistant", "results", "previews", "snapshot")
"""The kinds of what is sent, as the dashboard names them. Assistant messages are with what only upstream can read."""

_OF_ROLE = {Role.SYSTEM: 0, Role.USER: 2, Role.ASSISTANT: 3, Role.TOOL: 4, Role.SEALED: 3}


@dataclass
class Course:
    """One session under one policy."""

    requests: int = 0
    before: int = 0
    """The sum of its requests' costs as they came."""
    after: int = 0
    """The same as planned."""
    events: list[int] = field(default_factory=list)
    """The requests, counted from 0, at which events happen."""
    told: list[tuple[int, str]] = field(default_factory=list)
    """What the plan does at requests, and why, in words: up to `WORDS` of them."""
    points: list[Point] | None = None


@dataclass
class Tally:
    """What one policy would have done. Sums are over the requests that it plans."""

    name: str
    policy: Policy
    detailed: bool = False
    """Whether to keep the points of charts."""
    planned: int = 0
    billed: int = 0
    """Planned requests whose cost rests on upstream's numbers."""
    changed: int = 0
    """Planned requests that would have differed from what was sent."""
    events: int = 0
    causes: Counter[str] = field(default_factory=Counter)
    """The events by their cause."""
    tokens_before: int = 0
    tokens_after: int = 0
    cost_before: int = 0
    cost_after: int = 0
    priced: int = 0
    """Planned requests whose model's price for input is known; the next two are over these."""
    money_before: float = 0.0
    """USD."""
    money_after: float = 0.0
    sources: Counter[str] = field(default_factory=Counter)
    """What the records of all requests are."""
    expanded: int = 0
    """Requests that are turns of conversations that were recorded as a whole."""
    unplanned: Counter[str] = field(default_factory=Counter)
    sessions: dict[SessionKey, Course] = field(default_factory=dict)
    total: list[tuple[int, int]] = field(default_factory=list)
    """The sums of costs after each planned request, as they came and as planned."""

    async def add(self, recorded: RecordedRequest, reader: MessageCache) -> None:
        """Plan one request and count what comes of it."""
        self.sources[recorded.source] += 1
        self.expanded += recorded.expanded
        planned, reason = await self._plan(recorded, reader)
        if planned is None:
            self.unplanned[reason] += 1
            return
        said = recorded.said
        billed = said is not None and said.cached is not None
        seen, event = foreseen(planned, said), event_at(planned.plan)
        self.planned += 1
        self.billed += billed
        self.changed += bool(seen.compacted or seen.compressed)
        self.events += event is not None
        self.causes += Counter([event.cause.name.lower()] if event else [])
        self.tokens_before += planned.whole(planned.tokens)
        self.tokens_after += planned.whole(seen.tokens, ours=seen.ours)
        self.cost_before += seen.before
        self.cost_after += seen.after
        price = planned.policy.offload.input_price or price_of("", planned.request.model).input_price
        if price is not None:
            self.priced += 1
            self.money_before += seen.before * price / 1e6
            self.money_after += seen.after * price / 1e6
        if self.detailed:
            self.total.append((self.cost_before, self.cost_after))
        course = self._course(planned, recorded.caller)
        if event:
            course.events.append(course.requests)
        if course.points is not None and len(course.told) < WORDS:
            words = told(planned.history.items, planned.plan, planned.policy.offload, planned.room.window)
            if course.told and course.told[-1][1].startswith("waiting: "):
                course.told.pop()  # of what it waits for, only the last is of interest
            course.told.append((course.requests, words))
        course.requests += 1
        course.before += seen.before
        course.after += seen.after
        if course.points is not None:
            course.points.append(Point(*_kinds(planned), seen.before, seen.after))

    async def _plan(self, recorded: RecordedRequest, reader: MessageCache) -> tuple[Planned | None, str]:
        """Return the plan, or why there is none."""
        dialect, chat = recorded.dialect, recorded.chat
        if dialect is None or chat is None:
            return None, recorded.reason or "other API"
        policy = self.policy.for_api(dialect.name).for_model(chat.model).planning
        if policy.offload.mode is Mode.OFF:
            return None, Reason.OFF
        try:
            planned = await plan(dialect, chat, policy, policy.upstream.context_window, reader)
        except Unplannable as error:
            return None, error.reason
        return planned, f"{Reason.FIELD} {chat.obstacle}"

    def _course(self, planned: Planned, caller: str) -> Course:
        session = _session(planned, caller)
        course = self.sessions.get(session)
        if course is None:
            course = self.sessions[session] = Course()
            if self.detailed and len(self.sessions) <= COURSES:
                course.points = []
        return course

    @property
    def losses(self) -> int:
        """Sessions that would have cost more."""
        return sum(course.after > course.before for course in self.sessions.values())

    @property
    def worst(self) -> float | None:
        """The cost of the session that fares worst, as a share of its cost as it came."""
        return max((course.after / course.before for course in self.sessions.values() if course.before), default=None)

    def figures(self) -> dict[str, object]:
        """Return everything as JSON has it."""
        figures: dict[str, object] = {name: getattr(self, name) for name in _FIGURES}
        figures |= {"sessions": len(self.sessions), "sessions_costing_more": self.losses, "worst_session": self.worst}
        return figures | {name: dict(getattr(self, name)) for name in ("causes", "sources", "unplanned")}


_FIGURES = (
    *("planned", "billed", "changed", "events", "tokens_before", "tokens_after", "cost_before", "cost_after"),
    *("priced", "money_before", "money_after", "expanded"),
)


def _kinds(planned: Planned) -> tuple[int, tuple[int, ...]]:
    """Return the request's tokens as it came, and those of each kind as planned."""
    kinds, room = [0] * len(KINDS), planned.room
    sent = by_kind(planned.history.items, planned.plan, planned.policy, OUR_TOOLS_TOKENS)
    definitions = planned.prompt(0) - OUR_TOOLS_TOKENS - room.preamble
    for role, tokens in sent.whole.items():
        kinds[_OF_ROLE[role]] += tokens
    kinds[0] += room.preamble
    kinds[1] = definitions + sent.tools
    kinds[5], kinds[6] = sent.previews, sent.snapshot
    return planned.tokens + room.preamble + definitions, tuple(kinds)


def _session(planned: Planned, caller: str) -> SessionKey:
    """Return the session: its API, its model, what it begins with, up to the user's first message, and its caller."""
    roles = [item.role for item in planned.history.items]
    asked = roles.index(Role.USER) + 1 if Role.USER in roles else min(1, len(roles))
    return SessionKey(planned.dialect.name, planned.request.model, planned.chain[asked], caller)
