"""The soak, short: its long run and its figures are `python -m tests.bench.soak`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench import soak


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_ten_seconds() -> None:
    figures = soak.run(10)
    assert not figures.failed
    assert not figures.wrong
    assert figures.turns > soak.CONVERSATIONS
    assert figures.restarts >= 2 and figures.store_errors > 0, "there was trouble"
    first, second = figures.halves
    assert (first.in_flight, second.in_flight) == (0, 0)
    # One pooled connection more or less is no leak; one for each conversation would be.
    assert second.descriptors <= first.descriptors + soak.CONVERSATIONS / 2
    assert second.threads <= first.threads + 4
