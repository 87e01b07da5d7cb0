"""Checks deep health, for people and monitors: whether the store and the upstreams answer now.

An orchestrator's probes should use plain `/health` instead: without its store a replica still serves requests, so
taking it out of service gains nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

from proxy.errors import UpstreamFault
from proxy.policy import Policy
from proxy.stores.guarded import Guarded
from proxy.upstream.models import ModelsClient

SECONDS = 2.0
"""Seconds for all checks together, as they run side by side."""

UPSTREAMS = 100
"""Most upstreams that one check asks: policies may name thousands."""


class DeepHealth:
    """Checks the store and the upstreams that policies name, without sending anybody's key."""

    def __init__(self, store: Guarded, environment: Mapping[str, str]) -> None:
        self._store = store
        self._environment = environment
        self._client: ModelsClient | None = None

    async def check(self, policies: Iterable[Policy]) -> tuple[bool, Mapping[str, Any]]:
        """Return whether everything answers, and a page with each part's fault, null for a part that answers."""
        addresses = sorted({address for policy in policies for address in _addresses(policy)})[:UPSTREAMS]
        if self._client is None:  # made only now, because few processes ever check their deep health
            self._client = await asyncio.to_thread(ModelsClient, self._environment)
        fault, *faults = await asyncio.gather(
            self._store.check(SECONDS), *(_upstream_fault(self._client, address) for address in addresses)
        )
        healthy = fault is None and not any(faults)
        return healthy, {
            "status": "healthy" if healthy else "degraded",
            "store": {"fault": fault, "breaker": self._store.state},
            "upstreams": dict(zip(addresses, faults, strict=True)),
        }


def _addresses(policy: Policy) -> Iterable[str]:
    return (upstream.base_url for upstream in policy.upstreams)


async def _upstream_fault(client: ModelsClient, address: str) -> str | None:
    """Return the upstream's fault, if any. Any status below 500 is fine, even 401: the server answers, and we sent no
    key.
    """
    try:
        status = await client.status(address, SECONDS)
    except UpstreamFault as fault:
        return fault.detail or fault.message
    return f"answered {status}" if status >= 500 else None
