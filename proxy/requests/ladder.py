"""How one request is sent, one step after another, and what upstream's replies to it teach.

The steps themselves are in `plan.refusals`. A request that is too long is first planned again, for the window that
upstream named or that we guess.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from proxy.dialects import overflow
from proxy.plan.refusals import FORGIVING, Addition, Step, Verdict

if TYPE_CHECKING:
    from proxy.dialects import Dialect
    from proxy.policy import Policy
    from proxy.requests.prepared import Prepared
    from proxy.requests.tool_loop import Refusal
    from proxy.requests.windows import Known


class Ladder:
    """The steps of one request, with what upstream's replies teach and what earlier ones have taught."""

    def __init__(self, known: Known, dialect: Dialect, namespace: str, own: str) -> None:
        """Refusals teach only what is kept under the namespace `own`, until the request is `accepted`."""
        self._known = known
        self._dialect = dialect
        self._namespace = namespace
        self._lessons: list[Callable[[str], int]] = []  # of the request's refusals, for a namespace
        self._learner = own
        self._own: Refusal | None = None  # upstream's first refusal of the client's own bytes
        self._window: int | None = None  # for which this request alone is planned
        self.refused: frozenset[Addition] = frozenset()
        """What upstream refused of our additions before it took the request without."""

    @property
    def too_long(self) -> bool:
        """Whether upstream refused the request as too long."""
        return self._window is not None

    def room(self, policy: Policy, model: str) -> tuple[int | None, float]:
        """Return the window to plan with, None if it is not known, in upstream's tokens, and how many of these we take
        for one of ours."""
        known = self._known.window(self._namespace, policy, model)
        windows = [window for window in (known, self._window) if window is not None]
        return min(windows, default=None), self._known.factor(self._namespace, policy, model)

    def first(self, ready: Prepared, step: Step) -> Step:
        """Return `step` without the additions that upstream refuses, as far as is known."""
        planned = ready.planned
        if planned is None or not planned.concerns_us or not self._known.has_refusals(self._namespace):
            return replace(step, without=frozenset())
        possible = [Addition.TOOLS, Addition.ANY, Addition.THINKING]
        possible += [Addition.USAGE] if planned.request.stream else []
        possible += [Addition.PLACE] if planned.plan.boundaries else []
        refused = (one for one in possible if self._known.refuses(planned.refusable(self._namespace, one)))
        return replace(step, without=frozenset(refused))

    def next(self, ready: Prepared, refusal: Refusal) -> Step | Refusal:
        """Return the next step after a refusal, or the refusal that the client gets."""
        step = ready.step
        complaint = self._dialect.complaint(refusal.status, refusal.said())
        carried = ready.additions or step.without & FORGIVING
        if not carried:
            self._own = self._own or refusal
        again = None if ready.rounds else step.after(complaint, carried, concerned=ready.concerned)
        if again is None:
            return refusal if complaint is Verdict.FINAL else self._own or refusal
        planned = ready.planned
        if complaint is Verdict.OVERFLOW and planned is not None:
            lesson = partial(
                self._known.too_long,
                policy=planned.policy,
                model=planned.request.model,
                named=overflow.window(refusal.said()),
                counted=planned.needs(ready.tokens, ready.limit),
                measured=planned.measured,
            )
            self._window = lesson(self._learner)
            self._lessons.append(lesson)
        return again

    def accepted(self) -> None:
        """Upstream has taken the request: what its refusals taught holds for its client, too."""
        if self._learner != self._namespace:
            self._learner = self._namespace
            for lesson in self._lessons:
                lesson(self._namespace)

    def took_prompt(self, ready: Prepared, tokens: int) -> None:
        """Learn that upstream took a prompt of so many tokens; 0 if its reply did not say how many."""
        chat, policy, planned, ours = ready.chat, ready.tenant.policy, ready.planned, None
        if not tokens or chat is None or self._dialect.counts:
            return
        if planned is not None and planned.measured and not ready.rounds:
            ours = ready.prompt
        counted = int(ready.tokens * self._known.factor(self._namespace, policy, chat.model))
        self._known.took(self._namespace, policy, chat.model, tokens, counted, ours)

    def took(self, ready: Prepared, carried: frozenset[Addition], blamed: frozenset[Addition]) -> None:
        """Learn from a request that upstream took with the additions `carried`, having refused those in `blamed`."""
        planned = ready.planned
        if planned is None:
            return
        self.refused = blamed
        for addition in sorted(blamed):
            self._known.refused(planned.refusable(self._namespace, addition))
        if self._known.has_refusals(self._namespace):
            for addition in carried:
                self._known.accepted(planned.refusable(self._namespace, addition))
