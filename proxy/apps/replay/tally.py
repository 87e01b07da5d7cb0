"""Adds up what one policy would have done to recorded requests."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from proxy.apps.replay.formats import SESSIONS
from proxy.apps.replay.recordings import RecordedRequest
from proxy.plan.forecast import described, event_at, waiting
from proxy.plan.plan import Role
from proxy.plan.prices import DEARER, price_of
from proxy.plan.turn import Reason, Unplannable
from proxy.policy import Mode, Policy
from proxy.requests.cache import MessageCache
from proxy.requests.observing import foreseen
from proxy.requests.planned import OUR_TOOLS_TOKENS, Planned, plan

WORDS = 100
"""Sentences about a session that the report has at most."""


class SessionKey(NamedTuple):
    """What tells sessions apart."""

    api: str
    model: str
    beginning: bytes
    """Identifies the messages up to the user's first."""
    caller: str
    """Who asked, if that is known."""

    @classmethod
    def of(cls, planned: Planned, caller: str) -> SessionKey:
        roles = [item.role for item in planned.history.items]
        asked = roles.index(Role.USER) + 1 if Role.USER in roles else min(1, len(roles))
        return cls(planned.dialect.name, planned.request.model, planned.chain[asked], caller)


class Charge(NamedTuple):
    """What one request costs, as it came and as planned, in plain input tokens, and its time."""

    time: float
    """In seconds since the epoch; 0: not known."""
    before: int
    after: int
    price: float | None
    """USD for a million of these tokens."""


@dataclass(kw_only=True)
class Sums:
    """Sums over planned requests. Costs are of the input, in plain input tokens."""

    planned: int = 0
    events: int = 0
    tokens_before: int = 0
    tokens_after: int = 0
    cost_before: int = 0
    cost_after: int = 0
    priced: int = 0
    """Planned requests whose model's price for input is known; the next two are over these."""
    money_before: float = 0.0
    """USD."""
    money_after: float = 0.0
    largest_before: int = 0
    """The tokens of the largest prompt."""
    largest_after: int = 0

    def count(self, before: int, after: int, spent: Charge, *, event: bool) -> None:
        """Count a request that has so many tokens as it came and as planned."""
        self.planned += 1
        self.events += event
        self.tokens_before += before
        self.tokens_after += after
        self.largest_before = max(self.largest_before, before)
        self.largest_after = max(self.largest_after, after)
        self.cost_before += spent.before
        self.cost_after += spent.after
        if spent.price is not None:
            self.priced += 1
            self.money_before += spent.before * spent.price / 1e6
            self.money_after += spent.after * spent.price / 1e6


@dataclass(kw_only=True)
class Course(Sums):
    """One session under one policy."""

    file: str = ""
    """The base name of the file that has its first request."""
    began: float = 0.0
    """The time of that, in seconds since the epoch; 0: not known."""
    unseen: int = 0
    """Tokens of instructions and tools that its file does not hold, by what upstream counted of its
    first request."""
    decisions: list[tuple[int, str]] = field(default_factory=list)
    """What the plan does at requests, counted from 0, and why."""

    @property
    def dearer(self) -> bool:
        return self.cost_after > self.cost_before * DEARER


@dataclass
class Tally(Sums):
    """What one policy would have done. Sums are over the requests that it plans."""

    name: str
    policy: Policy
    detailed: bool = False
    """Whether to keep what only the report shows: `spent`, and what is told of sessions."""
    billed: int = 0
    """Planned requests whose cost rests on upstream's numbers."""
    changed: int = 0
    """Planned requests that would have differed from what was sent."""
    causes: Counter[str] = field(default_factory=Counter)
    sources: Counter[str] = field(default_factory=Counter)
    """What the records of all requests are."""
    expanded: int = 0
    """Requests that are turns of conversations that were recorded as a whole."""
    unplanned: Counter[str] = field(default_factory=Counter)
    quiet: tuple[int, str] = (0, "")
    """The tokens of the largest request that stays as it came, and what its plan waits for."""
    sessions: dict[SessionKey, Course] = field(default_factory=dict)
    spent: list[Charge] = field(default_factory=list)
    """What each planned request costs."""

    async def add(self, recorded: RecordedRequest, reader: MessageCache) -> None:
        self.sources[recorded.source] += 1
        self.expanded += recorded.expanded
        planned, reason = await planned_by(self.policy, recorded, reader)
        if planned is None:
            self.unplanned[reason] += 1
            return
        key = SessionKey.of(planned, recorded.caller)
        course = self.sessions.setdefault(key, Course(file=recorded.file, began=recorded.time))
        if not course.planned and recorded.reported is not None and recorded.source in SESSIONS:
            course.unseen = max(recorded.reported.prompt - planned.tokens_before, 0)
        seen = foreseen(planned, recorded.reported, course.unseen)
        event = event_at(planned.plan)
        self.billed += recorded.reported is not None and recorded.reported.cached is not None
        self.changed += bool(seen.compacted or seen.compressed)
        if planned.plan.empty and planned.history.tokens > self.quiet[0]:
            self.quiet = planned.history.tokens, waiting(planned.plan, planned.policy.offload)
        before = course.unseen + planned.tokens_before
        ours = OUR_TOOLS_TOKENS if seen.ours else 0
        after = course.unseen + planned.before_history + seen.tokens + ours
        price = (
            planned.policy.offload.input_price or price_of("", planned.request.model).input_price
        )
        spent = Charge(recorded.time, seen.before, seen.after, price)
        if event is not None:
            self.causes[event.cause.name.lower()] += 1
        if self.detailed:
            self.spent.append(spent)
            if event is not None and len(course.decisions) < WORDS:
                words = described(
                    planned.history.items, planned.plan, planned.policy.offload, planned.room.window
                )
                course.decisions.append((course.planned, words))
        for sums in (self, course):
            sums.count(before, after, spent, event=event is not None)

    @property
    def losses(self) -> int:
        return sum(course.dearer for course in self.sessions.values())

    @property
    def lost(self) -> int:
        """What the sessions that cost more lose."""
        return sum(one.cost_after - one.cost_before for one in self.sessions.values() if one.dearer)

    @property
    def won(self) -> int:
        """What the other ones save."""
        return self.lost + self.cost_before - self.cost_after

    @property
    def worst(self) -> float | None:
        """The cost of the session that fares worst, as a share of its cost as it came."""
        return max(
            (one.cost_after / one.cost_before for one in self.sessions.values() if one.cost_before),
            default=None,
        )

    def figures(self) -> dict[str, object]:
        """Return all sums by their names."""
        figures = {
            name: value
            for name, value in vars(self).items()
            if isinstance(value, int | float | Counter)
        }
        del figures["detailed"]
        return figures | {
            "sessions": len(self.sessions),
            "sessions_costing_more": self.losses,
            "worst_session": self.worst,
        }


async def planned_by(
    policy: Policy, recorded: RecordedRequest, reader: MessageCache
) -> tuple[Planned | None, str]:
    """Return a request as this policy plans it, or None and the reason why it does not."""
    dialect = recorded.dialect
    chat = recorded.chat
    if dialect is None or chat is None:
        return None, recorded.reason or "other API"
    policy = policy.for_api(dialect.name).for_model(chat.model).planning
    if policy.offload.mode is Mode.OFF:
        return None, Reason.OFF
    chat = reader.request(dialect, chat.body)  # as one that goes on from the one before
    try:
        planned = await plan(dialect, chat, policy, policy.upstream.context_window, reader)
    except Unplannable as error:
        return None, error.reason
    return planned, f"{Reason.FIELD} {chat.obstacle_beside(policy.upstream.members)}"
