"""What upstreams taught this process about their models: how much fits, and who will not have our tools."""

from __future__ import annotations

from typing import TypeVar

from proxy.core.policy import Policy

V = TypeVar("V")

MODELS = 10_000
"""Remembered at most: a model's name is the client's to choose."""

SHRINK = 0.8
"""What is left of a window of unknown size, or one that turned out to be smaller than named."""


class UpstreamLimits:
    """By upstream and model. In this process only: the others learn it at the same price, one refused request."""

    def __init__(self) -> None:
        self._windows: dict[tuple[str, str], int] = {}
        self._refusing: dict[tuple[str, str], None] = {}

    def window(self, policy: Policy, model: str) -> int | None:
        """The context window in tokens: the policy's or upstream's own word, whichever is less."""
        known = (policy.upstream.context_window, self._windows.get((policy.upstream.base_url, model)))
        return min((tokens for tokens in known if tokens is not None), default=None)

    def overflowed(self, policy: Policy, model: str, said: int | None, counted: int) -> None:
        """A request of `counted` tokens was too long. `said` is the window that upstream named, if it named one.

        One that was known to be too long teaches nothing, or a client that asks for too much again and again would
        shrink the window for all.
        """
        before = self.window(policy, model)
        shrunk = int(SHRINK * counted) if before is None or counted <= before else before
        learned = said if said is not None and (before is None or said < before) else shrunk
        _put(self._windows, (policy.upstream.base_url, model), max(learned, 1))

    def refuses(self, policy: Policy, model: str) -> bool:
        """Whether this upstream refused our additions before."""
        return (policy.upstream.base_url, model) in self._refusing

    def refused(self, policy: Policy, model: str) -> None:
        _put(self._refusing, (policy.upstream.base_url, model), None)


def _put(known: dict[tuple[str, str], V], key: tuple[str, str], value: V) -> None:
    known[key] = value
    if len(known) > MODELS:
        del known[next(iter(known))]
