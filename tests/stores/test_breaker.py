from __future__ import annotations

from proxy.stores.breaker import Breaker


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def opened(clock: Clock) -> Breaker:
    breaker = Breaker(limit=3, pause_seconds=5, clock=clock)
    for _ in range(3):
        assert breaker.admit()
        breaker.failed()
    return breaker


def test_it_opens_after_so_many_failures_in_a_row() -> None:
    breaker = Breaker(limit=3, pause_seconds=5, clock=Clock())
    for outcome in (breaker.failed, breaker.failed, breaker.succeeded, breaker.failed, breaker.failed):
        assert breaker.admit()
        outcome()
        assert breaker.state == "closed"
    breaker.failed()
    assert breaker.state == "open"
    assert not breaker.admit()


def test_one_probe_after_a_pause() -> None:
    clock = Clock()
    breaker = opened(clock)
    clock.now += 4.9
    assert not breaker.admit()
    clock.now += 0.1
    assert breaker.state == "open"
    assert breaker.admit()
    assert breaker.state == "half-open"
    assert not breaker.admit()


def test_a_probe_that_succeeds_closes_it() -> None:
    clock = Clock()
    breaker = opened(clock)
    clock.now += 5
    assert breaker.admit()
    breaker.succeeded()
    assert breaker.state == "closed"
    breaker.failed()
    assert breaker.admit(), "earlier failures are forgotten"


def test_a_probe_that_fails_opens_it_for_another_pause() -> None:
    clock = Clock()
    breaker = opened(clock)
    clock.now += 5
    assert breaker.admit()
    clock.now += 1
    breaker.failed()
    assert breaker.state == "open"
    clock.now += 4.9
    assert not breaker.admit()
    clock.now += 0.1
    assert breaker.admit()


def test_a_probe_that_is_never_heard_of_again_is_followed_by_another() -> None:
    clock = Clock()
    breaker = opened(clock)
    clock.now += 5
    assert breaker.admit()
    clock.now += 5
    assert breaker.state == "open"
    assert breaker.admit()
