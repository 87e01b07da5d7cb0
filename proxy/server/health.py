"""Deep health: whether what the proxy depends on answers now. Asked by people and monitors, never by the chat path.

A store that is down is no reason to take a replica out of service: requests are served all the same. So this is not
for the probes of an orchestrator, which `/health` is for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

from proxy.core.policy import Policy
from proxy.errors import ProxyError, UpstreamFault
from proxy.stores.guarded import Guarded
from proxy.upstream.client import UpstreamClient, UpstreamRequest
from proxy.upstream.headers import Headers

SECONDS = 2.0
"""For all checks together, as they are made side by side."""

UPSTREAMS = 100
"""Asked at most: policies may have thousands."""


async def deep(store: Guarded, upstream: UpstreamClient, policies: Iterable[Policy]) -> tuple[bool, Mapping[str, Any]]:
    """Whether all is well, and the page that says what is not: null where something answers, else the reason."""
    addresses = sorted({address for policy in policies for address in _addresses(policy)})[:UPSTREAMS]
    fault, *faults = await asyncio.gather(
        store.check(SECONDS), *(_upstream_fault(upstream, address) for address in addresses)
    )
    well = fault is None and not any(faults)
    return well, {
        "status": "healthy" if well else "degraded",
        "store": {"fault": fault, "breaker": store.state},
        "upstreams": dict(zip(addresses, faults, strict=True)),
    }


def _addresses(policy: Policy) -> Iterable[str]:
    return policy.upstream.base_url, *(rule.upstream.base_url for rule in policy.rules)


async def _upstream_fault(upstream: UpstreamClient, address: str) -> str | None:
    """Without anybody's key: 401 is an answer as good as any, as long as the server itself does not say it is ill."""
    request = UpstreamRequest(
        method="GET",
        url=address.rstrip("/") + "/models",
        headers=Headers(),
        content=b"",
        connect_timeout=SECONDS,
        first_byte_timeout=SECONDS,
        idle_timeout=SECONDS,
    )
    try:
        async with asyncio.timeout(SECONDS):
            reply = await upstream.send(request)
            await reply.aclose()
    except TimeoutError:
        return f"no answer within {SECONDS:g} s"
    except UpstreamFault as fault:
        return fault.detail or fault.message
    except ProxyError as error:
        return error.message
    return f"answered {reply.status}" if reply.status >= 500 else None
