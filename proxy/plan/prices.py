"""What providers charge for cached input, for policies that do not say. Plain input is 1."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

import msgspec


class CachePrices(msgspec.Struct, frozen=True):
    """The prices of upstreams at these hosts, and where they were read."""

    name: str
    hosts: tuple[str, ...]
    cached_read: float
    cache_write: float
    source: str
    seen: str
    """The month in which the source said so."""


OWN_SERVERS = CachePrices("your own servers", (), 0.0, 1.0, "no price list: reading a cache takes no time", "2026-11")
"""For hosts without a domain and for private addresses: only what is written takes time."""

PRICES = (
    CachePrices("OpenAI", ("openai.com",), 0.1, 1.0, "https://developers.openai.com/api/docs/pricing", "2026-11"),
    CachePrices(
        "Anthropic",
        ("anthropic.com",),
        0.1,
        1.25,
        "https://platform.claude.com/docs/en/build-with-claude/prompt-caching",
        "2026-11",
    ),
    CachePrices(
        "Gemini",
        ("googleapis.com",),
        0.1,
        1.0,
        "https://docs.cloud.google.com/gemini-enterprise-agent-platform/models/context-cache/context-cache-overview",
        "2026-11",
    ),
    CachePrices(
        "DeepSeek", ("deepseek.com",), 0.03, 1.0, "https://api-docs.deepseek.com/quick_start/pricing", "2026-10"
    ),
)
"""By provider: for the newest models, as a provider's older ones cost more to read."""


def prices_of(base_url: str) -> CachePrices | None:
    """Return the prices of an upstream at this address; None if its host is not in the table."""
    try:
        host = urlsplit(base_url).hostname or ""
    except ValueError:
        return None  # no address; whoever checks the policy names its place
    for prices in PRICES:
        if any(host == one or host.endswith(f".{one}") for one in prices.hosts):
            return prices
    return OWN_SERVERS if _is_private(host) else None


def _is_private(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_private
    except ValueError:
        return bool(host) and "." not in host
