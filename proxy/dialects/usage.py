"""Reads what replies say about their cost, and adds up what the rounds of one reply cost.

The APIs and their servers say the same in many spellings. Anthropic counts what a cache held and took up apart from the
input tokens, everybody else within them. Tokens are upstream's.
"""

from __future__ import annotations

import re

import msgspec
from msgspec import Raw

from proxy import rawjson
from proxy.plan.turn import Usage
from proxy.rawjson import NULL, Members, number, object_of, whole

_PROMPT, _INPUT = "prompt_tokens", "input_tokens"
_COMPLETION = ("completion_tokens", "output_tokens")
_APART = ("cache_creation_input_tokens", "cache_read_input_tokens")
"""Anthropic's parts of a prompt, beside `input_tokens`."""
_DETAILS = ("prompt_tokens_details", "input_tokens_details")
CACHED = ("cached_tokens", "cache_read_input_tokens", "prompt_cache_hit_tokens")
"""OpenAI's, Anthropic's and DeepSeek's name for input that was read from the cache."""
WRITTEN = ("cache_write_tokens", "cache_creation_input_tokens", "cache_creation_tokens")
"""OpenAI's (from GPT-5.6), Anthropic's and LiteLLM's name for input that was written to the cache."""

_CACHE = (CACHED, WRITTEN)
_NAMES = (_PROMPT, _INPUT, *_COMPLETION, *CACHED, *WRITTEN)
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
    """Return what the last bytes of a reply that is only relayed say about its cost, or None if they do not."""
    said: dict[str, int] = {}
    for name, count in _COUNT.findall(end):
        said[name.decode()] = max(int(count), said.get(name.decode(), 0))
    prompt = said.get(_PROMPT) or said.get(_INPUT, 0)
    if _PROMPT not in said and _INPUT in said:
        prompt += sum(said.get(part, 0) for part in _APART)
    if not prompt or _SEARCHES.search(end):
        return None
    groups = (_COMPLETION, *_CACHE)
    completion, cached, written = (max((said[one] for one in names if one in said), default=None) for names in groups)
    return Reported(prompt, completion or 0, None if cached is None else min(cached, prompt), written)


class UsageFields(msgspec.Struct, frozen=True):
    """What an API calls the parts of a reply's usage."""

    prompt: str
    completion: str
    total: str = ""


CHAT = UsageFields("prompt_tokens", "completion_tokens", "total_tokens")
MESSAGES = UsageFields("input_tokens", "output_tokens")
RESPONSES = UsageFields("input_tokens", "output_tokens", "total_tokens")

_SUMMED = (
    *("completion_tokens_details", "output_tokens_details", "server_tool_use"),
    *("cost", "cost_details", "num_sources_used", "num_server_side_tools_used"),  # OpenRouter's and xAI's
)
"""What else every round adds to: numbers, or objects of numbers."""


class UsageLedger:
    """Counts what the rounds cost, and computes the usage that the client sees.

    The client sees the last round's prompt tokens, from which it estimates its context, and the completion tokens of
    all rounds, as well as whatever else was used in all of them, such as searches of upstream's own.
    """

    def __init__(self, fields: UsageFields) -> None:
        self._fields = fields
        self.spent = Usage()
        self._carried: Members = {}

    def add(self, raw: Raw | None) -> None:
        """Add the usage of a round that has ended."""
        usage = object_of(raw)
        prompt = whole(usage.get(self._fields.prompt))
        self.spent.said += prompt > 0
        self.spent.prompt += prompt
        self.spent.largest = max(self.spent.largest, prompt)
        self.spent.completion += whole(usage.get(self._fields.completion))
        places = [usage, *(object_of(usage.get(details)) for details in _DETAILS)]
        cached, written = ([place[name] for place in places for name in names if name in place] for names in _CACHE)
        self.spent.cached += next(filter(None, map(whole, cached)), 0)
        self.spent.written += next(filter(None, map(whole, written)), 0)
        self.spent.cache_told |= bool(cached)

    def carry(self, raw: Raw | None) -> None:
        """Carry this usage over, because another round follows."""
        usage = object_of(raw)
        self.spent.hidden += whole(usage.get(self._fields.completion))
        self._carried = added(self._carried, _summed(usage))

    def total(self, raw: Raw) -> Raw:
        """Return the newest round's usage with the completion tokens of the earlier rounds added."""
        usage = object_of(raw)
        completion = whole(usage.get(self._fields.completion)) + self.spent.hidden
        total = whole(usage.get(self._fields.prompt)) + completion
        sums = {self._fields.completion: completion, self._fields.total: total}
        told = usage | {key: Raw(b"%d" % tokens) for key, tokens in sums.items() if key in usage}
        return Raw(rawjson.encode(told | added(self._carried, _summed(usage))))


def _summed(usage: Members) -> Members:
    return {key: usage[key] for key in _SUMMED if key in usage}


def added(earlier: Members, later: Members, depth: int = 3) -> Members:
    """Return the later members with the earlier ones added: numbers, and those within objects of this `depth`. Of
    anything else, the later one is kept, unless it is null."""
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


def with_prompt(usage: Members) -> Raw:
    """Return Anthropic's usage with all tokens of the prompt as its input tokens, to be added up."""
    total = sum(whole(usage.get(part)) for part in (_INPUT, *_APART))
    return Raw(rawjson.encode(usage | {_INPUT: Raw(b"%d" % total)}))


def merged(earlier: Members, raw: Raw) -> Members:
    """Return a usage brought up to date with what a later event says. What it leaves out or nulls stays."""
    return earlier | {key: value for key, value in object_of(raw).items() if not rawjson.is_null(value)}
