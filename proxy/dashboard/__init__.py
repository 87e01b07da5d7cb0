"""The dashboard at `/_offload/`: what was sent and what it cost, from rows in a file beside the log.

Requests end as outcomes. `Dashboard.record` queues each of them for a thread that writes (`writer`), and the pages read
what all workers wrote (`queries`).
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec.structs import asdict

from proxy.dashboard.access import Access, Viewer, use_link
from proxy.dashboard.fleet import Fleet
from proxy.dashboard.queries import Queries, Reader
from proxy.dashboard.rows import Rows
from proxy.dashboard.writer import Writer, Writing
from proxy.errors import DashboardFault, Unauthorized
from proxy.plan.prices import price_of
from proxy.policies.tenants import identify, retention

if TYPE_CHECKING:
    from proxy.policies import Policies
    from proxy.policy import Policy
    from proxy.requests.prepared import Prepared
    from proxy.settings import Settings
    from proxy.stores import Store
    from proxy.telemetry.outcome import Outcome

T = TypeVar("T")

MISSING = "the proxy was started without --dashboard FILE"

EVERYWHERE = ("0.0.0.0", "::", "")
"""Hosts that stand for all addresses of a machine."""

ENDED = 1_000
"""Most requests whose outcome is awaited. Each is recorded right after it was seen."""


class Dashboard:
    """The dashboard of one process. Without `settings.dashboard` it records nothing, and its pages say so.

    `health` returns the state of this process, with what it believes of the upstreams of some namespaces.
    """

    def __init__(
        self,
        settings: Settings,
        policies: Callable[[], Policies],
        health: Callable[[Collection[str]], Awaitable[Mapping[str, Any]]],
    ) -> None:
        self._settings = settings
        self._content = settings.dashboard_content
        self._policies = policies
        self._health = health
        self._writer: Writer | None = None
        if (path := settings.dashboard) is not None:
            self._operators, self._viewers = Queries(path), Queries(path)
            self._writer = Writer(path, settings.dashboard_limit, lambda name: retention(name, policies()))
        self.access = Access(settings.admin_token, lambda: self._writer.secret if self._writer else b"")
        self._ended: dict[str, Prepared] = {}
        self.replica = f"{socket.gethostname()}:{settings.port}"
        """What the pages call this replica."""

    # -- what requests call --

    def watch(self, request_id: str, attempt: Prepared) -> None:
        """Hold a request until its outcome follows, which is soon. Never fails."""
        if len(self._ended) < ENDED:
            self._ended[request_id] = attempt

    def record(self, outcomes: Sequence[Outcome]) -> None:
        """Queue a row for each request. Takes a few microseconds, and never fails."""
        attempts = [self._ended.pop(outcome.request_id, None) for outcome in outcomes]
        if self._writer is not None:
            self._writer.record(outcomes, attempts, content=self._content)

    # -- its life --

    def start(self) -> None:
        if self._writer is not None:
            self._writer.start()

    def close(self) -> None:
        """Write what waits."""
        if self._writer is not None:
            self._operators.close()
            self._viewers.close()
            self._writer.close()

    async def exchange(self, store: Store, warn: Callable[[str, str], None]) -> None:
        """Exchange sums with the other replicas that use this store, until cancelled."""
        settings, path = self._settings, self._settings.dashboard
        if path is not None:
            host = settings.host if settings.host not in EVERYWHERE else socket.gethostname()
            url = settings.replica_url or f"http://{f'[{host}]' if ':' in host else host}:{settings.port}"
            await Fleet(lambda: Rows(path, settings.dashboard_limit), store, self.replica, url, warn).run()

    # -- what pages call --

    def state(self) -> dict[str, Any]:
        """Return how the writing goes."""
        state = self._writer.state if self._writer else Writing(off=True, fault=MISSING)
        return {**asdict(state), "file": str(self._settings.dashboard) if self._writer else None}

    async def health(self) -> Mapping[str, Any]:
        """Return the state of this process, and how the writing goes."""
        state, namespaces = self.state(), list[str]()
        try:
            namespaces = namespaces if state["off"] else await self.read(lambda reader: reader.namespaces(), Viewer())
        except DashboardFault as fault:
            state["fault"] = state["fault"] or str(fault)
        return {"dashboard": state, **await self._health(namespaces)}

    async def read(self, query: Callable[[Reader], T], viewer: Viewer) -> T:
        """Run a query. Viewers wait for each other, and the operator for none of them. Raises DashboardFault, and
        Overloaded if too many wait."""
        state = self.state()
        if state["off"]:
            raise DashboardFault(state["fault"])
        queries = self._operators if viewer.operator else self._viewers
        return await queries.run(query, viewer.namespace or "")

    async def opens(self, code: str) -> bool:
        """Return whether this is the code of a link that was printed and never used."""
        return await asyncio.to_thread(use_link, self._settings, code)

    async def known(self, key: str) -> tuple[str | None, str]:
        """Return the namespace that a caller's key opens, or None and why there is none."""
        namespace, why = self._namespace(key)
        if namespace is None or await self.read(lambda reader: reader.knows(namespace), Viewer(namespace)):
            return namespace, why
        return None, "Nothing is kept of this key's requests."

    def _namespace(self, key: str) -> tuple[str | None, str]:
        try:
            tenant = identify([(b"authorization", b"Bearer " + key.encode())], self._policies())
        except Unauthorized as error:
            return None, error.message
        if tenant.anonymous or (tenant.policy.share_namespace and tenant.policy is self._policies().default):
            return None, "This key is not listed in a policy, and its tenant's callers share one namespace."
        return tenant.namespace, ""

    def shows_content(self, tenant: str) -> bool:
        """Whether texts may be shown now, whatever the file has."""
        policy = self._policy(tenant)
        return self._content and policy is not None and policy.dashboard_content

    def price(self, tenant: str, model: str) -> float | None:
        """Return the money for a million plain input tokens, if the tenant's policy or the price list says."""
        policy = self._policy(tenant)
        if policy is None:
            return price_of("", model).input_price
        policy = policy.for_model(model)
        return policy.offload.input_price or price_of(policy.upstream.base_url, model).input_price

    def _policy(self, tenant: str) -> Policy | None:
        return next((one for one in self._policies().all() if one.tenant == tenant), None)
