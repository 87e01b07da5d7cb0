"""Bounds what clients send to this process: how many bytes of bodies, for how long, and how much of it at once.

There is one object for each process. Connections register a deadline, and one sweep a second checks them all, so a
request that arrives whole costs no timer.
"""

from __future__ import annotations

import asyncio
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
    """What `protocol.BoundedProtocol` does when it is told."""

    def expire(self) -> None: ...
    def refuse(self, error: ProxyError) -> None: ...
    def unfinished(self) -> Inflow | None: ...
    def idle(self) -> bool: ...


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
        self._loop.call_later(self._sweep_seconds, self._sweep)

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
        for connection in tuple(self.deadlines):
            body = connection.unfinished()
            if body and body.began < latest and tenant in (None, body.tenant):
                body.let_go()
                connection.refuse(
                    Overloaded(
                        f"The body was not whole within {self.body_seconds:g} seconds, and others need its room; "
                        "try again",
                        retry_after=COME_BACK,
                    )
                )


class Presence:
    """Whether the client of a connection is still there."""

    def __init__(self) -> None:
        self._watching: set[Callable[[], object]] = set()
        self._left = False

    def watch(self, left: Callable[[], object]) -> Callable[[], object]:
        """Call `left` when the client hangs up, or soon if it already has. Returns a function that cancels this."""
        self._watching.add(left)
        if self._left:
            asyncio.get_running_loop().call_soon(self.leave)
        return lambda: self._watching.discard(left)

    def leave(self) -> None:
        """Tell whoever watches that the client has hung up."""
        self._left = True
        for left in tuple(self._watching):
            left()


class Inflow:
    """One request as it comes in, and the bytes that it holds. The methods are those of `exchange.Incoming`."""

    def __init__(self, bounds: Bounds, presence: Presence, target: bytes = b"") -> None:
        self.target = target
        self.fault: ProxyError | None = None
        self.tenant: str | None = None
        self.began = asyncio.get_running_loop().time()
        self.watch = presence.watch
        self._bounds = bounds
        self._held = 0

    def charge(self, tenant: str) -> None:
        self._bounds.charge(tenant, self._held)
        self.tenant = tenant

    def hold(self, size: int) -> None:
        self._bounds.hold(self.tenant, size)
        self._held += size

    def release(self, size: int) -> None:
        size = min(size, self._held)
        self._held -= size
        self._bounds.release(self.tenant, size)

    def let_go(self) -> None:
        self.release(self._held)


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
