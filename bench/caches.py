"""The cost of a sequence of prompts under the prompt caches that providers document, in plain input
tokens.

    cache = MODELS[WRITTEN].cold()
    sum(cache.charge(prompt) for prompt in prompts)

Nothing is ever evicted: agents ask again within five minutes, for which all these caches keep an
entry.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from itertools import accumulate
from typing import Protocol

import msgspec

Segment = tuple[Hashable, int, int]
"""A piece of the prompt: a key (equal keys mean the same text), its tokens, and its content
blocks."""


class Prompt:
    """A prompt by its segments. `chain[i]` identifies the prefix that ends with segment *i*.

    `head` is the place of the first message, which is mostly the system message. `marks` are the
    places of the proxy's own cache breakpoints.
    """

    def __init__(
        self, segments: Iterable[Segment], head: int = 0, marks: Iterable[int] = ()
    ) -> None:
        self.segments = tuple(segments)
        self.head = head
        self.marks = frozenset(marks)
        self.ends = list(accumulate(tokens for _, tokens, _ in self.segments))
        self.blocks = list(accumulate(blocks for _, _, blocks in self.segments))
        self.chain = list(
            accumulate((key for key, _, _ in self.segments), lambda link, key: hash((link, key)))
        )

    @property
    def tokens(self) -> int:
        return self.ends[-1]


class Cache(Protocol):
    """One provider's cache with its entries."""

    def charge(self, prompt: Prompt) -> float:
        """The cost of this prompt, which the cache knows from now on."""


class Model(Protocol):
    """A kind of cache."""

    def cold(self) -> Cache:
        """An empty cache of this kind."""


class Prefix(msgspec.Struct, frozen=True):
    """A cache that reads the longest prefix of any earlier prompt, in whole units; the rest is
    plain input."""

    unit: int
    """Tokens."""
    least: int
    """The least tokens of a cached prefix."""
    read: float

    def cold(self) -> Cache:
        return _PrefixCache(self)


class Breakpoints(msgspec.Struct, frozen=True):
    """A cache that writes entries at a prompt's breakpoints, and looks for them there and at the
    blocks just before.

    Prompts have two breakpoints, where agents and gateways put them: after the system message and
    at the end. `marks`: they also have the proxy's own, before and behind what its newest event
    moved.
    """

    read: float
    write: float
    lookback: int
    """Blocks at which the cache looks for an entry, the breakpoint's own included."""
    least: int
    """The least tokens of an entry."""
    marks: bool = False

    def cold(self) -> Cache:
        return _BreakpointCache(self)


class _PrefixCache:
    def __init__(self, model: Prefix) -> None:
        self._model = model
        self._known: set[int] = set()

    def charge(self, prompt: Prompt) -> float:
        hit = self._hit(prompt)
        self._known.update(prompt.chain)
        return prompt.tokens - (1 - self._model.read) * hit

    def _hit(self, prompt: Prompt) -> int:
        matched = 0
        for link, end in zip(prompt.chain, prompt.ends, strict=True):
            if link not in self._known:
                break
            matched = end
        whole = matched // self._model.unit * self._model.unit
        return whole if whole >= self._model.least else 0


class _BreakpointCache:
    def __init__(self, model: Breakpoints) -> None:
        self._model = model
        self._written: set[int] = set()

    def charge(self, prompt: Prompt) -> float:
        model = self._model
        own = prompt.marks if model.marks else frozenset[int]()
        breakpoints = sorted({prompt.head, len(prompt.segments) - 1} | own)
        places = [place for place in breakpoints if prompt.ends[place] >= model.least]
        if not places:
            return prompt.tokens
        hit = max(self._found(prompt, place) for place in places)
        written = max(prompt.ends[places[-1]], hit) - hit
        self._written.update(prompt.chain[place] for place in places)
        return model.read * hit + model.write * written + prompt.tokens - hit - written

    def _found(self, prompt: Prompt, breakpoint: int) -> int:
        """Tokens of the longest entry found from this breakpoint."""
        farthest = prompt.blocks[breakpoint] - self._model.lookback
        for place in range(breakpoint, -1, -1):
            if prompt.blocks[place] <= farthest:
                break
            if prompt.chain[place] in self._written:
                return prompt.ends[place]
        return 0


READS = "reads 0.1"
WRITTEN = "written breakpoints"
MARKED = "with our marks"
GPT_5_6 = "GPT-5.6"
ANYWHERE = 1 << 30
"""A cache that looks for an entry at every block."""
MODELS: dict[str, Model] = {
    # OpenAI before GPT-5.6 (https://developers.openai.com/cookbook/examples/prompt_caching_201):
    # exact prefixes, of prompts from 1,024 tokens on, in steps of 128. A hit costs a half with
    # GPT-4o and the o series, a quarter with GPT-4.1, a tenth from GPT-5 on
    # (https://developers.openai.com/api/docs/pricing); writing costs nothing extra.
    "reads 0.5": Prefix(128, 1024, 0.5),
    "reads 0.25": Prefix(128, 1024, 0.25),
    READS: Prefix(128, 1024, 0.1),
    # Anthropic (https://platform.claude.com/docs/en/build-with-claude/prompt-caching): entries at
    # breakpoints only, 20 blocks looked at from each; written for five minutes at 1.25, read at
    # 0.1; from 1,024 tokens on (Sonnet 4.5). Marked: with a third breakpoint and a fourth, both
    # the proxy's own, where the client marks its caches.
    WRITTEN: Breakpoints(0.1, 1.25, 20, 1024),
    MARKED: Breakpoints(0.1, 1.25, 20, 1024, marks=True),
    # OpenAI from GPT-5.6 on (https://developers.openai.com/api/docs/guides/prompt-caching): one
    # implicit breakpoint at the newest message, matched without a limit of blocks; written at 1.25,
    # read at 0.1; from 1,024 tokens on.
    GPT_5_6: Breakpoints(0.1, 1.25, ANYWHERE, 1024),
    "no cache": Prefix(1, 1, 1.0),
}
"""By name. Reading costs this part of plain input."""
