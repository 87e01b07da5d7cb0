"""Compares what upstreams say of their caches with the prices in force, and recommends the key to set.

It only recommends: plans follow the policy alone, because replicas have seen different replies and must plan alike.
"""

from __future__ import annotations

import logging
from collections import OrderedDict

import msgspec

from proxy.plan.prices import ASSUMED, price_of
from proxy.policy import Offload
from proxy.telemetry import logs
from proxy.telemetry.outcome import Outcome

logger = logging.getLogger(__name__)

ENOUGH = 20
"""Requests after which what was never seen counts as missing."""
LARGE = 4_000
"""Tokens of a prompt that every cache keeps. The smallest that OpenAI and Anthropic keep have 1,024 to 4,096."""
LATER = 4
"""Messages of a history above which its beginning was sent before."""
MOST = 1_000
"""Most models of tenants that are watched, the latest ones."""


class Seen(msgspec.Struct):
    """What replies for one model have said. Tokens are upstream's."""

    requests: int = 0
    cached: int = 0
    written: int = 0


def advice(base_url: str, model: str, offload: Offload, seen: Seen) -> str:
    """Return the key to set in one sentence; empty if the prices in force fit what was seen."""
    where, enough = f"{base_url} with {model}", seen.requests >= ENOUGH
    if not offload.cached_read and (listed := price_of("", model)) is not ASSUMED and enough:
        return (
            f"{where}: reading the cache is free in the policy, but a price list has this model; behind a gateway, "
            f"set `offload: {{cached_read: {listed.cached_read:g}, cache_write: {listed.cache_write:g}}}`"
        )
    if seen.written and offload.cache_write <= 1 and offload.cached_read:
        return (
            f"{where}: upstream reports tokens that it writes to its cache, and the policy has them for nothing; if it "
            "charges for them, set `offload: {cache_write: 1.25}`"
        )
    if enough and not seen.cached and 0 < offload.cached_read < 1:
        return (
            f"{where}: {seen.requests} replies showed no cached token; if it caches nothing, set "
            "`offload: {cached_read: 1, cache_write: 1}`"
        )
    if enough and seen.cached and not seen.written and offload.cache_write > 1:
        return (
            f"{where}: {seen.requests} replies showed cached tokens and none that were written; if writing to the "
            "cache costs nothing, set `offload: {cache_write: 1}`"
        )
    return ""


class Adviser:
    """Watches all requests of a process. `given` is the newest advice for each model of a tenant."""

    def __init__(self) -> None:
        self._seen: OrderedDict[tuple[str, str, str], Seen] = OrderedDict()
        self.given: dict[tuple[str, str, str], str] = {}

    def note(self, outcome: Outcome, base_url: str, offload: Offload) -> None:
        """Take in a request that has ended, and log new advice once."""
        if outcome.prompt_tokens < LARGE or outcome.messages <= LATER:
            return
        key = (outcome.tenant, base_url, outcome.model[: logs.LONGEST])
        seen = self._seen.setdefault(key, Seen())
        self._seen.move_to_end(key)
        if len(self._seen) > MOST:
            self.given.pop(self._seen.popitem(last=False)[0], None)
        seen.requests += 1
        seen.cached += outcome.cached_tokens
        seen.written += outcome.written_tokens
        text = advice(base_url, key[2], offload, seen)
        if text and key not in self.given:
            logs.event(logger, "the prices of a policy may be wrong", logging.WARNING, tenant=key[0], advice=text)
        if text:
            self.given[key] = text
        else:
            self.given.pop(key, None)
