"""What providers charge for input, for policies that do not say: the one table of prices.

Reads and writes of a cache are in the price of plain input, which is 1; `input_price` is in USD for
a million tokens. The model's name finds the row, because a gateway can have any address. Models
with public weights are found by their provider's host only, because anybody may serve them.
"""

from __future__ import annotations

import re
from functools import lru_cache
from ipaddress import IPv6Address, ip_address
from urllib.parse import urlsplit

import msgspec


class Prices(msgspec.Struct, frozen=True):
    """What the input of some models costs, and where that was read."""

    # what they are called, with spaces between; in a result, also "this machine" or "unknown"
    models: str
    cached_read: float
    cache_write: float
    input_price: float | None = None  # None: the list does not say
    # above this many tokens, all input of a request costs `long_factor` times as much
    long_above: int | None = None
    long_factor: float = 2.0
    source: str = ""  # where and in which month this was read
    cache_lifetime: int | None = None
    """Seconds after which upstream's cache has certainly lost what nobody read; None if the
    provider does not say."""

    def factor(self, prompt: int) -> float:
        """How many times the usual price a prompt of so many tokens costs."""
        return self.long_factor if self.long_above is not None and prompt > self.long_above else 1.0


class PriceList(msgspec.Struct, frozen=True):
    """One provider's prices. `newest` is for models that the list does not name."""

    provider: str
    hosts: tuple[str, ...]
    # how its models' names begin, if only this provider has them, wherever they are served
    anywhere: tuple[str, ...]
    source: str
    newest: Prices
    named: tuple[Prices, ...]
    cache_lifetime: int | None = None


DEARER = 1.01
"""A request or a session counts as dearer if it costs more than this many times what it would have
cost as it came."""
_LONG = 272_000

PRICE_LISTS = (
    PriceList(
        "OpenAI",
        ("openai.com", "openai.azure.com"),
        ("gpt-3.5", "gpt-4", "gpt-4o", "gpt-4.1", "gpt-5", "gpt-6", "o1", "o3", "o4"),
        "https://developers.openai.com/api/docs/pricing, 2026-11",
        Prices("gpt-5.6 and newer", 0.1, 1.25, None, _LONG),
        (
            Prices("gpt-6.1-sol gpt-6.2-sol", 0.05, 1.25, 2.0, _LONG),
            Prices("gpt-6-astra", 0.1, 1.25, 10.0, _LONG),
            Prices("gpt-6-sol gpt-5.6-terra", 0.1, 1.25, 2.0, _LONG),
            Prices("gpt-6-luna", 0.1, 1.25, 0.1, _LONG),
            Prices("gpt-5.6-luna", 0.1, 1.25, 0.2, _LONG),
            Prices("gpt-5.6 gpt-5.6-sol", 0.1, 1.25, 4.0, _LONG),
            Prices("gpt-5.5", 0.1, 1.0, 5.0, _LONG),
            Prices("gpt-5.4", 0.1, 1.0, 2.5, _LONG),
            Prices("gpt-5.4-mini", 0.1, 1.0, 0.75),
            Prices("gpt-5.4-nano", 0.1, 1.0, 0.2),
            Prices("gpt-5.4-pro gpt-5.5-pro", 1.0, 1.0, 30.0, _LONG),
            Prices("gpt-5.2 gpt-5.3", 0.1, 1.0, 1.75),
            Prices("gpt-5 gpt-5.1", 0.1, 1.0, 1.25),
            Prices("gpt-5-mini gpt-5.1-codex-mini", 0.1, 1.0, 0.25),
            Prices("gpt-5-nano", 0.1, 1.0, 0.05),
            Prices("gpt-4.1 o3", 0.25, 1.0, 2.0),
            Prices("gpt-4.1-mini", 0.25, 1.0, 0.4),
            Prices("gpt-4.1-nano", 0.25, 1.0, 0.1),
            Prices("o4-mini", 0.25, 1.0, 1.1),
            Prices("gpt-4o", 0.5, 1.0, 2.5),
            Prices("gpt-4o-mini", 0.5, 1.0, 0.15),
            Prices("o1", 0.5, 1.0, 15.0),
            Prices("o1-mini o3-mini", 0.5, 1.0, 1.1),
            Prices("gpt-3.5 gpt-4", 1.0, 1.0),  # these have no cache
        ),
    ),
    PriceList(
        "Anthropic",
        ("anthropic.com", "claude.com"),
        ("claude",),
        "https://platform.claude.com/docs/en/about-claude/pricing, 2026-11",
        Prices("claude", 0.1, 1.25),
        (
            Prices("fable-5.1 mythos-5.1", 0.025, 1.25, 10.0),
            Prices("fable-5 mythos-5", 0.1, 1.25, 10.0),
            Prices("opus-5.5", 0.05, 1.25, 4.0),
            Prices("opus-5 opus-4.8 opus-4.7 opus-4.6 opus-4.5", 0.1, 1.25, 5.0),
            Prices("opus-4.1 opus-4 3-opus", 0.1, 1.25, 15.0),
            Prices("sonnet-5.5", 0.05, 1.25, 2.0),
            Prices("sonnet-5", 0.1, 1.25, 2.0),
            Prices("sonnet-4.5", 0.1, 1.25, 3.0, 200_000),
            Prices("sonnet-4.6 sonnet-4 3.7-sonnet 3.5-sonnet", 0.1, 1.25, 3.0),
            Prices("haiku-5.5", 0.1, 1.25, 0.1, 100_000, 5.0),
            Prices("haiku-4.5", 0.1, 1.25, 1.0),
            Prices("3.5-haiku", 0.1, 1.25, 0.8),
        ),
        cache_lifetime=300,
    ),
    PriceList(
        "Gemini",
        # others of Google's serve everybody's models, which names tell
        ("generativelanguage.googleapis.com",),
        ("gemini",),
        "https://ai.google.dev/gemini-api/docs/pricing, 2026-10",
        Prices("gemini", 0.1, 1.0),
        (
            Prices("gemini-3.8-flash", 0.1, 1.0, 1.5),  # from January 2027 on; half of that before
            Prices("gemini-3.5-flash", 0.1, 1.0, 1.5),
            Prices("gemini-3-flash", 0.1, 1.0, 0.5),
            Prices("gemini-3-pro gemini-3.1-pro", 0.1, 1.0, 2.0, 200_000),
            Prices("gemini-2.5-pro", 0.1, 1.0, 1.25, 200_000),
            Prices("gemini-2.5-flash", 0.1, 1.0, 0.3),
            Prices("gemini-2.5-flash-lite", 0.1, 1.0, 0.1),
        ),
    ),
    PriceList(
        "xAI",
        ("x.ai",),
        ("grok",),
        "https://docs.x.ai/developers/models, 2026-11",
        Prices("grok", 0.25, 1.0),
        (
            Prices("grok-4.6", 0.25, 1.0, 2.0, 200_000),
            Prices("grok-4.5", 0.15, 1.0, 2.0, 200_000),
            Prices("grok-4.3", 0.16, 1.0, 1.25, 200_000),
        ),
    ),
    PriceList(
        "DeepSeek",
        ("deepseek.com",),
        (),
        "https://api-docs.deepseek.com/quick_start/pricing (off-peak), 2026-11",
        Prices("deepseek", 0.02, 1.0),
        (
            Prices("deepseek-flash deepseek-v4-flash", 0.02, 1.0, 0.15),
            Prices("deepseek-v4-pro", 0.033, 1.0, 0.66),
        ),
    ),
)

