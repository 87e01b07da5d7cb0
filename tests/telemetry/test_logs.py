"""What a line of the log says; who reads it, or does not; and that outcomes are recorded once, in
order, and soon."""

from __future__ import annotations

import io
import json
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from proxy.errors import Fault
from proxy.telemetry import logs
from proxy.telemetry.logs import LATEST, JsonLines, Lines, Recorder
from proxy.telemetry.outcome import Kind, Outcome, ToolUse
from tests.clock import PATIENCE, Clock, turns, wait_until

OUTCOME = Outcome(
    request_id="req-1",
    tenant="acme",
    namespace="acme-0123456789abcdef",
    kind=Kind.OFFLOADED,
    method="POST",
    path="/v1/chat/completions?api-key=sk-secret",
    model="gpt-4.1",
    status=200,
    tokens_before=90_000,
    tokens_after=12_000,
    tool_uses=(ToolUse("grep", "ok", 120),),
    store_errors={"get:timeout": 2},
    seconds=1.234568,
    added_seconds=0.001235,
)


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def stream() -> io.StringIO:
    return io.StringIO()


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_request_is_one_json_line_with_every_field_of_its_outcome(stream: io.StringIO) -> None:
    logs.configure("json", stream)
    logs.requests([OUTCOME])
    [line] = lines(stream)
    assert {"time", "level", "logger", "message", *msgspec.structs.asdict(OUTCOME)} == set(line)
    assert (line["level"], line["logger"], line["message"]) == ("info", "proxy.request", "request")
    assert abs(datetime.fromisoformat(line["time"]) - datetime.now(UTC)).total_seconds() < PATIENCE
    assert line["tool_uses"] == [{"tool": "grep", "result": "ok", "tokens": 120}]
    assert (line["seconds"], line["added_seconds"]) == (1.234568, 0.001235)
    assert list(line)[:4] == ["time", "level", "logger", "message"]


def test_request_is_one_text_line_without_empty_fields(stream: io.StringIO) -> None:
    logs.configure("full", stream)
    logs.requests([OUTCOME])
    [line] = stream.getvalue().splitlines()
    head, _, rest = line.partition(" ")
    assert abs(datetime.fromisoformat(head) - datetime.now(UTC)).total_seconds() < PATIENCE
    assert rest == (
        "info proxy.request request request_id=req-1 tenant=acme namespace=acme-0123456789abcdef kind=offloaded "
        "method=POST path=/v1/chat/completions model=gpt-4.1 mode=off status=200 tokens_before=90000 "
        'tokens_after=12000 tool_uses=[{"tool":"grep","result":"ok","tokens":120}] '
        'store_errors={"get:timeout":2} seconds=1.234568 added_seconds=0.001235'
    )


@pytest.mark.parametrize("form", ["json", "full", "short"])
def test_clients_can_put_neither_keys_nor_line_breaks_into_a_log_line(
    stream: io.StringIO, form: logs.Format
) -> None:
    logs.configure(form, stream)
    forged = 'x\n2030-01-01 info proxy.request request status=200 "\u2028\x1b[2J\ud800'
    logs.requests([msgspec.structs.replace(OUTCOME, model=forged, path=f"/v1/{forged}")])
    logging.getLogger("uvicorn.error").warning("bad request %s", forged)
    assert "sk-secret" not in stream.getvalue()
    assert len(stream.getvalue().split("\n")) == 3
    assert "\x1b" not in stream.getvalue()


def test_fields_that_clients_choose_are_cut_in_the_log(stream: io.StringIO) -> None:
    logs.configure("json", stream)
    logs.requests(
        [msgspec.structs.replace(OUTCOME, model="m" * 1_000_000, path="/" + "é" * 1_000_000)]
    )
    [line] = lines(stream)
    assert len(line["model"]) == len(line["path"]) == logs.LONGEST


def test_log_events_have_fields(stream: io.StringIO) -> None:
    logs.configure("json", stream)
    logs.event(logging.getLogger("proxy.policies"), "policies reloaded", tenants=3, folder=io)
    [line] = lines(stream)
    assert (line["message"], line["tenants"]) == ("policies reloaded", 3)
    assert line["folder"].startswith("<module"), "what has no JSON form is written as text"


@pytest.mark.parametrize("form", ["json", "full", "short"])
def test_half_a_surrogate_pair_costs_no_line(stream: io.StringIO, form: logs.Format) -> None:
    logs.configure(form, stream)
    logger = logging.getLogger("proxy.test")
    logs.event(logger, "no summary", model="m-\ud800")
    try:
        raise ValueError("\udfff")
    except ValueError:
        logger.exception("a bug")
    assert "m-?" in stream.getvalue() and "ValueError" in stream.getvalue()
    assert stream.getvalue().encode()


