"""What this process learned from refusals: how large a model's context window is, and who refuses our tools."""

from __future__ import annotations

from typing import TypeVar

from proxy.core.policy import Policy

V = TypeVar("V")

MODELS = 10_000
"""Models remembered at most: clients may name any model."""

SHRINK = 0.8
"""The window that we assume, as a share of the tokens that were refused, where upstream names none below those."""


class UpstreamLimits:
    """Limits by upstream and model. Each process learns them on its own, at the price of one refused request."""

    def __init__(self) -> None:
        self._windows: dict[tuple[str, str], int] = {}
        self._refusing: dict[tuple[str, str], None] = {}

    def window(self, policy: Policy, model: str) -> int | None:
        """The context window in tokens, by policy or as learned, whichever is smaller. None where neither is known."""
        known = (policy.upstream.context_window, self._windows.get((policy.upstream.base_url, model)))
        return min((tokens for tokens in known if tokens is not None), default=None)

    def overflowed(self, policy: Policy, model: str, said: int | None, counted: int) -> None:
        """Learn from a request of `counted` tokens that upstream refused as too long.

        `said` is the window that upstream named, if it named one.

        A request that was known to be too long teaches nothing. Otherwise a client that asks for too much again and
        again would shrink the window for everybody.
        """
        before = self.window(policy, model)
        shrunk = int(SHRINK * counted) if before is None or counted <= before else before
        learned = said if said is not None and (before is None or said < before) else shrunk
        _put(self._windows, (policy.upstream.base_url, model), max(learned, 1))

    def refuses(self, policy: Policy, model: str) -> bool:
        """Whether this upstream refused our additions before."""
        return (policy.upstream.base_url, model) in self._refusing

    def refused(self, policy: Policy, model: str) -> None:
        """Remember that this upstream refused our additions."""
        _put(self._refusing, (policy.upstream.base_url, model), None)


def _put(known: dict[tuple[str, str], V], key: tuple[str, str], value: V) -> None:
    known[key] = value
    if len(known) > MODELS:
        del known[next(iter(known))]