FREE = Prices("this machine", 0.0, 1.0, 0.0, source="no price list, as its cache is read at once")
"""For loopback. A server elsewhere may be a gateway, and then reading is not free."""
ASSUMED = Prices("unknown", 0.1, 1.25, source="no price list, so the dearest ones' are assumed")
"""For models of no list."""
_AN_HOUR = re.compile(rb'"ttl"\s*:\s*"1h"')
"""The longer of Anthropic's two lifetimes, in a request. Within a string, the quotation marks would
be escaped."""
_NAME = 200  # characters of a model's name that are looked at
_OTHER = r"-(\d|(mini|nano|lite|pro)(?![a-z]))"
_DATE = re.compile(r"-?20\d\d-?[01]\d-?[0-3]\d")


def price_of(base_url: str, model: str = "") -> Prices:
    """Return what this model's input costs at this address. Without a model: what the host's newest
    models cost."""
    try:
        host = urlsplit(base_url).hostname or ""
    except ValueError:
        return ASSUMED  # no address; whoever checks the policy names its place
    return FREE if is_loopback(host) else _looked_up(host, model[:_NAME].lower())


def cache_lifetime(base_url: str, model: str, body: bytes) -> int | None:
    """Return the seconds for which upstream keeps in its cache what nobody reads; None if that is
    not known. A gateway on this machine has the provider's cache behind it. Only Anthropic says
    when an entry ends (platform.claude.com/docs/en/build-with-claude/prompt-caching, 2026-11).
    OpenAI names a least lifetime (openai
    3.57.0)."""
    lifetime = _looked_up(urlsplit(base_url).hostname or "", model[:_NAME].lower()).cache_lifetime
    return 3600 if lifetime and _AN_HOUR.search(body) else lifetime


@lru_cache(maxsize=1024)
def is_loopback(host: str) -> bool:
    """Whether a host name or address, as in `--host` or in a URL, is the machine itself."""
    name = host.lower().removesuffix(".")
    if name == "localhost" or name.endswith(".localhost"):  # RFC 6761, 6.3
        return True
    try:
        address = ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return (mapped or address).is_loopback


@lru_cache(maxsize=1024)
def _looked_up(host: str, model: str) -> Prices:
    """The row with the longest name in this model's, of the host's list or else of the list that
    has such names."""
    model = _plain(_DATE.sub("", model))
    lists = [
        one for one in PRICE_LISTS if any(f".{host}".endswith(f".{known}") for known in one.hosts)
    ]
    lists = lists or [
        one for one in PRICE_LISTS if any(_has(model, start, "[a-z0-9]") for start in one.anywhere)
    ]
    if not lists:
        return ASSUMED
    rows = {name: row for row in lists[0].named for name in row.models.split()}
    # `gpt-5` is not in `gpt-5-7` or `gpt-5-mini`: other models.
    found = max(
        (name for name in rows if _has(model, name, rf"[a-z0-9]|{_OTHER}")), key=len, default=""
    )
    row = rows.get(found, lists[0].newest)
    return msgspec.structs.replace(
        row, source=lists[0].source, cache_lifetime=lists[0].cache_lifetime
    )


def _has(model: str, name: str, but: str) -> bool:
    """Whether a model's name has this one in it, without more of a word before it, and without
    `but` behind it."""
    return re.search(rf"(?<![a-z0-9]){_plain(name)}(?!{but})", model) is not None


def _plain(name: str) -> str:
    """The name with one spelling of versions: `claude-opus-4.5` and `claude-opus-4-5` are the
    same."""
    return re.sub(r"[._@]", "-", name)
