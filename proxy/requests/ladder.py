"""How one request is sent, one form after another, and what upstream's replies to it teach.

The forms themselves are in `plan.turn`. A request that is too long is first planned again, for the window that
upstream named or that we guess.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from msgspec.structs import replace

from proxy.dialects import refusals
from proxy.plan.turn import FORGIVING, Addition, Form, Verdict

if TYPE_CHECKING:
    from proxy.dialects import Dialect
    from proxy.policy import Policy
    from proxy.requests.prepared import Prepared
    from proxy.requests.relay import Refusal
    from proxy.requests.windows import Known


class Ladder:
    """The forms of one request, with what upstream's replies teach and what earlier ones have taught."""

    def __init__(self, known: Known, dialect: Dialect, namespace: str, own: str) -> None:
        """Refusals teach only what is kept under the namespace `own`, until the request is `accepted`."""
        self._known = known
        self._dialect = dialect
        self._namespace = namespace
        self._to_learn: list[Callable[[str], int]] = []  # of the request's refusals, for a namespace
        self._learner = own
        self._own: Refusal | None = None  # upstream's first refusal of the client's own bytes
        self._window: int | None = None  # for which this request alone is planned
        self.refused: frozenset[Addition] = frozenset()
        """What upstream refused of our additions before it took the request without."""

    @property
    def too_long(self) -> bool:
        """Whether upstream refused the request as too long."""
        return self._window is not None

    def window(self, policy: Policy, model: str) -> int | None:
        """Return the window to plan with, None if it is not known."""
        known = self._known.window(self._namespace, policy, model)
        return min((window for window in (known, self._window) if window is not None), default=None)

    def first(self, prepared: Prepared, form: Form) -> Form:
        """Return `form` without the additions that upstream refuses, as far as is known."""
        planned = prepared.planned
        if planned is None or not planned.concerns_us or not self._known.has_refusals(self._namespace):
            return replace(form, without=frozenset())
        possible = [Addition.ANY, Addition.THINKING]
        possible += [Addition.USAGE] if planned.request.stream else []
        possible += [Addition.PLACE] if planned.plan.boundaries else []
        refused = (one for one in possible if self._known.refuses(planned.refusable(self._namespace, one)))
        return replace(form, without=frozenset(refused))

    def next(self, prepared: Prepared, refusal: Refusal) -> Form | Refusal:
        """Return the next form after a refusal, or the refusal that the client gets."""
        form = prepared.form
        complaint = self._dialect.complaint(refusal.status, refusal.said())
        carried = prepared.additions or form.without & FORGIVING
        if not carried:
            self._own = self._own or refusal
        again = None if prepared.rounds else form.after(complaint, carried, concerned=prepared.concerned)
        if again is None:
            return refusal if complaint is Verdict.FINAL else self._own or refusal
        planned = prepared.planned
        if complaint is Verdict.OVERFLOW and planned is not None:
            learn = partial(
                self._known.too_long,
                policy=planned.policy,
                model=planned.request.model,
                named=refusals.window(refusal.said()),
                counted=planned.needs(prepared.tokens, prepared.limit),
                measured=planned.measured,
            )
            self._window = learn(self._learner)
            self._to_learn.append(learn)
        return again

    def accepted(self) -> None:
        """Upstream has taken the request: what its refusals taught holds for its client, too."""
        if self._learner != self._namespace:
            self._learner = self._namespace
            for learn in self._to_learn:
                learn(self._namespace)

    def took(self, prepared: Prepared, carried: frozenset[Addition], blamed: frozenset[Addition]) -> None:
        """Learn from a request that upstream took with the additions `carried`, having refused those in `blamed`."""
        planned = prepared.planned
        if planned is None:
            return
        self.refused = blamed
        for addition in sorted(blamed):
            self._known.refused(planned.refusable(self._namespace, addition))
        if self._known.has_refusals(self._namespace):
            for addition in carried:
                self._known.accepted(planned.refusable(self._namespace, addition))