@pytest.mark.parametrize("form", ["json", "full", "short"])
def test_exception_is_logged_with_its_traceback(stream: io.StringIO, form: logs.Format) -> None:
    logs.configure(form, stream)
    try:
        raise ValueError("why")
    except ValueError:
        logging.getLogger("proxy.server.app").exception("it failed")
    text = json.loads(stream.getvalue())["error"] if form == "json" else stream.getvalue()
    assert "Traceback" in text
    assert text.rstrip().endswith("ValueError: why")


def test_other_libraries_log_from_warnings_on(stream: io.StringIO) -> None:
    logs.configure("json", stream)
    for name in ("proxy.x", "uvicorn.error", "aiohttp.client"):
        for say in (logging.getLogger(name).info, logging.getLogger(name).warning):
            say(name)
    assert [(line["logger"], line["level"]) for line in lines(stream)] == [
        ("proxy.x", "info"),
        ("proxy.x", "warning"),
        ("uvicorn.error", "info"),
        ("uvicorn.error", "warning"),
        ("aiohttp.client", "warning"),
    ]


def test_warnings_of_a_kind_are_logged_once_a_minute(stream: io.StringIO) -> None:
    logs.configure("json", stream)
    now = 0.0
    warn = logs.Limited(logging.getLogger("proxy.stores"), clock=lambda: now)
    for now in (0.0, 1.0, 59.9):
        warn("store get", f"failed at {now}")
    warn("store put", "another kind")
    now = 60.0
    warn("store get", "failed again")
    now = 120.0
    warn("store get", "and again")
    assert [
        (line["message"], line["kind"], line["more"], line["level"]) for line in lines(stream)
    ] == [
        ("failed at 0.0", "store get", 0, "warning"),
        ("another kind", "store put", 0, "warning"),
        ("failed again", "store get", 2, "warning"),
        ("and again", "store get", 0, "warning"),
    ]


# -- nobody waits for whoever reads the log --

GAP = "lines of the log were dropped"


class Pipe:
    def __init__(self) -> None:
        self.read, self.write = os.pipe()
        self.handler = Lines(self.write)
        self.handler.setFormatter(JsonLines())

    def log(self, message: str) -> None:
        self.handler.handle(logging.LogRecord("a", logging.INFO, "", 0, message, None, None))

    def lines(self) -> list[dict[str, Any]]:
        """Read all that was logged."""
        os.set_blocking(self.read, False)
        read = b""

        def whole() -> bool:
            nonlocal read
            written = not self.handler.queue.unfinished_tasks
            with suppress(BlockingIOError):
                while piece := os.read(self.read, 1 << 20):
                    read += piece
            return written

        wait_until(whole)
        return [json.loads(line) for line in read.splitlines()]


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    pipe = Pipe()
    yield pipe
    for descriptor in (pipe.read, pipe.write):
        os.close(descriptor)


def test_lines_that_nobody_reads_are_held_and_come_in_order(pipe: Pipe) -> None:
    for number in range(2_000):
        pipe.log(f"{number} {'x' * 100}")
    assert [int(line["message"].split()[0]) for line in pipe.lines()] == list(range(2_000))
    pipe.log("at once")
    assert [line["message"] for line in pipe.lines()] == ["at once"]


def test_beyond_the_bound_lines_are_dropped_and_counted(pipe: Pipe) -> None:
    for number in range(logs.WAITING * 3):
        pipe.log(f"{number} {'x' * 100}")
    read = pipe.lines()
    kept = [int(line["message"].split()[0]) for line in read if line["message"] != GAP]
    gaps = [line["lines"] for line in read if line["message"] == GAP]
    assert kept == sorted(kept) and len(kept) >= logs.WAITING
    assert gaps and len(kept) + sum(gaps) == logs.WAITING * 3
    pipe.log("again")
    assert [line["message"] for line in pipe.lines()] == ["again"]


def test_a_reader_that_is_gone_costs_lines_only(pipe: Pipe) -> None:
    os.close(pipe.read)
    for number in range(10):
        pipe.log(f"{number}")
    pipe.read = os.open(os.devnull, os.O_RDONLY)


