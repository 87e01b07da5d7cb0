"""CPU and memory of requests as histories and conversations grow: `python -m bench.scale [--png-dir
DIR]`.

CPU time and memory are those of the proxy's process alone, background work included, with no other
requests.

- *history*: a conversation of so many messages, first seen (*cold*) and then extended by a call and
  its result of 1 KB (*warm*), with the policy off, with every large result moved (compact), and
  with the default policy (auto). A history's bytes must pass through any proxy; the figure with the
  policy off shows the cost of that alone;
- *new*: so many new messages after 1,000 known ones. Comparing the cost of a new and of a known
  message shows how far the cost of a request is linear in its new messages;
- *conversations*: distinct conversations, one after another, each with 12 messages and one result
  that is moved.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from bench import chart
from bench.metering import Cost, Meter, answering, metered

Json = dict[str, Any]

MIB = 2**20
OFF = "off"
COMPACT = "compact"
AUTO = "auto"
MODES: dict[str, Json] = {
    OFF: {"mode": "off"},
    COMPACT: {"mode": "compact", "max_tool_message_tokens": 150},
    AUTO: {},
}
SMALL = {"mode": "compact", "max_total_tokens": 300, "max_tool_message_tokens": 500}
HISTORIES = ((10, 1_000), (30, 1_000), (100, 1_000), (300, 1_000), (1_000, 1_000), (3_000, 1_000), (10_000, 1_000),
             (10_000, 5_000))  # fmt: skip
"""Messages, and bytes of each."""
KNOWN = 1_000
NEW = (2, 30, 300, 1_000)
CONVERSATIONS = (1, 10, 100, 1_000, 2_500, 5_000, 7_500, 10_000, 15_000, 20_000)
STEPS = 3
"""Requests for each figure, which is their median."""
TOOL = {
    "type": "function",
    "function": {"name": "search", "parameters": {"type": "object", "properties": {}}},
}
WORDS = [
    "".join(random.Random(seed).choices("abcdefghijklmnop", k=2 + seed % 8))
    for seed in range(5_000)
]


class Point(msgspec.Struct, frozen=True):
    """A history of one length, under one policy."""

    messages: int
    bytes: int
    cold: Cost
    warm: Cost


class Level(msgspec.Struct, frozen=True):
    """The state after so many conversations: seconds per request since the last level, RSS and
    caches in bytes."""

    conversations: int
    cpu: float
    rss: int
    cached: int


# -- requests --------------------------------------------------------------------------------------


class Conversation:
    """An endless conversation in messages of about `size` bytes: system, user, then calls and their
    results."""

    def __init__(self, seed: int, size: int) -> None:
        self._seed = seed
        self._size = size

    def messages(self, count: int) -> list[bytes]:
        """The first `count` of them, an even number."""
        beginning = [
            {"role": "system", "content": f"You search, number {self._seed}."},
            {"role": "user", "content": "Go on until you have found it."},
        ]
        return [json.dumps(one).encode() for one in beginning] + self.steps(0, count // 2 - 1)

    def steps(self, start: int, stop: int) -> list[bytes]:
        return [raw for number in range(start, stop) for raw in self._step(number)]

    def _step(self, number: int) -> Iterator[bytes]:
        name = f"call_{self._seed}_{number}"
        said = self._text(number, self._size // 4)
        result = self._text(-number, 2 * self._size - self._size // 4 - 260)
        call = {"id": name, "type": "function", "function": {"name": "search", "arguments": "{}"}}
        yield json.dumps({"role": "assistant", "content": said, "tool_calls": [call]}).encode()
        yield json.dumps({"role": "tool", "tool_call_id": name, "content": result}).encode()

    def _text(self, number: int, size: int) -> str:
        words = random.Random(self._seed * 100_003 + number)
        return " ".join(words.choices(WORDS, k=size // 5))[:size]


def small(seed: int) -> bytes:
    """A conversation of 12 messages with one large result."""
    made = Conversation(seed, 2_500).messages(4) + Conversation(seed, 400).steps(1, 5)
    return request(made)


def request(messages: Sequence[bytes]) -> bytes:
    tools = json.dumps([TOOL]).encode()
    return b'{"model":"gpt-4.1","messages":[%b],"tools":%b}' % (b",".join(messages), tools)


# -- measurements ----------------------------------------------------------------------------------


def histories(meter: Meter, sizes: Sequence[tuple[int, int]], steps: int) -> list[Point]:
    return [
        _point(meter, Conversation(1 + place, size), messages, steps)
        for place, (messages, size) in enumerate(sizes)
    ]


def _point(meter: Meter, conversation: Conversation, messages: int, steps: int) -> Point:
    made = conversation.messages(messages)
    body = request(made)
    cold = meter.cost(body)
    warm = []
    for step in range(steps):
        made += Conversation(messages, 1_000).steps(messages + step, messages + step + 1)
        warm.append(meter.cost(request(made)))
    middle = Cost(median(one.cpu for one in warm), max(one.peak for one in warm))
    return Point(messages, len(body), cold, middle)


def new_messages(meter: Meter, sizes: Sequence[int], known: int, steps: int) -> dict[int, float]:
    """New messages → CPU seconds of a request that has so many after `known` ones."""
    found = {}
    for size in sizes:
        costs = []
        for step in range(steps):
            seed = 1_000 + 100 * size + step
            beginning = Conversation(seed, 1_000).messages(known)
            meter.cost(request(beginning))
            new = Conversation(seed, 1_000).steps(known, known + size // 2)
            costs.append(meter.cost(request(beginning + new)).cpu)
        found[size] = median(costs)
    return found


def conversations(meter: Meter, levels: Sequence[int]) -> list[Level]:
    found = []
    seen = 0
    for level in levels:
        begun = meter.cpu()
        for seed in range(seen, level):
            meter.ask(small(10_000 + seed))
        meter.settle()
        found.append(
            Level(level, (meter.cpu() - begun) / (level - seen), meter.rss, meter.cached())
        )
        seen = level
    return found


# -- tables and charts -----------------------------------------------------------------------------

Points = Mapping[str, Sequence[Point]]
"""By policy."""


def history_table(points: Points) -> str:
    groups = [f"{f'{what}, {mode}':>14}" for what in ("cold", "warm") for mode in MODES]
    lines = [
        f"{'messages':>9}{'MB':>8}"
        + "".join(groups)
        + f"{'peak MiB':>10}   (CPU ms; RSS under auto)"
    ]
    for off, compact, auto in zip(*(points[mode] for mode in MODES), strict=True):
        row = (off, compact, auto)
        figures = [one.cold.cpu for one in row] + [one.warm.cpu for one in row]
        peak = max(auto.cold.peak, auto.warm.peak) / MIB
        shown = "".join(f"{figure * 1000:14.1f}" for figure in figures)
        lines.append(f"{off.messages:9,}{off.bytes / 1e6:8.2f}{shown}{peak:10.0f}")
    return "\n".join(lines)


def new_table(news: Mapping[str, Mapping[int, float]], known: int) -> str:
    lines = [
        f"{'new behind ' + format(known, ','):>18}"
        + "".join(f"{mode:>12}" for mode in news)
        + "   (CPU ms)"
    ]
    for size in next(iter(news.values())):
        lines.append(
            f"{size:18,}" + "".join(f"{found[size] * 1000:12.1f}" for found in news.values())
        )
    return "\n".join(lines)


def linearity(points: Points, news: Mapping[str, Mapping[int, float]]) -> str:
    """The CPU time that a known and a new message add to the time with the policy off."""
    lines = []
    for mode in (COMPACT, AUTO):
        old = _each_old(points[mode], points[OFF])
        new = _each_new(news[mode], news[OFF])
        ratio = (
            f"{new / old:,.0f} times as much"
            if old > 0
            else "the other nothing that could be measured"
        )
        lines.append(
            f"{mode}: a known message adds {old * 1e6:.2f} us, a new one {new * 1e6:.0f} us: {ratio}"
        )
    return "\n".join(lines)


def _each_old(points: Sequence[Point], off: Sequence[Point]) -> float:
    (few, many), (off_few, off_many) = ends(points), ends(off)
    added = (many.warm.cpu - off_many.warm.cpu) - (few.warm.cpu - off_few.warm.cpu)
    return added / (many.messages - few.messages)


def _each_new(found: Mapping[int, float], off: Mapping[int, float]) -> float:
    few = min(found)
    many = max(found)
    return ((found[many] - off[many]) - (found[few] - off[few])) / (many - few)


def ends(points: Sequence[Point]) -> tuple[Point, Point]:
    """The shortest history, and the longest one with messages of the same size."""
    size = points[0].bytes / points[0].messages
    same = [point for point in points if point.bytes / point.messages < 2 * size]
    return same[0], same[-1]


def conversation_table(levels: Sequence[Level]) -> str:
    lines = [f"{'conversations':>14}{'CPU ms a request':>18}{'RSS MiB':>10}{'caches MiB':>12}"]
    for one in levels:
        figures = f"{one.cpu * 1000:18.2f}{one.rss / MIB:10.1f}{one.cached / MIB:12.1f}"
        lines.append(f"{one.conversations:14,}{figures}")
    last = levels[-1]
    middle = min(levels, key=lambda one: abs(one.conversations - last.conversations / 2))
    lines.append(
        f"RSS at {last.conversations:,} is {last.rss / middle.rss:.3f} of that at {middle.conversations:,}"
    )
    return "\n".join(lines)


def draw(folder: Path, points: Points, levels: Sequence[Level]) -> None:
    x = "messages of 1 KB in the history"
    y = "CPU ms of a request"
    with chart.saved(
        folder / "scale-history.png", "A history first seen, and one that goes on", x=x, y=y
    ) as axes:
        for mode, row in points.items():
            same = row[: row.index(ends(row)[1]) + 1]
            places = [point.messages for point in same]
            [line] = axes.plot(
                places, [point.warm.cpu * 1000 for point in same], marker="o", label=f"{mode}, warm"
            )
            cold = [point.cold.cpu * 1000 for point in same]
            axes.plot(places, cold, "--", color=line.get_color(), label=f"{mode}, cold")
        axes.set(xscale="log", yscale="log")
    title = "Distinct conversations of 12 messages"
    with chart.saved(
        folder / "scale-conversations.png", title, x="conversations so far", y="MiB"
    ) as axes:
        places = [one.conversations for one in levels]
        axes.plot(places, [one.rss / MIB for one in levels], marker="o", label="RSS")
        axes.plot(
            places,
            [one.cached / MIB for one in levels],
            marker="o",
            label="caches, as the metrics tell",
        )
        axes.set_ylim(bottom=0)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="few and short histories, as a quick check that it works",
    )
    parser.add_argument("--png-dir", type=Path, help="the folder to draw charts to")
    options = parser.parse_args()
    if not Path("/proc/self/clear_refs").exists():
        print("needs Linux's /proc: left out")
        return 0
    smoke = options.smoke
    report(
        sizes=HISTORIES[:2] if smoke else HISTORIES,
        known=100 if smoke else KNOWN,
        new=(2, 20) if smoke else NEW,
        levels=(1, 20, 40) if smoke else CONVERSATIONS,
        steps=1 if smoke else STEPS,
        folder=options.png_dir,
    )
    return 0


def report(
    sizes: Sequence[tuple[int, int]],
    known: int,
    new: Sequence[int],
    levels: Sequence[int],
    steps: int,
    folder: Path | None,
) -> None:
    points: dict[str, list[Point]] = {}
    news: dict[str, dict[int, float]] = {}
    with ExitStack() as running:
        upstream = running.enter_context(answering())
        for mode, offload in MODES.items():
            with metered(upstream, offload, small(0)) as meter:
                news[mode] = new_messages(meter, new, known, steps)
                points[mode] = histories(meter, sizes, steps)
        with metered(upstream, SMALL, small(0)) as meter:
            found = conversations(meter, levels)
    tables = [
        history_table(points),
        new_table(news, known),
        linearity(points, news),
        conversation_table(found),
    ]
    print("\n\n".join(tables))
    if folder:
        draw(folder, points, found)


if __name__ == "__main__":
    sys.exit(main())
