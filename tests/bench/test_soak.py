"""A short soak. `python -m bench.bounds soak` is the long one, with figures."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("redis", reason="the extra redis is not installed")

from bench import soak
from proxy.stores.redis import RedisEngine

SECONDS = 10.0

OWN = 50
"""Descriptors of a worker in addition to its connections: listener, event loop, files of the
metrics."""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
@pytest.mark.sweep
def test_a_short_soak_has_no_failure_and_no_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "RESTARTS_EVERY", SECONDS / 4)
    figures = soak.run(SECONDS)
    assert not figures.failed
    assert not figures.wrong
    assert figures.turns > soak.CONVERSATIONS
    assert figures.restarts >= 2 and figures.store_errors > 0, "there was trouble"
    first, second = figures.halves
    assert (first.in_flight, second.in_flight) == (0, 0)
    # The number of pooled connections varies, but a leak of one per turn or restart would exceed
    # this bound.
    assert max(first.descriptors, second.descriptors) <= soak.WORKERS * (
        soak.CONVERSATIONS + RedisEngine.threads + OWN
    )
    assert second.threads <= first.threads + 4
