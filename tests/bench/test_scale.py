"""The scale benchmark: its arithmetic, its requests, and that it measures the proxy's process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.metering import Cost, answering, metered
from bench.replay import measured
from bench.scale import (
    AUTO,
    COMPACT,
    MODES,
    OFF,
    SMALL,
    Conversation,
    Level,
    Point,
    conversation_table,
    conversations,
    histories,
    history_table,
    linearity,
    request,
    small,
)
from proxy.plan.history import places
from proxy.plan.pairing import Pairing
from proxy.tokens import Tokens


def point(messages: int, size: int, warm: float) -> Point:
    return Point(messages, messages * size, Cost(1.0, 1), Cost(warm, 3 << 20))


POINTS = {
    OFF: [point(10, 1_000, 0.001), point(1_010, 1_000, 0.002), point(1_010, 5_000, 9)],
    COMPACT: [point(10, 1_000, 0.002), point(1_010, 1_000, 0.005), point(1_010, 5_000, 9)],
    AUTO: [point(10, 1_000, 0.002), point(1_010, 1_000, 0.003), point(1_010, 5_000, 9)],
}
NEWS = {OFF: {2: 0.001, 102: 0.001}, COMPACT: {2: 0.001, 102: 0.021}, AUTO: {2: 0.001, 102: 0.011}}


def test_known_and_new_messages_are_compared_with_the_policy_off() -> None:
    compact, auto = linearity(POINTS, NEWS).splitlines()
    assert compact == "compact: a known message adds 2.00 us, a new one 200 us: 100 times as much"
    assert auto.endswith("a known message adds 0.00 us, a new one 100 us: the other nothing that could be measured")


def test_the_tables_show_every_point() -> None:
    shown = history_table(POINTS).splitlines()
    assert len(shown) == 4
    assert shown[2].split() == ["1,010", "1.01", "1000.0", "1000.0", "1000.0", "2.0", "5.0", "3.0", "3"]
    levels = [Level(1, 0.01, 100 << 20, 0), Level(2, 0.002, 110 << 20, 1 << 20), Level(4, 0.002, 121 << 20, 2 << 20)]
    assert conversation_table(levels).endswith("RSS at 4 is 1.100 of that at 2")


@pytest.mark.parametrize("body", [request(Conversation(3, 1_000).messages(40)), small(3)])
def test_benchmark_requests_are_valid_chats(body: bytes) -> None:
    sent = json.loads(body)
    tokens = Tokens()
    pairing = Pairing()
    places([measured(json.dumps(message).encode(), tokens) for message in sent["messages"]], pairing)
    assert not pairing.irregular and not pairing.open
    assert len(sent["messages"]) in (12, 40)


def test_conversations_extend_their_beginning_and_differ_from_each_other() -> None:
    one = Conversation(1, 1_000)
    assert one.messages(20) == one.messages(10) + one.steps(4, 9)
    assert 900 < len(b"".join(one.messages(1_000))) / 1_000 < 1_100
    assert not set(one.messages(20)[2:]) & set(Conversation(2, 1_000).messages(20)[2:])


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads /proc")
@pytest.mark.sweep
def test_figures_are_those_of_the_measured_proxy() -> None:
    with answering() as upstream:
        with metered(upstream, MODES[COMPACT], small(0)) as meter:
            [short, long] = histories(meter, [(10, 1_000), (400, 1_000)], steps=1)
        with metered(upstream, SMALL, small(0)) as meter:
            levels = conversations(meter, [1, 5])
    assert long.cold.cpu > 3 * short.cold.cpu > 0
    assert long.cold.peak >= long.bytes
    assert levels[1].cached > levels[0].cached > 0
