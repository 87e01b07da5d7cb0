"""Remembers what refusals revealed: the size of a model's context window, and which upstreams refuse our tools."""

from __future__ import annotations

from typing import TypeVar

from proxy.core.policy import Policy

V = TypeVar("V")

MODELS = 10_000
"""The most models that are remembered, because clients may name any model."""

SHRINK = 0.8
"""The window to assume, as a share of the refused tokens, if upstream names no window that is smaller."""


class UpstreamLimits:
    """Limits by upstream and model. Each process learns them separately, at the cost of one refused request."""

    def __init__(self) -> None:
        self._windows: dict[tuple[str, str], int] = {}
        self._refusing: dict[tuple[str, str], None] = {}

    def window(self, policy: Policy, model: str) -> int | None:
        """Return the context window in tokens: the smaller of the policy's and the learned one; None if unknown."""
        known = (policy.upstream.context_window, self._windows.get((policy.upstream.base_url, model)))
        return min((tokens for tokens in known if tokens is not None), default=None)

    def overflowed(self, policy: Policy, model: str, said: int | None, counted: int) -> None:
        """Learn from a request of `counted` tokens that upstream refused as too long.

        `said` is the window that upstream named, if it named one.

        A request that was already known to be too long changes nothing unless upstream names a smaller window.
        Otherwise a client that keeps asking for too much would shrink the window for everybody.
        """
        before = self.window(policy, model)
        shrunk = int(SHRINK * counted) if before is None or counted <= before else before
        learned = said if said is not None and (before is None or said < before) else shrunk
        _put(self._windows, (policy.upstream.base_url, model), max(learned, 1))

    def refuses(self, policy: Policy, model: str) -> bool:
        """Whether this upstream has refused our additions for this model."""
        return (policy.upstream.base_url, model) in self._refusing

    def refused(self, policy: Policy, model: str) -> None:
        """Remember that this upstream refused our additions for this model."""
        _put(self._refusing, (policy.upstream.base_url, model), None)


def _put(known: dict[tuple[str, str], V], key: tuple[str, str], value: V) -> None:
    known[key] = value
    if len(known) > MODELS:
        del known[next(iter(known))]
