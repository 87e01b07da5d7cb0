"""The time for a summary follows the measured speed, between the policy's value and a multiple of it."""

from __future__ import annotations

import pytest

from proxy.requests.speeds import LEAST_TOKENS, MARGIN, MOST, REPLY, Speeds

UPSTREAM = ("ns", "m")


@pytest.mark.parametrize(
    ("tokens", "seconds", "timeout"),
    [
        pytest.param(1_000, 10, 120, id="fast"),
        pytest.param(1_000, 40, MARGIN * REPLY * 1_500 / 25, id="slow"),
        pytest.param(1_000, 4_000, MOST * 120, id="too slow"),
        pytest.param(LEAST_TOKENS - 1, 4_000, 120, id="too short to tell"),
        pytest.param(1_000, 0, 120, id="no time"),
    ],
)
def test_timeouts(tokens: int, seconds: float, timeout: float) -> None:
    speeds = Speeds()
    assert speeds.timeout(UPSTREAM, 1_500, 120) == 120
    speeds.wrote(UPSTREAM, tokens, seconds)
    assert speeds.timeout(UPSTREAM, 1_500, 120) == timeout
    assert speeds.timeout(("another", "m"), 1_500, 120) == 120


def test_the_newest_measurements_count_most() -> None:
    speeds = Speeds()
    speeds.wrote(UPSTREAM, 1_000, 50)
    slow = speeds.timeout(UPSTREAM, 1_500, 120)
    for _ in range(20):
        speeds.wrote(UPSTREAM, 1_000, 5)
    assert speeds.timeout(UPSTREAM, 1_500, 120) == 120 < slow