@pytest.mark.skipif(
    not Path("/dev/full").exists(), reason="this system has no device that is always full"
)
def test_what_a_full_disk_does_not_take_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "LAST", PATIENCE)
    full, log = os.open("/dev/full", os.O_WRONLY), tmp_path / "log"
    handler = Lines(full)
    handler.setFormatter(JsonLines())

    def record(message: str) -> None:
        handler.handle(logging.LogRecord("a", logging.INFO, "", 0, message, None, None))

    for _ in range(5):
        record("lost")
    handler.flush()
    with log.open("wb") as file:
        os.dup2(file.fileno(), full)
    record("written")
    handler.flush()
    os.close(full)
    gap, line = [json.loads(line) for line in log.read_text().splitlines()]
    assert (gap["message"], gap["lines"], line["message"]) == (GAP, 5, "written")


def test_the_end_waits_for_a_slow_reader_but_not_for_long(
    pipe: Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(200):
        pipe.log(f"{number} {'x' * 4096}")
    read = []
    thread = threading.Thread(target=lambda: read.extend(pipe.lines()))
    thread.start()
    monkeypatch.setattr(logs, "LAST", PATIENCE)
    pipe.handler.flush()
    thread.join()
    assert len(read) == 200
    monkeypatch.setattr(logs, "LAST", 0.01)
    for number in range(200):
        pipe.log(f"{number} {'x' * 4096}")
    pipe.handler.flush()  # nobody reads


# -- recording --


async def test_outcomes_are_recorded_in_order_and_soon(clock: Clock) -> None:
    one: list[str] = []
    other: list[str] = []
    ledger = Recorder(
        lambda batch: one.extend(each.request_id for each in batch),
        lambda batch: other.extend(each.request_id for each in batch),
    )
    for number in range(6):
        ledger.record(msgspec.structs.replace(OUTCOME, request_id=f"{number}"))
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
        ledger.record(msgspec.structs.replace(OUTCOME, request_id=f"{number}"))
    assert not written
    clock.move(LATEST)
    await turns()
    assert len(written) == 2
    assert "a bug, in recording requests" in caplog.text


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"tokens_before": 30_140, "tokens_after": 14_759, "moved": 6},
         "200 gpt-4.1-mini 30,140 → 14,759 tokens (\N{MINUS SIGN}51 %), moved 6 results"),
        ({"kind": Kind.OBSERVED, "tokens_before": 30_140, "tokens_after": 14_759, "moved": 6},
         "200 gpt-4.1-mini only observed: 30,140 → 14,759 tokens (\N{MINUS SIGN}51 %), moved 6 results"),
        ({"tokens_before": 800, "tokens_after": 800}, "200 gpt-4.1-mini 800 tokens"),
        ({"tokens_before": 800, "tokens_after": 900, "moved": 1},
         "200 gpt-4.1-mini 800 → 900 tokens (+12 %), moved 1 result"),
        ({"model": "", "path": "/v1/models?key=secret", "method": "GET"}, "200 GET /v1/models"),
        ({"status": 502, "fault": Fault.CONNECT, "detail": "connection refused at 127.0.0.1:9"},
         "502 gpt-4.1-mini, warning: connection refused at 127.0.0.1:9"),
        ({"status": 0}, "gone gpt-4.1-mini"),
        ({"status": 401}, "401 gpt-4.1-mini, from upstream"),
        ({"status": 401, "fault": Fault.CLIENT}, "401 gpt-4.1-mini, from the proxy"),
    ],
)  # fmt: skip
def test_a_terminal_gets_one_short_line_for_a_request(
    stream: io.StringIO, fields: dict[str, object], said: str
) -> None:
    logs.configure("short", stream)
    bare = {"tokens_before": 0, "tokens_after": 0, "model": "gpt-4.1-mini"}
    logs.requests([msgspec.structs.replace(OUTCOME, **{**bare, **fields})])
    at, _, rest = stream.getvalue().rstrip("\n").partition(" ")
    assert datetime.strptime(at, "%H:%M:%S")
    assert rest == said


def test_a_terminal_gets_other_lines_without_their_logger(stream: io.StringIO) -> None:
    logs.configure("short", stream)
    logs.event(logging.getLogger("proxy.policies"), "policies reloaded", logging.WARNING, tenants=3)
    assert stream.getvalue().partition(" ")[2] == "warning: policies reloaded tenants=3\n"


def test_a_request_that_upstream_did_not_serve_is_a_warning(stream: io.StringIO) -> None:
    logs.configure("json", stream)
    logs.requests([OUTCOME, msgspec.structs.replace(OUTCOME, fault=Fault.CONNECT)])
    assert [line["level"] for line in lines(stream)] == ["info", "warning"]
