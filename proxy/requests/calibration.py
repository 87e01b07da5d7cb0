"""Learns how many tokens upstream counts where we count one, by namespace, upstream and model.

We count with OpenAI's vocabularies. Others need more tokens for the same text: Qwen's takes 1.2 times as many for
German, and twice as many for columns of numbers, which we only know where the model's name tells the family. What fits
the window is what upstream counts, so the window is divided by a *factor*. Nothing else depends on it
(docs/architecture.md says why): thresholds of the policy are in our tokens.

A factor changes the window, and so possibly the plan, which breaks the upstream's prompt cache. Therefore it only
takes the values of a coarse grid, rises only if the largest prompts show that it must, and falls only after many that
show that it may. For vocabularies that we count exactly it is 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import msgspec

from proxy.lru import Lru
from proxy.plan.plan import WINDOW_MARGIN

CALLERS, MODELS = 10_000, 100
"""The most callers that are remembered, and the most models of each."""

STEP, MOST = 0.1, 3.0
"""The grid of factors, and the largest: the highest ratio that was measured for a kind of text is 2.3."""

SHARE = 0.25
"""Only a prompt of at least this share of the window teaches something. In small ones, the templates and texts that
upstream adds weigh as much as the vocabulary, and they do not matter for what fits."""

FALLS_AFTER = 8
"""Prompts in a row that allow a smaller factor, before it falls."""


class FactorBelief(msgspec.Struct, frozen=True):
    """The factor of one caller's model, as processes tell it each other. The one that fell most often counts, and among
    those the largest: so the order in which they are heard does not matter."""

    upstream: str
    model: str
    factor: float
    falls: int = 0
    """How often it has fallen before."""


Changed = Callable[[str, FactorBelief], None]
"""Called with the namespace whenever this process changes a factor."""


class _Factor(msgspec.Struct):
    """`lower`: the factors that the latest prompts allow, all of them below `value`."""

    value: float = 1.0
    lower: list[float] = msgspec.field(default_factory=list)
    falls: int = 0


class Calibration:
    """Factors by namespace, upstream and model. What one caller's upstream counts changes nobody else's requests."""

    def __init__(self, changed: Changed = lambda *_: None) -> None:
        self._changed = changed
        self._callers: Lru[str, dict[tuple[str, str], _Factor]] = Lru(CALLERS)

    def factor(self, namespace: str, upstream: str, model: str) -> float:
        """Return how many tokens upstream counts for one of ours, beyond the margin of every window; 1 or more."""
        models = self._callers.get(namespace)
        known = models.get((upstream, model)) if models else None
        return known.value if known else 1.0

    def observe(self, namespace: str, upstream: str, model: str, ours: int, theirs: int, window: int | None) -> None:
        """Learn from a prompt that upstream took: it counted `theirs` where we count `ours`."""
        if window is None or ours <= 0 or theirs < SHARE * window:
            return
        needed = _needed(theirs / ours)
        known = (self._callers.get(namespace) or {}).get((upstream, model)) or _Factor()
        if needed > known.value:
            self._change(namespace, FactorBelief(upstream, model, needed, known.falls))
        elif needed == known.value:
            known.lower = []
        else:
            known.lower.append(needed)
            if len(known.lower) >= FALLS_AFTER:
                self._change(namespace, FactorBelief(upstream, model, max(known.lower), known.falls + 1))

    def beliefs(self, namespace: str) -> Iterator[FactorBelief]:
        """Yield the factors of this caller's models."""
        for (upstream, model), known in (self._callers.get(namespace) or {}).items():
            yield FactorBelief(upstream, model, known.value, known.falls)

    def accept(self, namespace: str, belief: FactorBelief) -> None:
        """Take over what another process learned for this caller, if it is newer."""
        known = (self._callers.get(namespace) or {}).get((belief.upstream, belief.model)) or _Factor()
        if 1 <= belief.factor <= MOST and (belief.falls, belief.factor) > (known.falls, known.value):
            self._keep(namespace, (belief.upstream, belief.model), _Factor(belief.factor, falls=belief.falls))

    def _change(self, namespace: str, belief: FactorBelief) -> None:
        self.accept(namespace, belief)
        self._changed(namespace, belief)

    def _keep(self, namespace: str, key: tuple[str, str], factor: _Factor) -> None:
        models = self._callers.get(namespace)
        if models is None:
            models = {}
            self._callers.put(namespace, models)
        models[key] = factor
        if len(models) > MODELS:
            del models[next(iter(models))]


def _needed(ratio: float) -> float:
    """Return the smallest factor on the grid with which a window still holds a prompt of this ratio."""
    steps = math.ceil(round((ratio * (1 - WINDOW_MARGIN) - 1) / STEP, 6))
    return min(1 + max(steps, 0) * STEP, MOST)
