"""The overhead benchmark: its two ends understand each other, its figures are right, and every system can start."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import pytest

from bench import bodies, expected, figures, overhead, report, wire
from bench.competitors import COMPETITORS, PINS
from bench.figures import Figures, Measured, Point
from bench.systems import POLICIES, Launch, Launcher, Site, bare, nginx, proxy, start
from proxy.dialects.chat import CHAT

SMALL, MEDIUM, LARGE = bodies.SIZES
OTHERS = {"direct": (9000, 0.1), "bare relay": (1000, 1.0)}


def taken(rate: float, p50: float = 1.0, first: float = 1.0) -> Figures:
    """Times in milliseconds."""
    return Figures(rate, p50 / 1000, 2 * p50 / 1000, first / 1000, 0.001, rate / 1000)


def measured(**ours: Figures | str) -> Measured:
    """All of ours like the bare relay, but for `off`, `planning`, `moving`; and what else is named."""
    names = {name: name.removeprefix("proxy, ") for name in POLICIES}
    baselines = {name: taken(rate, p50) for name, (rate, p50) in OTHERS.items()}
    all_ours = {name: ours.pop(short, taken(1000)) for name, short in names.items()}
    return {**baselines, **all_ours, **ours}


# -- the two ends -----------------------------------------------------------------------------------------------------

FRAMES = [
    (b"POST / HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello", False),
    (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", False),
    (b'POST / HTTP/1.1\r\nCONTENT-LENGTH: 16\r\n\r\n{"stream":false}', False),
    (b'POST / HTTP/1.1\r\ncontent-length: 15\r\n\r\n{"stream":true}', True),
    (b'POST / HTTP/1.1\r\nContent-Length: 16\r\n\r\n{"stream": true}', True),
    (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n", False),
]


@pytest.mark.parametrize(("frame", "streams"), FRAMES)
def test_the_end_of_a_message_is_found_however_its_bytes_are_cut(frame: bytes, streams: bool) -> None:
    for cut in range(1, len(frame)):
        message = wire.Message()
        assert not message.feed(frame[:cut])
        assert message.feed(frame[cut:])
        assert message.streams is streams
    assert wire.Message().feed(frame)


@asynccontextmanager
async def upstream() -> AsyncIterator[int]:
    server = await asyncio.get_running_loop().create_server(wire.Replying, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def test_the_upstream_streams_a_hundred_events_on_request() -> None:
    async with upstream() as port:
        plain = await wire.ask(port, bodies.request(bodies.body(SMALL, stream=False)))
        streamed = await wire.ask(port, bodies.request(bodies.body(SMALL, stream=True)))
    assert (
        json.loads(plain.partition(b"\r\n\r\n")[2])["choices"][0]["message"]["content"].encode().startswith(wire.SAID)
    )
    assert streamed.count(b"data: {") == wire.EVENTS
    assert streamed.count(b"data: [DONE]") == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_load_counts_replies(stream: bool) -> None:
    async with upstream() as port:
        load = await wire.load(port, bodies.request(bodies.body(MEDIUM, stream=stream)), 4, 0.1)
    assert load.count >= 4 and load.cut == 0
    assert 0 < load.first <= load.p50 <= load.p99 < 1


async def test_load_names_the_status_of_a_refusal() -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 0\r\n\r\n")

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        with pytest.raises(wire.Failed, match="413 Too Large"):
            await wire.load(server.sockets[0].getsockname()[1], bodies.request(b"{}"), 2, 0.1)


@pytest.mark.parametrize(("size", "bytes_", "messages"), [(SMALL, 1e3, 1), (MEDIUM, 1e5, 100), (LARGE, 1e6, 1000)])
def test_bodies_are_as_large_as_their_name_says(size: bodies.Size, bytes_: float, messages: int) -> None:
    body = bodies.body(size, stream=True)
    assert len(body) == pytest.approx(bytes_, rel=0.1)
    asked = CHAT.parse(body)
    assert len(asked.entries) == messages
    assert asked.stream
    assert bodies.body(size, stream=False).count(b"true") == 0


# -- the figures ------------------------------------------------------------------------------------------------------


def test_percentiles_and_medians() -> None:
    assert wire.percentile(range(100), 50) == 50
    assert wire.percentile(range(100), 99) == 99
    assert wire.percentile([3, 1, 2], 99) == 3
    runs, bare = [taken(1, 9), taken(2, 7), taken(9, 8)], [taken(2), taken(8), taken(9)]
    assert figures.median(runs, bare) == Figures(2, 0.008, 0.016, 0.001, 0.001, share=0.5)
    assert figures.median(runs[:1], bare).share == 0.5, "what is asked once is compared with the first turn"


def test_a_row_shows_shares_and_added_times() -> None:
    table = report.table(
        Point(SMALL, True, 1), measured(off=taken(800, 1.5, 1.25), litellm="500 Internal Server Error")
    )
    rows = {line[:24].strip(): line[24:].split() for line in table.splitlines()[2:]}
    assert rows["proxy, off"] == ["800", "0.80", "1.50", "3.00", "1.40", "2.80", "0.25", "1.00"]
    assert rows["litellm"] == ["500", "Internal", "Server", "Error"]


NOTHING_DONE = "1 KB that nothing is done about"
MISSED: list[tuple[Point, dict[str, Figures | str], dict[str, str]]] = [
    (Point(SMALL, False, 16), {}, {}),
    (Point(SMALL, False, 16), {"off": taken(790)}, {NOTHING_DONE: "proxy, off: 0.79"}),
    (Point(SMALL, False, 16), {"moving": taken(400)}, {}),
    (Point(LARGE, False, 1), {"moving": taken(1000, 6.1)}, {"1 MB within 5 ms": "moving: 5.1 ms more"}),
    (Point(LARGE, False, 16), {"moving": taken(1000, 6.1)}, {}),
    (Point(SMALL, True, 1), {"planning": taken(1000, 1, 2.5)}, {"first byte within 1 ms": "planning: 1.5 ms more"}),
    (Point(SMALL, False, 1), {"planning": taken(1000, 1, 2.5)}, {}),
    (Point(SMALL, True, 1), {"lean": taken(999), "fat": taken(333)}, {}),
    (Point(SMALL, True, 1), {"lean": taken(999), "fat": taken(500)}, {"3 times those": "moving: 2.00 times fat"}),
    (Point(SMALL, True, 1), {"lean": taken(2000)}, {"than every competitor": "moving: 0.50 times lean"}),
    (Point(SMALL, True, 1), {"lean": "does not start"}, {}),
]


@pytest.mark.parametrize(("point", "ours", "missed"), MISSED)
def test_missed_expectations_are_named(point: Point, ours: dict[str, Figures | str], missed: dict[str, str]) -> None:
    found = list(expected.findings(point, measured(**ours)))
    fallen = {one.expected: one.shown for one in found if not one.holds}
    assert len(fallen) == len(missed)
    for (text, shown), (wanted, end) in zip(fallen.items(), missed.items(), strict=True):
        assert wanted in text and shown.startswith(f"{point}: ") and shown.endswith(end)


def test_the_report_lists_expectations_met_and_missed() -> None:
    results = {Point(SMALL, stream, 16): measured(off=taken(700 if stream else 900)) for stream in (False, True)}
    assert expected.report(results).splitlines() == [
        "expected, and missed: 1 KB that nothing is done about: 0.8 of the bare relay's requests/s or more (3 of 4)",
        "  1 KB, streamed, 16 connections: proxy, off: 0.70",
    ]
    assert expected.report({Point(SMALL, False, 16): measured()}).startswith("expected, and so: ")


def test_the_summary_has_a_cell_for_each_request() -> None:
    crowds = [Point(SMALL, stream, many) for stream in (False, True) for many in (1, 16)]
    off = {1: taken(800, 1.5), 16: taken(812, 30)}
    results = {point: measured(off=off[point.connections], fat="413") for point in crowds}
    rows = [line.strip("| ").split(" | ") for line in report.summary(results).splitlines()]
    assert ["requests/s, bare relay = 1, from 1 / 16 connections", "1 KB plain", "1 KB streamed"] in rows
    assert ["bare relay", *["1,000/s / 1,000/s"] * 2] in rows
    assert [row[1:] for row in rows if row[0] == "proxy, off"] == [["0.80 / 0.81"] * 2, ["1.4 / 30"] * 2]
    assert [row[1:] for row in rows if row[0] == "fat"] == [["- / -"] * 2] * 2


def test_the_memory_table_marks_systems_that_have_ended() -> None:
    rows = report.memory_table({"lean": [41.6, 42.0], "fat": [90.0, 0.0]}).splitlines()
    assert rows[-2:] == ["| lean | 42 | 42 |", "| fat | 90 | ended |"]


def test_words_choose_points_and_competitors() -> None:
    assert len(figures.points()) == 18
    assert figures.points(["1 mb", "streamed", "16 conn"]) == [Point(LARGE, True, 16)]
    assert {point.size for point in figures.points(["litellm", "1 KB"])} == {SMALL}
    names = [competitor.name for competitor in COMPETITORS]
    assert figures.chosen_of(names, ["litellm", "plain"]) == {"LiteLLM proxy 1.80.0"}
    assert figures.chosen_of(names, ["plain"]) == set(names)


def test_a_chart_is_drawn_although_a_competitor_failed(tmp_path: Path) -> None:
    results = {Point(SMALL, stream, 16): measured(lean=taken(500), fat="413") for stream in (False, True)}
    report.draw(tmp_path / "chart.png", results)
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


# -- who takes part ---------------------------------------------------------------------------------------------------

MUTE = """
import socket, sys, time
listening = socket.create_server(("127.0.0.1", int(sys.argv[1])))
time.sleep(60)
"""


def ends(site: Site) -> Launch:
    return Launch([sys.executable, "-c", "raise SystemExit(3)"])


def mute(site: Site) -> Launch:
    return Launch([sys.executable, "-c", MUTE, str(site.port)])


def test_systems_that_end_or_never_reply_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "PATIENCE", 1.0)
    with ExitStack() as running:
        systems = start(running, tmp_path, {"bare relay": bare, "ends": ends, "mute": mute})
        bench = overhead.Bench(systems, running.enter_context(asyncio.Runner()), runs=1, seconds=0.1)
        memory = bench.begin()
        shown = bench.at(Point(SMALL, False, 1))
    assert memory["ends"] == 0 and memory["bare relay"] > 10
    assert shown["ends"] == "ended with status 3"
    assert shown["mute"] == "no reply within 1 s"
    assert isinstance(shown["bare relay"], Figures)
    assert all(one.ended for one in systems)


def launchers() -> Iterator[tuple[str, Launcher]]:
    yield "nginx", nginx("nginx")
    yield "bare", bare
    yield from ((name, proxy(offload)) for name, offload in POLICIES.items())
    yield from ((competitor.name, competitor.at) for competitor in COMPETITORS)


@pytest.mark.parametrize(("name", "launcher"), list(launchers()))
def test_every_launcher_passes_its_port_and_the_upstream(name: str, launcher: Launcher, tmp_path: Path) -> None:
    launch = launcher(Site(40001, 40002, tmp_path))
    files = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    told = b" ".join([*(part.encode() for part in (*launch.command, *launch.environment.values())), *files])
    told += b" ".join(value.encode() for value in launch.headers.values())
    assert b"127.0.0.1:40001" in told and b"40002" in told
    assert all(isinstance(part, str) for part in launch.command)


def test_every_competitor_is_pinned_at_the_version_in_its_name() -> None:
    pins = "\n".join(path.read_text() for path in PINS.glob("*.in")) + (PINS / "portkey/package.json").read_text()
    for competitor in COMPETITORS:
        version = competitor.name.rpartition(" ")[2]
        assert re.search(rf'[=\s":]{re.escape(version)}\b', pins), competitor.name


def test_no_compromised_release_of_litellm_and_no_pin_without_a_hash() -> None:
    for path in PINS.glob("*.txt"):
        pins = path.read_text()
        for version in re.findall(r"(?m)^litellm==(\d+)\.(\d+)\.", pins):
            assert tuple(map(int, version)) < (1, 107), path.name
        named = re.findall(r"(?m)^[a-z0-9][^=\s]*==[^\\\n]*(\\?)$", pins)
        assert named and all(named), f"{path.name}: every pin is followed by its hashes"


def test_the_lock_of_node_names_no_registry() -> None:
    lock = json.loads((PINS / "portkey/package-lock.json").read_text())
    packages = {name: package for name, package in lock["packages"].items() if name}
    assert packages["node_modules/@portkey-ai/gateway"]["version"] == "1.15.2"
    assert all("integrity" in package and "resolved" not in package for package in packages.values())
