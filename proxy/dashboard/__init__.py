"""The dashboard at `/_offload/`: what was sent and what it cost, from rows in a file beside the log.

Requests end as outcomes. `Dashboard.record` queues each of them for a thread that writes, and the pages read what all
workers wrote.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import repeat
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

from proxy.dashboard.access import Access
from proxy.dashboard.file import unreadable
from proxy.dashboard.holding import Held, held
from proxy.dashboard.live import Live
from proxy.dashboard.reader import Reader
from proxy.dashboard.reading import ReadingThread
from proxy.dashboard.rows import NOTHING_SEEN
from proxy.dashboard.writer import Writer
from proxy.errors import DashboardFault, Unauthorized
from proxy.policies.tenants import identify, retention

if TYPE_CHECKING:
    from starlette.requests import Request

    from proxy.policies import Policies
    from proxy.policy import Policy
    from proxy.requests.attempt import Attempt
    from proxy.settings import Settings
    from proxy.telemetry.outcome import Outcome

logger = logging.getLogger(__name__)

T = TypeVar("T")

MISSING = "the proxy was started without --dashboard FILE"

_id = attrgetter("request_id")

ENDED = 1_000
"""Most requests whose outcome is awaited. Each is recorded right after it was seen."""


class Dashboard:
    """The dashboard of one process. Without `settings.dashboard` it records nothing, and its pages say so.

    `is_local` says whether a request comes from this machine, and `health` returns the state of this
    process, with what it believes of the upstreams of some namespaces.
    """

    def __init__(
        self,
        settings: Settings,
        policies: Callable[[], Policies],
        is_local: Callable[[Request], bool],
        health: Callable[[Collection[str]], Awaitable[Mapping[str, Any]]],
    ) -> None:
        self._path = settings.dashboard
        self._content = settings.dashboard_content
        self._policies = policies
        self.is_local = is_local
        self._health = health
        self._writer: Writer | None = None
        if self._path is not None:
            kept, others = lambda name: retention(name, policies()), settings.workers > 1
            self._writer = Writer(self._path, settings.dashboard_limit, kept, others=others)
        self.access = Access(settings.admin_token, self._secret)
        self.live = Live(
            lambda last: self.read(lambda reader: reader.after(last)), lambda: self.read(lambda reader: reader.newest())
        )
        self._thread = ReadingThread()
        self._reader: Reader | None = None
        self._ended: dict[str, Held] = {}

    # -- what requests call --

    @property
    def recording(self) -> bool:
        """Whether rows are written."""
        return self._writer is not None and not self._writer.state.off

    def watch(self, request_id: str, attempt: Attempt) -> None:
        """Hold what a request shows until its outcome follows, which is soon. Never fails."""
        if len(self._ended) < ENDED:
            self._ended[request_id] = held(attempt, self._content)

    def record(self, outcomes: Sequence[Outcome]) -> None:
        """Queue a row for each request. Takes a few microseconds, and never fails."""
        seen = [*map(self._ended.pop, map(_id, outcomes), repeat(NOTHING_SEEN))]
        if self._writer is not None:
            self._writer.record(outcomes, seen)

    # -- its life --

    def start(self) -> None:
        if self._writer is not None:
            self._writer.start()

    def end_streams(self) -> None:
        """End the viewers' streams, which would hold up the end of the process."""
        self.live.end()

    def close(self) -> None:
        """Write what waits."""
        self._thread.close(self._leave)
        if self._writer is not None:
            self._writer.close()

    # -- what pages call --

    @property
    def off(self) -> bool:
        return not self.recording

    def state(self) -> dict[str, Any]:
        """Return how the writing goes."""
        if self._writer is None:
            return {"off": True, "fault": MISSING, "written": 0, "dropped": 0, "file": None}
        state = self._writer.state
        return {
            "off": state.off,
            "fault": state.fault,
            "written": state.written,
            "dropped": state.dropped,
            "file": str(self._path),
        }

    async def health(self) -> Mapping[str, Any]:
        """Return the state of this process, and how the writing goes."""
        state, namespaces = self.state(), list[str]()
        try:
            namespaces = namespaces if self.off else await self.read(lambda reader: reader.namespaces())
        except DashboardFault as fault:
            state["fault"] = state["fault"] or str(fault)
        return {"dashboard": state, **await self._health(namespaces)}

    async def read(self, query: Callable[[Reader], T]) -> T:
        """Run a query in the reader's thread. Raises DashboardFault."""
        return await self._thread.run(partial(self._read, query))

    def namespace(self, key: str) -> tuple[str | None, str]:
        """Return the namespace that a caller's key opens, or None and why there is none."""
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
        return self._content and policy is not None and policy.dashboard.content

    def price(self, tenant: str, model: str) -> float | None:
        """Return the money for a million plain input tokens, if the tenant's policy says."""
        policy = self._policy(tenant)
        return policy.for_model(model).offload.input_price if policy else None

    def _policy(self, tenant: str) -> Policy | None:
        return next((one for one in self._policies().all() if one.tenant == tenant), None)

    def _read(self, query: Callable[[Reader], T]) -> T:
        if self._path is None or self._writer is None or self.off:
            raise DashboardFault(self.state()["fault"])
        self._writer.look()
        try:
            if self._reader is not None and self._reader.gone():
                self._reader.close()
                self._reader = None
            if self._reader is None:
                self._writer.leave()
                self._reader = Reader(self._path)
        except sqlite3.Error as error:
            raise unreadable(error) from error
        return query(self._reader)

    def _leave(self) -> None:
        if self._reader is not None:
            self._reader.close()

    def _secret(self) -> bytes:
        return self._writer.secret if self._writer is not None else b""
