"""Connects what a process learns of its upstreams: by their refusals, from their lists of models, from other processes.

refusals ─────────> UpstreamLimits, RefusalMemory ─┐
accepted prompts ─> UpstreamLimits, Calibration ───┴──> SharedBeliefs <──> store <──> other processes
lists of models ──> ListedWindows
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from proxy.requests.calibration import Calibration, FactorBelief
from proxy.requests.listed_windows import ListedWindows
from proxy.requests.refusals import Belief, RefusalMemory
from proxy.requests.shared_beliefs import Shared, SharedBeliefs
from proxy.requests.upstream_limits import Lesson, UpstreamLimits, WindowBelief
from proxy.telemetry import logs

if TYPE_CHECKING:
    from proxy.policies.tenants import Tenant
    from proxy.requests.background import Background
    from proxy.requests.listed_windows import Sender
    from proxy.stores.guarded import Guarded
    from proxy.threads import WorkPool
    from proxy.upstream.headers import Headers

log = logging.getLogger(__name__)

WINDOW, REFUSAL, FACTOR = "window", "refusal", "factor"


class Learning:
    """What one process knows of its upstreams. `count` is called with what taught it, for each change."""

    def __init__(
        self,
        store: Guarded,
        upstream: Sender,
        background: Background,
        reading: WorkPool,
        count: Callable[[str], None] = lambda lesson: None,
    ) -> None:
        self._count = count
        self._listed = ListedWindows(upstream, background, reading, lambda: count(Lesson.LISTED))
        self.limits = UpstreamLimits(self._believed, self._listed.window)
        self.shared = SharedBeliefs(store)
        self.shared.join(WINDOW, Shared(WindowBelief, self._heard, self.limits.beliefs))
        self.refusals = RefusalMemory(self._refused)
        self.shared.join(REFUSAL, Shared(Belief, self._heard_refusal, self.refusals.beliefs))
        self.calibration = Calibration(self._calibrated)
        self.shared.join(FACTOR, Shared(FactorBelief, self.calibration.accept, self.calibration.beliefs))

    def seen(self, tenant: Tenant, headers: Headers) -> None:
        """Fetch in the background what can be known about the upstream of this request."""
        self._listed.ask(tenant, headers)
        self.shared.touch(tenant.namespace)

    def _believed(self, namespace: str, belief: WindowBelief, lesson: Lesson) -> None:
        self._tell(namespace, belief, lesson)
        self.shared.publish(namespace, WINDOW, msgspec.json.encode(belief))

    def _refused(self, belief: Belief) -> None:
        self.shared.publish(belief.subject.namespace, REFUSAL, msgspec.json.encode(belief))

    def _calibrated(self, namespace: str, belief: FactorBelief) -> None:
        self.shared.publish(namespace, FACTOR, msgspec.json.encode(belief))

    def _heard_refusal(self, namespace: str, belief: Belief) -> None:
        if belief.subject.namespace == namespace:
            self.refusals.accept(belief)

    def _heard(self, namespace: str, belief: WindowBelief) -> None:
        if self.limits.accept(namespace, belief):
            self._tell(namespace, belief, Lesson.HEARD)

    def _tell(self, namespace: str, belief: WindowBelief, lesson: Lesson) -> None:
        self._count(lesson)
        logs.event(
            log,
            "context window",
            lesson=lesson.value,
            namespace=namespace,
            upstream=belief.upstream,
            model=belief.model[: logs.LONGEST],
            window=belief.window,
            accepted=belief.accepted,
        )
