"""What the client and its policy want done with a request."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from proxy.plan.reasons import Reason
from proxy.policy import Mode, Policy

if TYPE_CHECKING:
    from proxy.requests.exchange import Exchange


def held_back(client: Exchange, policy: Policy) -> Reason:
    """Return why the client or the policy wants the request sent as it came, or `Reason.NONE`."""
    if policy.offload.mode is Mode.OFF:
        return Reason.OFF
    return Reason.HEADER if b"off" in _wishes(client) else Reason.NONE


def observes(client: Exchange, policy: Policy) -> bool:
    """Whether the client or the policy wants the plan recorded and not carried out."""
    return policy.offload.mode is Mode.OBSERVE or b"observe" in _wishes(client)


def _wishes(client: Exchange) -> Collection[bytes]:
    """Return what the client says in its header `x-offload`. Proxies may join several of them into a list."""
    if not client.has_wish:
        return ()
    return {wish.strip().lower() for wish in b",".join(client.headers.get_all(b"x-offload")).split(b",")}
