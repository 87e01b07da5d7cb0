from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from proxy.telemetry import logs
from proxy.telemetry.outcome import Kind, Outcome, ToolUse

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
    assert abs(datetime.fromisoformat(line["time"]) - datetime.now(UTC)).total_seconds() < 5
    assert line["tool_uses"] == [{"tool": "grep", "result": "ok", "tokens": 120}]
    assert (line["seconds"], line["added_seconds"]) == (1.234568, 0.001235)
    assert list(line)[:4] == ["time", "level", "logger", "message"]


def test_request_is_one_text_line_without_empty_fields(stream: io.StringIO) -> None:
    logs.configure("text", stream)
    logs.requests([OUTCOME])
    [line] = stream.getvalue().splitlines()
    head, _, rest = line.partition(" ")
    assert abs(datetime.fromisoformat(head) - datetime.now(UTC)).total_seconds() < 5
    assert rest == (
        "info proxy.request request request_id=req-1 tenant=acme namespace=acme-0123456789abcdef kind=offloaded "
        "method=POST path=/v1/chat/completions model=gpt-4.1 mode=off status=200 tokens_before=90000 "
        'tokens_after=12000 tool_uses=[{"tool":"grep","result":"ok","tokens":120}] '
        'store_errors={"get:timeout":2} seconds=1.234568 added_seconds=0.001235'
    )


@pytest.mark.parametrize("form", ["json", "text"])
def test_clients_can_put_neither_keys_nor_line_breaks_into_a_log_line(stream: io.StringIO, form: logs.Format) -> None:
    logs.configure(form, stream)
    forged = 'x\n2030-01-01 info proxy.request request status=200 "\u2028\x1b[2J\ud800'
    logs.requests([msgspec.structs.replace(OUTCOME, model=forged, path=f"/v1/{forged}")])
    logging.getLogger("uvicorn.error").warning("bad request %s", forged)
    assert "sk-secret" not in stream.getvalue()
    assert len(stream.getvalue().split("\n")) == 3
    assert "\x1b" not in stream.getvalue()


def test_fields_that_clients_choose_are_cut_in_the_log(stream: io.StringIO) -> None:
    logs.configure("json", stream)
    logs.requests([msgspec.structs.replace(OUTCOME, model="m" * 1_000_000, path="/" + "é" * 1_000_000)])
    [line] = lines(stream)
    assert len(line["model"]) == len(line["path"]) == logs.LONGEST


def test_log_events_have_fields(stream: io.StringIO) -> None:
    logs.configure("json", stream)
    logs.event(logging.getLogger("proxy.policies"), "policies reloaded", tenants=3, folder=io)
    [line] = lines(stream)
    assert (line["message"], line["tenants"]) == ("policies reloaded", 3)
    assert line["folder"].startswith("<module"), "what has no JSON form is written as text"


@pytest.mark.parametrize("form", ["json", "text"])
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


@pytest.mark.parametrize("form", ["json", "text"])
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
    assert [(line["message"], line["kind"], line["more"], line["level"]) for line in lines(stream)] == [
        ("failed at 0.0", "store get", 0, "warning"),
        ("another kind", "store put", 0, "warning"),
        ("failed again", "store get", 2, "warning"),
        ("and again", "store get", 0, "warning"),
    ]
