"""How long a summary may take, by the speed at which its upstream has written so far."""

from __future__ import annotations

from proxy.lru import Lru

REPLY = 4
"""How many times a record's tokens a reply may take: the record, and the thoughts before it."""
MARGIN, MOST = 1.5, 5.0
"""How many times the expected time is allowed, and the most, as a multiple of the policy's `compress.timeout`."""
LEAST_TOKENS = 50
"""Shorter replies tell nothing about the speed."""
NEWEST = 0.3
"""The weight of the newest measurement."""
KEPT = 5_000
"""Upstreams whose speed is remembered."""


class Speeds:
    """Tokens a second, by namespace and model."""

    def __init__(self) -> None:
        self._speeds: Lru[tuple[str, str], float] = Lru(KEPT)

    def timeout(self, upstream: tuple[str, str], record_tokens: int, floor: float) -> float:
        """Return the seconds that a summary may take: `floor`, or more for a slow upstream."""
        speed = self._speeds.get(upstream)
        expected = MARGIN * REPLY * record_tokens / speed if speed else 0.0
        return min(max(floor, expected), MOST * floor)

    def wrote(self, upstream: tuple[str, str], tokens: int, seconds: float) -> None:
        """Note a reply of so many tokens, which took so long."""
        if tokens < LEAST_TOKENS or seconds <= 0:
            return
        speed, known = tokens / seconds, self._speeds.get(upstream)
        self._speeds.put(upstream, speed if known is None else known + NEWEST * (speed - known))

    def late(self, upstream: tuple[str, str], record_tokens: int, seconds: float) -> None:
        """Note a summary that was not done in time. The next one gets twice as long."""
        self._speeds.put(upstream, MARGIN * REPLY * record_tokens / (2 * seconds))
