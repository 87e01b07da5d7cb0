"""Who sends a request, and whose records it uses.

Reads use the claimed identity. Anybody can claim one, so a request counts as its key's, and leaves
nothing in the client's records, until upstream has accepted it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TypeVar

from proxy.dialects import Dialect
from proxy.plan.turn import Request
from proxy.policies.tenants import Tenant, identified
from proxy.requests.exchange import Exchange
from proxy.requests.records import Records
from proxy.requests.rounds import Services
from proxy.telemetry import logs

T = TypeVar("T")

_without_identity = logs.Limited(logging.getLogger(__name__))


class Caller:
    """Who sends one request, in which API, and what the process has for it."""

    def __init__(self, services: Services, dialect: Dialect, client: Exchange, key: Tenant) -> None:
        self._opened: Records | None = None
        self.services = services
        self.dialect = dialect
        self.client = client
        self.key = key
        """The tenant of the caller's key."""
        self.owner = key.namespace
        """The namespace whose records the request reads."""
        self.vouched = True
        """Whether the key is listed, or upstream has accepted the request, so that it may write
        there."""

    def identify(self, request: Request) -> None:
        """Take the client's identity from the request, if the policy goes by one."""
        key = self.key
        if not key.policy.identity.given:
            return
        headers = self.client.headers
        if not key.listed:  # upstream has to check what we go by
            headers = self.services.relay.request(self.client, key, b"").headers
        owner = identified(key, headers, request.members, self.client.target)
        if owner is not None:
            self.owner = owner.namespace
            self.vouched = key.listed
            return
        by = key.policy.identity
        _without_identity(
            key.name, f"{key.name}: a request does not say who it is by {by}; its key counts"
        )

    @property
    def namespace(self) -> str:
        """The namespace that the request counts to, and writes to."""
        return self.owner if self.vouched else self.key.namespace

    @property
    def records(self) -> Records:
        """The owner's records. Most requests need none, so they are opened when something asks for
        them."""
        if self._opened is None:
            self._opened = Records(
                self.services.store.visit(), self.owner, key_namespace=self.key.namespace
            )
        return self._opened

    @property
    def store_errors(self) -> Mapping[str, int]:
        """How often each store operation had no answer."""
        return self._opened.errors if self._opened else {}

    async def run(self, work: Callable[[], T], size: int) -> T:
        """Return the result of `work`, which looks through so many bytes, in the key's share of the
        threads. Raises Overloaded."""
        return await self.services.threads.run(self.key.namespace, work, size)
