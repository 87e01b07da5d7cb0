"""Reads what replies say about their cost, and adds up what the rounds of one reply cost."""

from __future__ import annotations

import re

import msgspec
from msgspec import Raw

from proxy import rawjson
from proxy.dialects.values import NULL, Members, number, object_of, whole
from proxy.plan.turn import Usage

_PROMPT = re.compile(rb'(?<!\\)"(?:prompt|input)_tokens"\s*:\s*(\d{1,11})(?![\d.eE])')
_COMPLETION = re.compile(rb'(?<!\\)"(?:completion|output)_tokens"\s*:\s*(\d{1,11})(?![\d.eE])')
_CACHED = re.compile(rb'(?<!\\)"(?:cached_tokens|prompt_cache_hit_tokens)"\s*:\s*(\d{1,11})(?![\d.eE])')
"""Members of the usage. Within a string of the reply, the quotation marks would be escaped."""


def prompt_tokens(end: bytes) -> int:
    """Return the tokens of the prompt, as upstream counted them, from the last bytes of a reply that is only relayed; 0
    if they do not say."""
    return max(map(int, _PROMPT.findall(end)), default=0)


def reported(end: bytes) -> Reported | None:
    """Return what the last bytes of a reply that is only relayed say about its cost, or None if they do not."""
    prompt = prompt_tokens(end)
    if not prompt:
        return None
    completion, cached = (list(map(int, pattern.findall(end))) for pattern in (_COMPLETION, _CACHED))
    return Reported(prompt, max(completion, default=0), min(max(cached), prompt) if cached else None)


DEPTH = 3
"""How deep the objects are nested in which numbers are added up."""
PLACES = 12
"""Decimal places of sums of money."""


class Reported(msgspec.Struct, frozen=True):
    """The tokens of a reply as upstream counted them. `cached` is None if it does not say how many it had cached."""

    prompt: int
    completion: int
    cached: int | None


class UsageFields(msgspec.Struct, frozen=True):
    """What an API calls the parts of a reply's usage."""

    prompt: str
    completion: str
    total: str
    prompt_details: str
    """An object whose `cached_tokens` are the input tokens that were read from upstream's cache."""
    completion_details: str
    cached: str = ""
    """Another name for the cached tokens, beside the others."""
    counted: tuple[str, ...] = ()
    """What else every round adds to: numbers, or objects of numbers."""


class UsageLedger:
    """Counts what the rounds cost, and computes the usage that the client sees.

    The client sees the last round's prompt tokens, from which it estimates its context, and the completion tokens of
    all rounds, as well as whatever else was used in all of them, such as searches of upstream's own.
    """

    def __init__(self, fields: UsageFields) -> None:
        self._fields = fields
        self.spent = Usage()
        self._earlier = 0
        self._sums = (fields.completion_details, *fields.counted)
        self._carried: Members = {}

    def add(self, raw: Raw | None) -> None:
        """Add the usage of a round that has ended."""
        usage = object_of(raw)
        prompt = whole(usage.get(self._fields.prompt))
        self.spent.said += prompt > 0
        self.spent.prompt += prompt
        self.spent.largest = max(self.spent.largest, prompt)
        self.spent.completion += whole(usage.get(self._fields.completion))
        self.spent.cached += self._cached(usage)

    def carry(self, raw: Raw | None) -> None:
        """Carry this usage over, because another round follows."""
        usage = object_of(raw)
        self._earlier += whole(usage.get(self._fields.completion))
        self.spent.hidden = self._earlier
        self._carried = added(self._carried, self._summed(usage))

    def total(self, raw: Raw) -> Raw:
        """Return the newest round's usage with the completion tokens of the earlier rounds added."""
        usage = object_of(raw)
        completion = whole(usage.get(self._fields.completion)) + self._earlier
        total = whole(usage.get(self._fields.prompt)) + completion
        sums = {self._fields.completion: completion, self._fields.total: total}
        told = usage | {key: Raw(b"%d" % tokens) for key, tokens in sums.items() if key in usage}
        return Raw(rawjson.encode(told | added(self._carried, self._summed(usage))))

    def _summed(self, usage: Members) -> Members:
        return {key: usage[key] for key in self._sums if key in usage}

    def _cached(self, usage: Members) -> int:
        """Return the input tokens read from upstream's cache."""
        details = object_of(usage.get(self._fields.prompt_details))
        return whole(details.get("cached_tokens")) or whole(usage.get(self._fields.cached))


def added(earlier: Members, later: Members, depth: int = DEPTH) -> Members:
    """Return the later members with the earlier ones added: numbers, and those within objects. Of anything else, the
    later one is kept, unless it is null."""
    sums = dict(later)
    for key, raw in earlier.items():
        other = later.get(key, NULL)
        if rawjson.is_null(other):
            sums[key] = raw
        elif (one := number(raw)) is not None and (two := number(other)) is not None:
            total = one + two
            sums[key] = Raw(rawjson.encode(round(total, PLACES) if isinstance(total, float) else total))
        elif depth and object_of(raw) and object_of(other):
            sums[key] = Raw(rawjson.encode(added(object_of(raw), object_of(other), depth - 1)))
    return sums
