"""Whoever reads the log, or does not: nobody waits for it, and what is missing is counted."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from proxy.telemetry import logs
from proxy.telemetry.logs import JsonLines, Lines
from tests.clock import PATIENCE, wait_until

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


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no device that is always full")
def test_what_a_full_disk_does_not_take_is_counted(tmp_path: Path) -> None:
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


def test_the_end_waits_for_a_slow_reader_but_not_for_long(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
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
