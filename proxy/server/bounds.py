"""Bounds what clients send to this process: how many bytes of bodies, for how long, and how much of it at once.

There is one object for each process. Connections register a deadline, and one sweep a second checks them all, so a
request that arrives whole costs no timer.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Protocol

from proxy.errors import Overloaded, ProxyError
from proxy.policy import Policy
from proxy.settings import Settings

try:
    import resource
except ImportError:  # Windows, which has no such limit
    resource = None  # type: ignore[assignment]

IDLE_SECONDS = 75.0
"""Seconds that a connection may stay open without a request, as in nginx. Clients keep idle connections in their pools
for less time, so the client closes first, and no request arrives just as we close."""

SWEEP_SECONDS = 1.0
"""Seconds between two checks of the deadlines, or less if a timeout is short."""

TENANTS_SHARE = 2
"""One tenant's share is the limit for all bodies divided by this."""

CONNECTIONS_SHARE = 0.75
"""Fraction of all file descriptors that client connections may take; upstream and the store need the rest."""

UPLOADS_SHARE = 4
"""A tenant's uploads, whose bodies are too large to collect, may take its number of places divided by this."""

COME_BACK = 1
"""`Retry-After` in seconds when too much happens at once. It is short because requests end all the time."""


class Waiting(Protocol):
    """A connection that waits for its client."""

    def expire(self) -> None:
        """Act on a deadline that has passed."""

    def unfinished(self) -> Unfinished | None:
        """Return the body that it is receiving, if there is one."""

    def idle(self) -> bool:
        """Return whether closing it now would lose nothing: no request with a whole head waits for a reply."""


class Unfinished(Protocol):
    """A body that is not whole yet."""

    tenant: str | None
    began: float

    def give_up(self, error: ProxyError) -> None:
        """Drop the part that has arrived, and answer with `error`."""


class Bounds:
    """Counts the bytes of one process's request bodies, and keeps its connections' deadlines."""

    def __init__(self, settings: Settings, warn: Callable[[str, str], None]) -> None:
        self.head_seconds = settings.head_timeout
        self.body_seconds = settings.body_timeout
        self.limit = settings.buffered_limit
        self.warn = warn
        self.deadlines: dict[Waiting, float] = {}
        """Deadlines on the loop's clock."""
        self.held = 0
        """Bytes of all bodies, including those whose tenant is not known yet."""
        self._of: dict[str, int] = {}
        """Bytes held for each tenant that has any."""
        self._connections = 0
        self._most_connections = resource.getrlimit(resource.RLIMIT_NOFILE)[0] * CONNECTIONS_SHARE if resource else -1
        self._sweep_seconds = min(SWEEP_SECONDS, self.head_seconds / 4, self.body_seconds / 4)
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start checking the deadlines in this loop."""
        if self._loop is not loop:
            self._loop = loop
            loop.call_later(self._sweep_seconds, self._sweep)

    def opened(self) -> None:
        """Count a new connection. If there are too many, close the one that has been idle for longest.

        Otherwise, clients that open connections and send nothing could keep everybody else out.
        """
        self._connections += 1
        if not 0 <= self._most_connections < self._connections:
            return
        if oldest := next((waiting for waiting in self.deadlines if waiting.idle()), None):
            del self.deadlines[oldest]
            oldest.expire()

    def closed(self) -> None:
        """Count a connection that has closed."""
        self._connections -= 1

    def _sweep(self) -> None:
        assert self._loop is not None
        now = self._loop.time()
        for waiting in [waiting for waiting, deadline in self.deadlines.items() if deadline <= now]:
            self.deadlines.pop(waiting, None)
            waiting.expire()
        self._notice_exhaustion()
        self._loop.call_later(self._sweep_seconds, self._sweep)

    def _notice_exhaustion(self) -> None:
        """Warn if no file descriptor is left: libuv closes connections that it cannot accept, and reports nothing."""
        try:
            os.close(os.dup(2))
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                return
            most = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if resource else "all"
            self.warn(
                "file descriptors",
                f"no file descriptor is left of {most} (RLIMIT_NOFILE, `ulimit -n`): connections are closed unheard",
            )

    def charge(self, tenant: str, size: int) -> None:
        """Charge bytes that are already held to a tenant. Raises Overloaded if they exceed its share."""
        if not size:
            return
        share, held = self.limit // TENANTS_SHARE, self._of.get(tenant, 0) + size
        if held > share:
            self._make_room(tenant)
            held = self._of.get(tenant, 0) + size
            if held > share:
                raise _full(share, "this tenant's requests")
        self._of[tenant] = held

    def hold(self, tenant: str | None, size: int) -> None:
        """Count bytes that have arrived, before they are kept. Raises Overloaded if there is no room for them."""
        if self.held + size > self.limit:
            self._make_room(None)
            if self.held + size > self.limit:
                raise _full(self.limit, "all requests")
        if tenant is not None:
            self.charge(tenant, size)
        self.held += size

    def release(self, tenant: str | None, size: int) -> None:
        self.held -= size
        if tenant is not None and size:
            left = self._of.pop(tenant) - size
            if left:
                self._of[tenant] = left

    def _make_room(self, tenant: str | None) -> None:
        """Give up a tenant's bodies, or everybody's, that have been arriving for longer than a body may pause.

        Otherwise, clients that send a byte now and then and never finish could shut everybody else out.
        """
        assert self._loop is not None
        latest = self._loop.time() - self.body_seconds
        bodies = [body for waiting in self.deadlines if (body := waiting.unfinished()) and body.began < latest]
        for body in bodies:
            if tenant is None or body.tenant == tenant:
                body.give_up(
                    Overloaded(
                        f"The body was not whole within {self.body_seconds:g} seconds, and others need its room; "
                        "try again",
                        retry_after=COME_BACK,
                    )
                )


class Places:
    """How many requests and connections of each tenant are under way in this process."""

    def __init__(self) -> None:
        self._taken: Counter[tuple[str, str]] = Counter()

    def for_connection(self, policy: Policy) -> AbstractContextManager[object]:
        """Return a place for a WebSocket connection. Raises Overloaded if all are taken."""
        return self._take(policy, ("connections", policy.limits.concurrent_requests))

    def for_request(self, policy: Policy, uploads: bool) -> AbstractContextManager[object]:
        """Return a place for a request whose body is complete, or is uploaded. Raises Overloaded if all are taken.

        Uploads are forwarded while they arrive, so they may take only some of the places: slow senders then cannot shut
        out the tenant's other requests.
        """
        most = policy.limits.concurrent_requests
        shares = [("requests", most), *([("uploads", max(1, most // UPLOADS_SHARE))] if uploads else [])]
        return self._take(policy, *shares)

    def _take(self, policy: Policy, *shares: tuple[str, int]) -> AbstractContextManager[object]:
        for kind, most in shares:
            if self._taken[policy.tenant, kind] >= most:
                raise Overloaded(
                    f"More than {most} {kind} at once (from `limits.concurrent_requests`); try again",
                    retry_after=COME_BACK,
                )
        taken = [(policy.tenant, kind) for kind, _ in shares]
        self._taken.update(taken)
        held = ExitStack()
        held.callback(self._taken.subtract, taken)
        return held


def _full(limit: int, whose: str) -> Overloaded:
    return Overloaded(
        f"The bodies of {whose} would take more than {limit} bytes (from --buffered-limit); try again",
        retry_after=COME_BACK,
    )
