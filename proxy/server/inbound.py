"""What clients are in the middle of sending to this process: how many bytes of it we hold, and for how long we wait.

One object a process. Connections enter themselves with a deadline, and one sweep a second looks at all of them: a
request that arrives whole costs no timer.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from typing import Protocol

from proxy.errors import Overloaded, ProxyError
from proxy.settings import Settings

try:
    import resource
except ImportError:  # Windows, which has no such limit
    resource = None  # type: ignore[assignment]

IDLE_SECONDS = 75.0
"""That a connection may be open without a request, as nginx has it. Longer than clients keep theirs in their pools,
so that it is they who close: a request never crosses our closing on its way."""

SWEEP_SECONDS = 1.0
"""Between two looks at the deadlines; shorter where a deadline is."""

TENANTS_SHARE = 2
"""One tenant's bodies get one part in so many of all bytes."""

CONNECTIONS_SHARE = 0.75
"""Of all file descriptors, that clients' connections may take; the others are upstream's and the store's."""

COME_BACK = 1
"""Seconds that a client is told to wait when there is too much at once: requests end all the time."""


class Waiting(Protocol):
    """A connection that waits for its client."""

    def expire(self) -> None:
        """The deadline has passed."""

    def unfinished(self) -> Unfinished | None:
        """The body that it is in the middle of."""

    def idle(self) -> bool:
        """Whether nothing is lost when it is closed now: there is no whole head of a request that waits for a reply."""


class Unfinished(Protocol):
    """A body that is not whole yet."""

    tenant: str | None
    began: float

    def give_up(self, error: ProxyError) -> None:
        """Let go of what there is of it, and answer with `error`."""


class Inbound:
    """One process's account of bodies, and its connections' deadlines."""

    def __init__(self, settings: Settings, warn: Callable[[str, str], None]) -> None:
        self.head_seconds = settings.head_timeout
        self.body_seconds = settings.body_timeout
        self.limit = settings.buffered_limit
        self.warn = warn
        self.deadlines: dict[Waiting, float] = {}
        """On the loop's clock."""
        self.held = 0
        """Bytes of bodies, of all who are known and of all who are not yet."""
        self._of: dict[str, int] = {}
        """Of them, those of each tenant that has some."""
        self._connections = 0
        self._most_connections = resource.getrlimit(resource.RLIMIT_NOFILE)[0] * CONNECTIONS_SHARE if resource else -1
        self._sweep_seconds = min(SWEEP_SECONDS, self.head_seconds / 4, self.body_seconds / 4)
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, loop: asyncio.AbstractEventLoop) -> None:
        """Look after deadlines from now on, in this loop."""
        if self._loop is not loop:
            self._loop = loop
            loop.call_later(self._sweep_seconds, self._sweep)

    def opened(self) -> None:
        """One connection more. Where there are many, the one goes that has been idle for longest.

        Else they who open connections and say nothing could keep everybody else out.
        """
        self._connections += 1
        if not 0 <= self._most_connections < self._connections:
            return
        if oldest := next((waiting for waiting in self.deadlines if waiting.idle()), None):
            del self.deadlines[oldest]
            oldest.expire()

    def closed(self) -> None:
        """One connection less."""
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
        """libuv closes what it cannot accept, and tells nobody."""
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
        """Put bytes that are held already on a tenant's account. Raises Overloaded where it has its share."""
        if not size:
            return
        share = self.limit // TENANTS_SHARE
        if self._of.get(tenant, 0) + size > share:
            self._make_room(tenant)
            if self._of.get(tenant, 0) + size > share:
                raise _full(share, "this tenant's requests")
        self._of[tenant] = self._of.get(tenant, 0) + size

    def hold(self, tenant: str | None, size: int) -> None:
        """Count bytes that have arrived, before they are kept. Raises Overloaded where they must not be."""
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
        """Give up the bodies, of a tenant or of all, that have been under way for longer than one may pause.

        Else they who never finish what they send could shut everybody else out, at a byte now and then.
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


def _full(limit: int, whose: str) -> Overloaded:
    return Overloaded(
        f"The bodies of {whose} would take more than {limit} bytes (from --buffered-limit); try again",
        retry_after=COME_BACK,
    )
