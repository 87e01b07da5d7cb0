"""What an application is made of besides the way of a request: pages, operations, captures.

A part looks at requests that have ended, serves paths of its own, or both. The core knows no part
by name.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple

from starlette.routing import Route

from proxy.errors import ProxyError
from proxy.policies.tenants import Tenant
from proxy.requests.exchange import Exchange
from proxy.requests.prepared import Prepared
from proxy.telemetry.outcome import Outcome

Handler = Callable[[Exchange, Tenant], Awaitable[None]]
"""Serves an admitted request: replies and records one outcome, or raises ProxyError or ClientGone
before either."""


class Door(NamedTuple):
    """How a part answers a path for callers: with their tenant's policy, places and bounds, as a
    chat is answered."""

    answer: Handler
    api: str = ""
    """The API whose keys and upstream count; "": none in particular."""
    fault_body: Callable[[ProxyError], bytes] = ProxyError.body
    check: Callable[[Tenant], None] = lambda tenant: None
    """Raises ProxyError for callers that may not come in."""


class Part:
    """Does nothing; parts override what they need."""

    pages: Sequence[Route] = ()
    """For people and browsers, who need no key: below `/_offload/`, where Host and Origin are
    checked, or at fixed paths."""

    def door(self, path: bytes) -> Door | None:
        """Return how callers are answered at this path, None if this part does not serve it."""
        return None

    def watch(self, outcome: Outcome, prepared: Prepared | None, client: Exchange | None) -> None:
        """Take in a request that has ended: of a chat, what was made of it and who asked. Must
        return at once."""

    def room_is_short(self) -> None:
        """Give up what the store could do without, because it has no room for other records. Must
        return at once."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run what the part does beside requests, until the process has answered its last one."""
        yield
