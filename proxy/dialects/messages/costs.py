"""Reads the usage of replies. This API counts what its cache held, and what it took up, apart from the input tokens."""

from __future__ import annotations

import re

from msgspec import Raw

from proxy import rawjson
from proxy.dialects.usage import Reported, UsageFields
from proxy.dialects.values import Members, object_of, whole

INPUT = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
"""The parts of a prompt."""

USAGE = UsageFields(
    prompt="input_tokens",
    completion="output_tokens",
    total="",
    prompt_details="",
    completion_details="output_tokens_details",
    cached="cache_read_input_tokens",
    counted=("server_tool_use",),
)

_counts = {part: re.compile(rb'(?<!\\)"%b"\s*:\s*(\d{1,11})(?![\d.eE])' % part.encode()) for part in INPUT}
"""Members of the usage. Within a string of the reply, the quotation marks would be escaped."""
_completion = re.compile(rb'(?<!\\)"output_tokens"\s*:\s*(\d{1,11})(?![\d.eE])')
_searches = re.compile(rb'(?<!\\)"web_(?:search|fetch)_requests"\s*:\s*[1-9]')
"""Upstream's own tools ask the model several times, and the usage covers them all."""


def prompt_tokens(end: bytes) -> int:
    """Return the tokens of the prompt, as upstream counted them, from the last bytes of a reply that is only relayed; 0
    if they do not say."""
    if _searches.search(end):
        return 0
    found = {part: [int(count) for count in pattern.findall(end)] for part, pattern in _counts.items()}
    return sum(counts[-1] for counts in found.values() if counts) if found[INPUT[0]] else 0


def reported(end: bytes) -> Reported | None:
    """Return what these last bytes say about the cost, or None if they do not."""
    prompt = prompt_tokens(end)
    if not prompt:
        return None
    completion, cached = (pattern.findall(end) for pattern in (_completion, _counts[USAGE.cached]))
    return Reported(prompt, int(completion[-1]) if completion else 0, int(cached[-1]) if cached else None)


def with_prompt(usage: Members) -> Raw:
    """Return the usage with all tokens of the prompt as its input tokens, to be added up."""
    total = sum(whole(usage.get(part)) for part in INPUT)
    return Raw(rawjson.encode(usage | {USAGE.prompt: Raw(b"%d" % total)}))


def merged(earlier: Members, raw: Raw) -> Members:
    """Return a usage brought up to date with what a later event says. What it leaves out or nulls stays."""
    return earlier | {key: value for key, value in object_of(raw).items() if not rawjson.is_null(value)}
