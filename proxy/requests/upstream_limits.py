"""Remembers how many tokens models take, as far as upstreams have shown it: by refusing requests and by taking them.

A *caller* here is a namespace: what one caller provokes changes no other caller's requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import TypeVar

import msgspec

from proxy.core.policy import Policy
from proxy.lru import Lru

V = TypeVar("V")

CALLERS = 10_000
"""The most callers whose models are remembered."""

MODELS = 100
"""The most models that are remembered for one caller, because clients may name any model."""

LEAST = 1_024
"""The fewest tokens that are believed to be a window. No model that is used for chats takes fewer."""

SHRINK = 0.8
"""The window to assume, as a share of the refused tokens, if upstream names no window that is smaller."""

Listed = Callable[[str, Policy, str], int | None]
"""Returns the window in the upstream's own list of models, if that is known: for a namespace, a policy and a model."""


class Lesson(StrEnum):
    """What taught us something about a window."""

    REFUSED = "refused"
    """A refusal named a window, or showed that it is smaller than the request."""
    SUPERSEDED = "superseded"
    """Upstream took a larger prompt than the window that we believed in."""
    HEARD = "heard"
    """Another process had learned it."""
    LISTED = "listed"
    """Upstream's list of models names it."""


class WindowBelief(msgspec.Struct, frozen=True):
    """What one caller's upstream has shown of one model: a window, or that it took a prompt which is larger."""

    upstream: str
    model: str
    window: int
    """0 if it is not known any more."""
    accepted: int
    """The tokens of the prompt that superseded a window, as upstream counted them; otherwise 0."""


Believed = Callable[[str, WindowBelief, Lesson], None]
"""Called with the namespace whenever a belief about a window changes."""


class _Known(msgspec.Struct):
    """What is known of one caller's model. `counted` is the tokens of the largest prompt taken, as we count them."""

    window: int = 0
    accepted: int = 0
    counted: int = 0


class UpstreamLimits:
    """Windows by namespace, upstream and model. They do not expire, as a changed window changes the plan.

    A number is plausible if it is not tiny, and not below a prompt that this upstream has taken from this caller.
    """

    def __init__(
        self, believed: Believed = lambda *_: None, listed: Listed = lambda namespace, policy, model: None
    ) -> None:
        self.believed = believed
        self.listed = listed
        self._callers: Lru[str, dict[tuple[str, str], _Known]] = Lru(CALLERS)

    def window(self, namespace: str, policy: Policy, model: str) -> int | None:
        """Return the context window in tokens, None if it is not known.

        The policy's comes before that in upstream's list of models. A smaller one that a refusal showed still counts.
        """
        known = self._known(namespace, policy.upstream.base_url, model)
        given = policy.upstream.context_window
        if given is None:
            given = self.listed(namespace, policy, model)
            given = given if given is not None and given >= max(LEAST, known.accepted) else None
        learned = known.window or None
        return min((tokens for tokens in (given, learned) if tokens is not None), default=None)

    def accepted(self, namespace: str, policy: Policy, model: str, tokens: int, counted: int) -> None:
        """Learn that upstream took a prompt of `tokens`, as it counted them; we counted `counted`."""
        upstream = policy.upstream.base_url
        known = self._known(namespace, upstream, model)
        if tokens <= known.accepted and counted <= known.counted:
            return
        known.accepted, known.counted = max(known.accepted, tokens), max(known.counted, counted)
        self._keep(namespace, upstream, model, known)
        if 0 < known.window < known.accepted:
            known.window = 0
            self.believed(namespace, WindowBelief(upstream, model, 0, known.accepted), Lesson.SUPERSEDED)

    def overflowed(
        self, namespace: str, policy: Policy, model: str, said: int | None, counted: int, *, measured: bool = True
    ) -> int:
        """Learn from a request of `counted` tokens that upstream refused as too long, and return the window for which
        to plan this request again.

        `said` is the window that upstream named, if it named one. `measured` tells whether every part of the request
        could be counted; otherwise our count says little about the window.

        A request that was already known to be too long teaches nothing unless upstream names a smaller window.
        Otherwise a client that keeps asking for too much would shrink its window without end.
        """
        upstream = policy.upstream.base_url
        known, before = self._known(namespace, upstream, model), self.window(namespace, policy, model)
        if said is not None and (before is None or said < before):
            if said >= max(LEAST, known.accepted):
                self._believe(namespace, upstream, model, said)
            return said
        if before is not None and counted > before:
            return before
        guess = int(SHRINK * counted)
        fitting = max(guess, known.counted)  # so much did fit
        if measured and LEAST <= fitting < counted:
            self._believe(namespace, upstream, model, fitting)
            return fitting
        return max(guess, 1)

    # -- sharing with other processes --

    def beliefs(self, namespace: str) -> Iterator[WindowBelief]:
        """Yield what is believed of this caller's models."""
        for (upstream, model), known in (self._callers.get(namespace) or {}).items():
            if known.window:
                yield WindowBelief(upstream, model, known.window, 0)

    def accept(self, namespace: str, belief: WindowBelief) -> bool:
        """Take over what another process learned for this caller, and return whether that changes the window.

        The order in which beliefs arrive does not matter.
        """
        known = self._known(namespace, belief.upstream, belief.model)
        before = known.window
        known.accepted = max(known.accepted, belief.accepted)
        windows = [tokens for tokens in (known.window, belief.window) if tokens >= max(LEAST, known.accepted)]
        known.window = min(windows, default=0)
        self._keep(namespace, belief.upstream, belief.model, known)
        return known.window != before

    # -- memory --

    def _known(self, namespace: str, upstream: str, model: str) -> _Known:
        return (self._callers.get(namespace) or {}).get((upstream, model)) or _Known()

    def _believe(self, namespace: str, upstream: str, model: str, window: int) -> None:
        known = self._known(namespace, upstream, model)
        known.window = window
        self._keep(namespace, upstream, model, known)
        self.believed(namespace, WindowBelief(upstream, model, window, 0), Lesson.REFUSED)

    def _keep(self, namespace: str, upstream: str, model: str, known: _Known) -> None:
        models = self._callers.get(namespace)
        if models is None:
            models = {}
            self._callers.put(namespace, models)
        _put(models, (upstream, model), known)


def _put(known: dict[tuple[str, str], V], key: tuple[str, str], value: V) -> None:
    known[key] = value
    if len(known) > MODELS:
        del known[next(iter(known))]
