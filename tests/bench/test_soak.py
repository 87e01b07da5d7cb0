"""The soak, short: its long run and its figures are `python -m tests.bench.soak`."""

from __future__ import annotations

from pathlib import Path

import pytest

from proxy.stores.redis import CONNECTIONS
from tests.bench import soak

OWN = 50
"""Descriptors that a worker may have besides its connections: listener, event loop, files of the metrics."""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
@pytest.mark.parametrize("seconds", [4, pytest.param(10, marks=pytest.mark.sweep)])
def test_a_short_soak_has_no_failure_and_no_leak(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "RESTARTS_EVERY", seconds / 4)
    figures = soak.run(seconds)
    assert not figures.failed
    assert not figures.wrong
    assert figures.turns > soak.CONVERSATIONS
    assert figures.restarts >= 2 and figures.store_errors > 0, "there was trouble"
    first, second = figures.halves
    assert (first.in_flight, second.in_flight) == (0, 0)
    # How many connections are pooled just now is chance; one left behind by each turn or restart would go beyond that.
    assert max(first.descriptors, second.descriptors) <= soak.WORKERS * (soak.CONVERSATIONS + CONNECTIONS + OWN)
    assert second.threads <= first.threads + 4
