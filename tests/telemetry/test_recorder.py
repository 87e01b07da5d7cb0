"""Every outcome is recorded once, in order, and soon."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from proxy.telemetry.logs import LATEST, Recorder
from proxy.telemetry.outcome import Kind, Outcome
from tests.clock import Clock, turns


def outcome(number: int) -> Outcome:
    return Outcome(request_id=f"{number}", tenant="t", namespace="t", kind=Kind.RELAY, method="GET", path="/")


async def test_outcomes_are_recorded_in_order_and_soon(clock: Clock) -> None:
    one: list[str] = []
    other: list[str] = []
    ledger = Recorder(
        lambda batch: one.extend(each.request_id for each in batch),
        lambda batch: other.extend(each.request_id for each in batch),
    )
    for number in range(6):
        ledger.record(outcome(number))
    clock.move(LATEST)
    await turns()
    assert one == other == [f"{number}" for number in range(6)]


async def test_what_fails_in_one_sink_keeps_nothing_from_the_others(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(batch: Sequence[Outcome]) -> None:
        raise FileNotFoundError("the metrics' folder")

    written: list[Outcome] = []
    ledger = Recorder(fails, written.extend)
    for number in range(2):
        ledger.record(outcome(number))
    assert not written
    clock.move(LATEST)
    await turns()
    assert len(written) == 2
    assert "a bug, in recording requests" in caplog.text
