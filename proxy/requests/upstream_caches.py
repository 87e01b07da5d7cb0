"""What one process sees of upstreams' caches: when they expired, and what was missing there.

    a request ──its history goes on from the last one's──> the pause between the two ──> has upstream's cache expired?
              └──it has ended, and upstream said what it read from its cache──> what was missing there, and why

The pause is exact, because another replica's request in between would have left another end of the
history.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping

import msgspec
from msgspec.structs import replace

from proxy.lru import Lru
from proxy.plan.history import Paused, beginning
from proxy.requests.planned import Planned
from proxy.requests.prepared import Prepared
from proxy.requests.records import Records
from proxy.telemetry.outcome import CacheMiss

CONVERSATIONS = 20_000
LEAST = 1_024
"""The fewest tokens that count as missing: no provider caches a shorter prompt, and each rounds to
a block."""
SHORTEST = 300
"""Seconds before which no provider's cache expires."""

_Key = tuple[str, str, str, bytes]


class _Last(msgspec.Struct, frozen=True, gc=False):
    """The last request of a conversation."""

    at: float
    """When it ended, in seconds since the epoch: a machine that slept has had a pause."""
    digest: bytes
    """The digest of its history; see `History.point_digest`."""
    sent: int
    """Stands for what was changed of it."""
    prompt: int
    """Its tokens as upstream counted them; 0 if it did not say."""


class LastRequests:
    """The last requests that this process served. `clock` returns seconds since the epoch."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._last: Lru[_Key, _Last] = Lru(CONVERSATIONS)
        self._recorded: Lru[_Key, int] = Lru(CONVERSATIONS)  # the last pause of each
        self._numbers = itertools.count(1)

    async def pauses(self, planned: Planned, records: Records, *, new: bool) -> Mapping[bytes, int]:
        """Return at which of this history's requests upstream's cache had expired, and after how
        many seconds. If this is a `new` request, whoever sees its pause first records it, so that
        every later request plans with it, on any replica; without the record, it counts for
        none. Those of earlier requests are looked up once, and again after this process has
        recorded one: a client may go back."""
        model = planned.request.model
        last = planned.last_point_digests[-1]
        history = planned.history.stem or planned.history
        key = _key(records.namespace, planned)
        nothing = Paused(records.namespace, self._recorded.get(key) or 0)
        known = history.paused or nothing
        if replace(known, upto=0, seconds={}) != nothing:
            known = nothing
        points = planned.points(known.upto)
        newer = await records.pauses([*points], model)
        found = {**known.seconds, **newer}
        if not records.unread:
            last_point = max(points.values(), default=0)
            upto = max(min(last_point, len(history)), known.upto)
            passed = {point: pause for point, pause in newer.items() if points[point] < upto}
            history.paused = replace(known, upto=upto, seconds={**known.seconds, **passed})
        seen = new and last not in found
        pause = self.expired(records.namespace, planned) if seen else 0
        if not pause:
            return found
        try:
            return found | await records.keep_pause(last, model, pause)
        finally:
            self._recorded.put(key, next(self._numbers))

    def expired(self, namespace: str, planned: Planned) -> int:
        """Return the seconds since this history's request before, if upstream's cache has expired
        since; else 0."""
        last = self._last.get(_key(namespace, planned))
        lifetime = planned.cache_lifetime
        if last is None or lifetime is None or last.digest not in planned.last_point_digests[:-1]:
            return 0
        pause = int(self._clock() - last.at)
        return pause if pause > lifetime else 0

    def ended(self, namespace: str, prepared: Prepared) -> tuple[CacheMiss, int]:
        """Take in a request that upstream has answered. Returns why its cache lacked what was not
        new, and how many tokens that was."""
        planned = prepared.planned
        spent = prepared.spent
        if planned is None or planned.history.tokens < LEAST or not planned.last_point_digests:
            return CacheMiss.NONE, 0
        key = _key(namespace, planned)
        now = self._clock()
        last = self._last.get(key)
        self._last.put(
            key,
            _Last(
                now,
                planned.last_point_digests[-1],
                _sent(prepared, len(planned.history)),
                spent.largest,
            ),
        )
        if not spent.cache_told or (last is not None and not last.prompt):
            return CacheMiss.NONE, 0
        new = max(spent.largest - last.prompt, 0) if last else 0
        missed = spent.prompt - spent.cached - new
        return (
            (self._cause(last, prepared, planned, now), missed)
            if missed >= LEAST
            else (CacheMiss.NONE, 0)
        )

    def _cause(
        self, last: _Last | None, prepared: Prepared, planned: Planned, now: float
    ) -> CacheMiss:
        if last is None:
            return CacheMiss.FIRST
        if last.digest not in planned.last_point_digests:
            return CacheMiss.CLIENT
        lifetime = planned.cache_lifetime
        pause = now - last.at
        if lifetime is not None and pause > lifetime:
            return CacheMiss.EXPIRED
        if last.sent != _sent(prepared, planned.plan.used) or prepared.pointed:
            return CacheMiss.EVENT
        return CacheMiss.EXPIRED if lifetime is None and pause > SHORTEST else CacheMiss.OTHER


def _key(namespace: str, planned: Planned) -> _Key:
    return (
        namespace,
        planned.policy.upstream.base_url,
        planned.request.model,
        beginning(planned.history.messages),
    )


def _sent(prepared: Prepared, end: int) -> int:
    """Stands for what is changed of the first `end` messages, and before them."""
    rendered = prepared.rendered
    if rendered is None:
        return 0
    moves = frozenset(
        (index, move.event > 0) for index, move in rendered.plan.moves.items() if index < end
    )
    return hash((moves, rendered.shown.boundary.end if rendered.shown else 0, rendered.injecting))
