"""Reads what replies say about their cost, and adds up what the rounds of one reply cost.

The APIs and their servers say the same in many spellings. Anthropic counts what a cache held and
took up apart from the input tokens, everybody else within them. Tokens are upstream's.
"""

from __future__ import annotations

import re

import msgspec
from msgspec import Raw

from proxy import rawjson
from proxy.plan.turn import Usage
from proxy.rawjson import NULL, Members, number, object_of

_PROMPT = "prompt_tokens"
_INPUT = "input_tokens"
_COMPLETION = ("completion_tokens", "output_tokens")
_APART = ("cache_creation_input_tokens", "cache_read_input_tokens")
"""Anthropic's parts of a prompt, beside `input_tokens`."""
_CACHED = ("cached_tokens", "cache_read_input_tokens", "prompt_cache_hit_tokens")
"""OpenAI's, Anthropic's and DeepSeek's name for input that was read from the cache."""
_WRITTEN = ("cache_write_tokens", "cache_creation_input_tokens", "cache_creation_tokens")
"""OpenAI's (from GPT-5.6), Anthropic's and LiteLLM's name for input that was written to the
cache."""

_NAMES = (_PROMPT, _INPUT, *_COMPLETION, *_CACHED, *_WRITTEN)
_COUNT = re.compile(rb'(?<!\\)"(%b)"\s*:\s*(\d{1,11})(?![\d.eE])' % "|".join(_NAMES).encode())
"""A member of the usage. Within a string of the reply, the quotation marks would be escaped."""
_SEARCHES = re.compile(rb'(?<!\\)"web_(?:search|fetch)_requests"\s*:\s*[1-9]')
"""Upstream's own tools ask the model several times, and the usage covers them all."""


class Reported(msgspec.Struct, frozen=True):
    """What a reply says of its cost. `cached` and `written` are None if it does not say them."""

    prompt: int
    completion: int
    cached: int | None
    written: int | None = None


def reported(end: bytes) -> Reported | None:
    """Return what the last bytes of a reply that is only relayed say about its cost, or None if
    they do not."""
    said = _counted(end)
    return said if said.prompt and not _SEARCHES.search(end) else None


def _counted(usage: bytes) -> Reported:
    """Return what the JSON of a usage says, or of anything with a usage in it."""
    said: dict[str, int] = {}
    for name, count in _COUNT.findall(usage):
        said[name.decode()] = max(int(count), said.get(name.decode(), 0))
    prompt = said.get(_PROMPT) or said.get(_INPUT, 0)
    if _PROMPT not in said and _INPUT in said:
        prompt += sum(said.get(part, 0) for part in _APART)
    groups = (_COMPLETION, _CACHED, _WRITTEN)
    completion, cached, written = (
        max((said[one] for one in names if one in said), default=None) for names in groups
    )
    return Reported(
        prompt, completion or 0, None if cached is None else min(cached, prompt), written
    )


_SUMMED = (
    *(*_COMPLETION, "completion_tokens_details", "output_tokens_details", "server_tool_use"),
    # OpenRouter's and xAI's
    *("cost", "cost_details", "num_sources_used", "num_server_side_tools_used"),
)
"""What every round adds to: numbers, or objects of numbers."""
_TOTAL = "total_tokens"


class UsageLedger:
    """Counts what the rounds cost, and computes the usage that the client sees.

    The client sees the last round's prompt tokens, from which it estimates its context, and the
    completion tokens of all rounds, as well as whatever else was used in all of them, such as
    searches of upstream's own.
    """

    def __init__(self) -> None:
        self.spent = Usage()
        self._carried: Members = {}

    def add(self, raw: Raw | None) -> None:
        """Add the usage of a round that has ended."""
        said = _counted(bytes(raw or b""))
        self.spent.counted_rounds += said.prompt > 0
        self.spent.prompt += said.prompt
        self.spent.largest = max(self.spent.largest, said.prompt)
        self.spent.completion += said.completion
        self.spent.cached += said.cached or 0
        self.spent.written += said.written or 0
        self.spent.cache_told |= said.cached is not None

    def carry(self, raw: Raw | None) -> None:
        """Carry this usage over, because another round follows."""
        usage = object_of(raw)
        hidden = _counted(bytes(raw or b"")).completion
        self.spent.hidden += hidden
        sums = {key: usage[key] for key in _SUMMED if key in usage}
        sums |= {_TOTAL: Raw(b"%d" % hidden)} if _TOTAL in usage else {}
        self._carried = added(self._carried, sums)

    def total(self, raw: Raw) -> Raw:
        """Return the newest round's usage with what the earlier rounds add to it."""
        return Raw(rawjson.encode(added(self._carried, object_of(raw))))


def added(earlier: Members, later: Members, depth: int = 3) -> Members:
    """Return the later members with the earlier ones added: numbers, and those within objects of
    this `depth`. Of anything else, the later one is kept, unless it is null."""
    sums = dict(later)
    for key, raw in earlier.items():
        other = later.get(key, NULL)
        if rawjson.is_null(other):
            sums[key] = raw
        elif (one := number(raw)) is not None and (two := number(other)) is not None:
            sums[key] = Raw(rawjson.encode(round(one + two, 12)))  # some are sums of money
        elif depth and object_of(raw) and object_of(other):
            sums[key] = Raw(rawjson.encode(added(object_of(raw), object_of(other), depth - 1)))
    return sums


def merged(earlier: Members, raw: Raw) -> Members:
    """Return a usage brought up to date with what a later event says. What it leaves out or nulls
    stays."""
    return earlier | {
        key: value for key, value in object_of(raw).items() if not rawjson.is_null(value)
    }
