"""Remembers how many tokens models take, as far as upstreams have shown it: by refusing requests and by taking them.

A *caller* here is a namespace: what one caller provokes changes no other caller's requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import TypeVar

import msgspec

from proxy.lru import Lru
from proxy.policy import Policy

V = TypeVar("V")

CALLERS = 10_000
"""The most callers whose models are remembered."""

MODELS = 100
"""The most models that are remembered for one caller, because clients may name any model."""

WINDOWS = 16
"""The most windows that are remembered for one model. Upstreams name one, and each guess is smaller than the last."""

LEAST = 1_024
"""The fewest tokens that are believed to be a window. No model that is used for chats takes fewer."""

TELLING = LEAST // 4
"""Prompts that we count as smaller teach nothing: upstream, too, counts them as smaller than any window."""

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
    """0 if a larger prompt was taken."""
    refused: int = 0
    """Tokens of the refused request, as we counted them, if the window is a share of them; 0 if upstream named it."""
    accepted: int = 0
    """Tokens of the prompt that was taken, as upstream counted them."""
    counted: int = 0
    """The same as we count them."""


Believed = Callable[[str, WindowBelief, Lesson], None]
"""Called with the namespace whenever a belief about a window changes."""


class _Known(msgspec.Struct):
    """What is known of one caller's model.

    A window that upstream named is compared with what upstream counted, and one that we guessed with what we counted:
    the two may differ by a third. The prompts that were taken before a guess say only that it is no guess if one of
    them was larger than the refused request: then its length was not the reason.
    """

    windows: set[tuple[int, int]] = msgspec.field(default_factory=set)
    """The windows of all beliefs, each with its `refused`. Implausible ones are kept, so that no order matters."""
    accepted: int = 0
    counted: int = 0
    """The largest prompts that were taken here, as upstream and as we counted them."""
    told_accepted: int = 0
    told_counted: int = 0
    """The largest prompts by which a process has superseded a window."""

    @property
    def window(self) -> int:
        """The smallest plausible window; 0 if there is none."""
        return min((window for window, refused in self.windows if self.plausible(window, refused)), default=0)

    def plausible(self, window: int, refused: int) -> bool:
        """Whether to believe in this window."""
        if not refused:
            return window >= max(LEAST, self.accepted, self.told_accepted)
        return window >= max(LEAST, self.told_counted) and refused > self.counted

    def superseded(self, window: int, refused: int) -> bool:
        """Whether others have been told why this window is not plausible, or need not be told."""
        return window < max(LEAST, self.told_counted if refused else self.told_accepted)

    def add(self, window: int, refused: int) -> None:
        """Remember a window. If they are too many, one goes that is not plausible, or else the largest."""
        self.windows.add((window, refused))
        if len(self.windows) > WINDOWS:
            self.windows.remove(max(self.windows, key=lambda known: (not self.plausible(*known), known)))


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
        models = self._callers.get(namespace)
        known = models.get((policy.upstream.base_url, model)) if models else None
        given = policy.upstream.context_window
        if given is None:
            given = self.listed(namespace, policy, model)
            if given is not None and not (known or _Known()).plausible(given, 0):
                given = None
        learned = known.window if known else 0
        if not learned:
            return given
        return learned if given is None else min(given, learned)

    def accepted(self, namespace: str, policy: Policy, model: str, tokens: int, counted: int) -> None:
        """Learn that upstream took a prompt of `tokens`, as it counted them; we counted `counted`."""
        upstream = policy.upstream.base_url
        if max(tokens, counted) < LEAST:
            return  # no window is so small
        known = self._known(namespace, upstream, model)
        contradicted = any(
            known.plausible(window, refused) and window < (counted if refused else tokens)
            for window, refused in known.windows
        )
        if tokens <= known.accepted and counted <= known.counted and not contradicted:
            return
        known.accepted, known.counted = max(known.accepted, tokens), max(known.counted, counted)
        self._keep(namespace, upstream, model, known)
        if contradicted:
            self._supersede(namespace, upstream, model, tokens, counted)

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
            self._believe(namespace, known, WindowBelief(upstream, model, said))
            return said
        if before is not None and counted > before:
            return before
        guess = int(SHRINK * counted)
        fitting = max(guess, known.told_counted)  # so much did fit
        if measured and fitting < counted and known.plausible(fitting, counted):
            self._believe(namespace, known, WindowBelief(upstream, model, fitting, counted))
            return fitting
        return max(guess, 1)

    # -- sharing with other processes --

    def beliefs(self, namespace: str) -> Iterator[WindowBelief]:
        """Yield what is believed of this caller's models."""
        for (upstream, model), known in (self._callers.get(namespace) or {}).items():
            for window, refused in sorted(known.windows):
                if window == known.window:
                    yield WindowBelief(upstream, model, window, refused)

    def accept(self, namespace: str, belief: WindowBelief) -> bool:
        """Take over what another process learned for this caller, and return whether that changes the window.

        The order in which beliefs arrive does not matter. If upstream has taken more here, the others are told.
        """
        known = self._known(namespace, belief.upstream, belief.model)
        before = known.window
        if belief.window:
            known.add(belief.window, belief.refused)
        known.told_accepted = max(known.told_accepted, belief.accepted)
        known.told_counted = max(known.told_counted, belief.counted)
        self._keep(namespace, belief.upstream, belief.model, known)
        window, refused = belief.window, belief.refused
        if not known.plausible(window, refused) and not known.superseded(window, refused):
            self._supersede(namespace, belief.upstream, belief.model, known.accepted, known.counted)
        return known.window != before

    # -- memory --

    def _known(self, namespace: str, upstream: str, model: str) -> _Known:
        return (self._callers.get(namespace) or {}).get((upstream, model)) or _Known()

    def _believe(self, namespace: str, known: _Known, belief: WindowBelief) -> None:
        """Remember a window, and tell the others, if it is plausible."""
        if known.plausible(belief.window, belief.refused):
            known.add(belief.window, belief.refused)
            self._keep(namespace, belief.upstream, belief.model, known)
            self.believed(namespace, belief, Lesson.REFUSED)

    def _supersede(self, namespace: str, upstream: str, model: str, accepted: int, counted: int) -> None:
        """Note that upstream took a larger prompt than some process believes, and tell the others."""
        known = self._known(namespace, upstream, model)
        known.told_accepted, known.told_counted = max(known.told_accepted, accepted), max(known.told_counted, counted)
        belief = WindowBelief(upstream, model, 0, accepted=accepted, counted=counted)
        self.believed(namespace, belief, Lesson.SUPERSEDED)

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
