"""What upstream's replies to one request teach, and what earlier replies have taught that concerns it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.plan.refusals import Addition
from proxy.requests.attempt import AsItCame, Attempt, Rewritten
from proxy.requests.prepare import OUR_TOOLS_TOKENS

if TYPE_CHECKING:
    from proxy.dialects import Dialect
    from proxy.policy import Policy
    from proxy.requests.prepare import PlannedRequest
    from proxy.requests.services import Services
    from proxy.requests.tool_loop import Refusal


class Feedback:
    """Connects a request of this namespace with the process's knowledge of upstreams."""

    def __init__(self, services: Services, dialect: Dialect, namespace: str) -> None:
        self._services = services
        self._dialect = dialect
        self._namespace = namespace
        self.window: int | None = None
        """The window for which this request alone is planned, after upstream refused it as too long."""
        self.refused: frozenset[Addition] = frozenset()
        """What upstream refused of our additions before it took the request without."""

    # -- what is known --

    def factor(self, policy: Policy, model: str) -> float:
        """Return how many tokens upstream counts for one of ours. Windows and what is learned of them are in its."""
        return self._services.known.factor(self._namespace, policy, model)

    def window_for(self, policy: Policy, model: str) -> int | None:
        """Return the window to plan with, None if it is not known."""
        known = self._services.known.window(self._namespace, policy, model)
        return self.window if known is None or (self.window is not None and self.window < known) else known

    def believed(self, attempt: AsItCame) -> frozenset[Addition]:
        """Return the additions that upstream refuses, as far as is known."""
        planned = attempt.planned
        if planned is None or not planned.concerns_us or not self._services.known.has_refusals(self._namespace):
            return frozenset()
        possible = [Addition.TOOLS, Addition.ANY, Addition.THINKING]
        possible += [Addition.USAGE] if planned.request.stream else []
        possible += [Addition.PLACE] if planned.plan.boundaries else []
        return frozenset(
            addition
            for addition in possible
            if self._services.known.refuses(planned.refusable(self._namespace, addition))
        )

    # -- what is learned --

    def too_long(self, attempt: Attempt, refusal: Refusal) -> None:
        """Learn from a request that upstream refused as too long."""
        planned = attempt.planned
        if planned is not None:
            named = self._dialect.window(refusal.said())
            counted = planned.needs(attempt.tokens, attempt.limit)
            policy, model = attempt.parsed.tenant.policy, planned.request.model
            self.window = self._services.known.too_long(
                self._namespace, policy, model, named, counted, measured=planned.measured
            )

    def took_prompt(self, attempt: Attempt, tokens: int) -> None:
        """Learn that upstream took a prompt of so many tokens; 0 if its reply did not say how many."""
        chat, policy = attempt.parsed.chat, attempt.parsed.tenant.policy
        if not tokens or chat is None or self._dialect.counts:
            return
        counted = int(attempt.tokens * self.factor(policy, chat.model))
        planned, ours = attempt.planned, None
        if planned is not None and planned.measured and not attempt.rounds:
            injecting = isinstance(attempt, Rewritten) and attempt.rendered.injecting
            ours = planned.prompt(attempt.tokens) - (0 if injecting else OUR_TOOLS_TOKENS)
        self._services.known.took(self._namespace, policy, chat.model, tokens, counted, ours)

    def took_additions(
        self, planned: PlannedRequest, carried: frozenset[Addition], blamed: frozenset[Addition]
    ) -> None:
        """Learn from a request that upstream took with the additions `carried`, having refused those in `blamed`."""
        self.refused = blamed
        for addition in sorted(blamed):
            self._services.known.refused(planned.refusable(self._namespace, addition))
        if self._services.known.has_refusals(self._namespace):
            for addition in carried:
                self._services.known.accepted(planned.refusable(self._namespace, addition))
