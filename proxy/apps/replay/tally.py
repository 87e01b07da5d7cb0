"""Adds up what one policy would have done to recorded requests."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from proxy.apps.replay.formats import SESSIONS
from proxy.apps.replay.recordings import RecordedRequest
from proxy.plan.forecast import event_at, told, waiting
from proxy.plan.plan import Role
from proxy.plan.prices import DEARER, price_of
from proxy.plan.turn import Reason, Unplannable
from proxy.policy import Mode, Policy
from proxy.requests.cache import MessageCache
from proxy.requests.planned import OUR_TOOLS_TOKENS, Planned, plan
from proxy.requests.prepared import foreseen

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


@dataclass
class Course:
    """One session under one policy."""

    requests: int = 0
    before: int = 0
    """The sum of its requests' costs as they came."""
    after: int = 0
    events: int = 0
    unseen: int = 0
    """Tokens of instructions and tools that its file does not hold, by what upstream counted of its
    first request."""
    told: list[tuple[int, str]] = field(default_factory=list)
    """What the plan does at requests, counted from 0, and why."""

    @property
    def dearer(self) -> bool:
        return self.after > self.before * DEARER


@dataclass
class Tally:
    """What one policy would have done. Sums are over the requests that it plans."""

    name: str
    policy: Policy
    detailed: bool = False
    """Whether to keep what only the report shows: `total`, and what is told of sessions."""
    planned: int = 0
    billed: int = 0
    """Planned requests whose cost rests on upstream's numbers."""
    changed: int = 0
    """Planned requests that would have differed from what was sent."""
    events: int = 0
    causes: Counter[str] = field(default_factory=Counter)
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
    quiet: tuple[int, str] = (0, "")
    """The tokens of the largest request that stays as it came, and what its plan waits for."""
    sessions: dict[SessionKey, Course] = field(default_factory=dict)
    total: list[tuple[int, int]] = field(default_factory=list)
    """The sums of costs after each planned request, as they came and as planned."""

    async def add(self, recorded: RecordedRequest, reader: MessageCache) -> None:
        self.sources[recorded.source] += 1
        self.expanded += recorded.expanded
        planned, reason = await self._plan(recorded, reader)
        if planned is None:
            self.unplanned[reason] += 1
            return
        roles = [item.role for item in planned.history.items]
        asked = roles.index(Role.USER) + 1 if Role.USER in roles else min(1, len(roles))
        key = SessionKey(
            planned.dialect.name, planned.request.model, planned.chain[asked], recorded.caller
        )
        course = self.sessions.setdefault(key, Course())
        if not course.requests and recorded.said is not None and recorded.source in SESSIONS:
            course.unseen = max(recorded.said.prompt - planned.tokens_before, 0)
        seen = foreseen(planned, recorded.said, course.unseen)
        event = event_at(planned.plan)
        self.planned += 1
        self.billed += recorded.said is not None and recorded.said.cached is not None
        self.changed += bool(seen.compacted or seen.compressed)
        if planned.plan.empty and planned.history.tokens > self.quiet[0]:
            self.quiet = planned.history.tokens, waiting(planned.plan, planned.policy.offload)
        self.tokens_before += course.unseen + planned.tokens_before
        self.tokens_after += (
            course.unseen + planned.head + seen.tokens + (OUR_TOOLS_TOKENS if seen.ours else 0)
        )
        self.cost_before += seen.before
        self.cost_after += seen.after
        price = (
            planned.policy.offload.input_price or price_of("", planned.request.model).input_price
        )
        if price is not None:
            self.priced += 1
            self.money_before += seen.before * price / 1e6
            self.money_after += seen.after * price / 1e6
        if self.detailed:
            self.total.append((self.cost_before, self.cost_after))

        if event is not None:
            self.events += 1
            self.causes[event.cause.name.lower()] += 1
            course.events += 1
            if self.detailed and len(course.told) < WORDS:
                words = told(
                    planned.history.items, planned.plan, planned.policy.offload, planned.room.window
                )
                course.told.append((course.requests, words))
        course.requests += 1
        course.before += seen.before
        course.after += seen.after

    async def _plan(
        self, recorded: RecordedRequest, reader: MessageCache
    ) -> tuple[Planned | None, str]:
        dialect = recorded.dialect
        chat = recorded.chat
        if dialect is None or chat is None:
            return None, recorded.reason or "other API"
        policy = self.policy.for_api(dialect.name).for_model(chat.model).planning
        if policy.offload.mode is Mode.OFF:
            return None, Reason.OFF
        try:
            planned = await plan(dialect, chat, policy, policy.upstream.context_window, reader)
        except Unplannable as error:
            return None, error.reason
        return planned, f"{Reason.FIELD} {chat.obstacle_beside(policy.upstream.members)}"

    @property
    def losses(self) -> int:
        return sum(course.dearer for course in self.sessions.values())

    @property
    def lost(self) -> int:
        """What the sessions that cost more lose."""
        return sum(one.after - one.before for one in self.sessions.values() if one.dearer)

    @property
    def won(self) -> int:
        """What the other ones save."""
        return self.lost + self.cost_before - self.cost_after

    @property
    def worst(self) -> float | None:
        """The cost of the session that fares worst, as a share of its cost as it came."""
        return max(
            (course.after / course.before for course in self.sessions.values() if course.before),
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
