"""Bounds what clients send to this process: how many bytes of bodies, for how long, and how many connections there are.

There is one object for each process. Connections register a deadline, and one sweep a second checks them all, so a
request that arrives whole costs no timer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from proxy.errors import Overloaded, ProxyError
from proxy.settings import Settings

try:
    import resource
except ImportError:  # Windows, which has no such limit
    resource = None  # type: ignore[assignment]

SWEEP_SECONDS = 1.0
"""Seconds between two checks of the deadlines, or less if a timeout is short."""

TENANTS_SHARE = 2
"""One tenant's share is the limit for all bodies divided by this."""

CONNECTIONS_SHARE = 0.75
"""Fraction of all file descriptors that client connections may take; upstream and the store need the rest."""

COME_BACK = 1
"""`Retry-After` in seconds when too much happens at once. It is short because requests end all the time."""


class Waiting(Protocol):
    """A connection: `protocol.BoundedProtocol`, which imports this module."""

    def expire(self) -> None: ...
    def refuse(self, error: ProxyError) -> None: ...
    def unfinished(self) -> Inflow | None: ...
    def idle(self) -> bool: ...


class Bounds:
    """Counts the bytes of one process's request bodies and its connections, and keeps their deadlines."""

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
        if self._loop is loop:
            return
        self._loop = loop

        def sweep() -> None:
            now = loop.time()
            for connection in [one for one, deadline in self.deadlines.items() if deadline <= now]:
                self.deadlines.pop(connection, None)
                connection.expire()
            loop.call_later(self._sweep_seconds, sweep)

        loop.call_later(self._sweep_seconds, sweep)

    def opened(self) -> None:
        """Count a new connection. If there are too many, close the one that has been idle for longest.

        Otherwise, clients that open connections and send nothing could keep everybody else out.
        """
        self._connections += 1
        if not 0 <= self._most_connections < self._connections:
            return
        if oldest := next((connection for connection in self.deadlines if connection.idle()), None):
            del self.deadlines[oldest]
            oldest.expire()

    def closed(self) -> None:
        self._connections -= 1

    def charge(self, tenant: str, size: int) -> None:
        """Charge bytes that are already held to a tenant. Raises Overloaded if they exceed its share."""
        share = self.limit // TENANTS_SHARE
        if size and self._of.get(tenant, 0) + size > share:
            self._make_room(tenant)
            if self._of.get(tenant, 0) + size > share:
                raise _full(share, "this tenant's requests")
        if size:
            self._of[tenant] = self._of.get(tenant, 0) + size

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
                text = f"The body was not whole within {self.body_seconds:g} seconds, and others need its room; "
                connection.refuse(Overloaded(f"{text}try again", retry_after=COME_BACK))


def _full(limit: int, whose: str) -> Overloaded:
    text = f"The bodies of {whose} would take more than {limit} bytes (from --buffered-limit); try again"
    return Overloaded(text, retry_after=COME_BACK)


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

    def __init__(self, bounds: Bounds, presence: Presence | None = None, target: bytes = b"") -> None:
        self.target = target
        self.fault: ProxyError | None = None
        self.tenant: str | None = None
        self.began = asyncio.get_running_loop().time()
        self.watch = (presence or Presence()).watch
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
