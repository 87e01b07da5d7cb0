"""Every outcome is written down once, in order, and soon."""

from __future__ import annotations

import asyncio

from proxy.telemetry.outcome import Outcome
from proxy.telemetry.recorder import LATEST, MOST, Recorder


def outcome(number: int) -> Outcome:
    return Outcome(request_id=f"{number}", tenant="t", namespace="t", kind="relay", method="GET", path="/")


async def test_all_are_written_down_in_order_without_waiting_for_long() -> None:
    one: list[str] = []
    other: list[str] = []
    ledger = Recorder(lambda each: one.append(each.request_id), lambda each: other.append(each.request_id))
    for number in range(MOST + 2):
        ledger.record(outcome(number))
    assert len(one) == MOST, "so many do not wait for the clock"
    await asyncio.sleep(LATEST * 4)
    assert one == other == [f"{number}" for number in range(MOST + 2)]


async def test_nothing_waits_once_it_was_asked_for() -> None:
    written: list[Outcome] = []
    ledger = Recorder(written.append)
    ledger.record(outcome(0))
    ledger.flush()
    ledger.flush()
    await asyncio.sleep(LATEST * 4)
    assert written == [outcome(0)]
