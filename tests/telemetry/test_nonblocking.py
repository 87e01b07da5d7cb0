"""Whoever reads the log, or does not: nobody waits for it, and what is missing is counted."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from proxy.telemetry import nonblocking
from proxy.telemetry.logs import JsonLines
from proxy.telemetry.nonblocking import PIECE, NonBlockingHandler

GAP = "lines of the log were dropped"


class Pipe:
    def __init__(self) -> None:
        self.read, self.write = os.pipe()
        self.handler = NonBlockingHandler(self.write)
        self.handler.setFormatter(JsonLines())

    def log(self, message: str) -> None:
        self.handler.handle(logging.LogRecord("a", logging.INFO, "", 0, message, None, None))

    def lines(self) -> list[dict[str, Any]]:
        """Read until nothing has come for a while."""
        os.set_blocking(self.read, False)
        read, quiet = b"", 0
        while quiet < 10:
            try:
                read += os.read(self.read, 1 << 20)
                quiet = 0
            except BlockingIOError:
                time.sleep(0.02)
                quiet += 1
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
    assert os.get_blocking(pipe.write), "others may write to it, too"
    assert [int(line["message"].split()[0]) for line in pipe.lines()] == list(range(2_000))
    pipe.log("at once")
    assert [line["message"] for line in pipe.lines()] == ["at once"]


def test_a_line_longer_than_a_pipe_is_whole(pipe: Pipe) -> None:
    pipe.log("long " * 50_000)
    pipe.log("next")
    assert [len(line["message"]) for line in pipe.lines()] == [250_000, 4]


def test_beyond_the_bound_lines_are_dropped_and_counted_once(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nonblocking, "HELD", 50_000)
    for number in range(5_000):
        pipe.log(f"{number} {'x' * 100}")
    *kept, gap = pipe.lines()
    assert [int(line["message"].split()[0]) for line in kept] == list(range(len(kept)))
    assert (gap["level"], gap["message"], gap["lines"]) == ("warning", GAP, 5_000 - len(kept))
    pipe.log("again")
    assert [line["message"] for line in pipe.lines()] == ["again"]


def test_two_processes_may_fill_one_pipe(pipe: Pipe) -> None:
    """As workers do. Neither waits for the reader, and no line is torn."""
    other = NonBlockingHandler(pipe.write)
    other.setFormatter(JsonLines())

    def fill() -> None:
        for number in range(3_000):
            other.handle(logging.LogRecord("b", logging.INFO, "", 0, f"{number} {'y' * 500}", None, None))

    thread = threading.Thread(target=fill, daemon=True)
    thread.start()
    for number in range(3_000):
        pipe.log(f"{number} {'x' * 500}")
    thread.join(20)
    assert not thread.is_alive()
    lines = pipe.lines()
    for logger in "ab":
        assert [int(line["message"].split()[0]) for line in lines if line["logger"] == logger] == list(range(3_000))


def test_a_reader_that_is_gone_costs_lines_only(pipe: Pipe) -> None:
    os.close(pipe.read)
    for number in range(10):
        pipe.log(f"{number}")
    pipe.read = os.open(os.devnull, os.O_RDONLY)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no device that is always full")
def test_what_a_full_disk_does_not_take_is_counted_and_no_thread_is_left(tmp_path: Path) -> None:
    full, log = os.open("/dev/full", os.O_WRONLY), tmp_path / "log"
    handler = NonBlockingHandler(full)
    handler.setFormatter(JsonLines())

    def record(message: str) -> logging.LogRecord:
        return logging.LogRecord("a", logging.INFO, "", 0, message, None, None)

    for _ in range(5):
        handler.handle(record("lost"))
    assert "log" not in [thread.name for thread in threading.enumerate()]
    with log.open("wb") as file:
        os.dup2(file.fileno(), full)
    for message in ("lost as well", "written"):
        handler.handle(record(message))
    os.close(full)
    gap, line = [json.loads(line) for line in log.read_text().splitlines()]
    assert (gap["message"], gap["lines"], line["message"]) == (GAP, 6, "written")


def test_the_end_waits_for_a_slow_reader_but_not_for_long(pipe: Pipe) -> None:
    for number in range(200):
        pipe.log(f"{number} {'x' * PIECE}")
    read = []
    thread = threading.Thread(target=lambda: read.extend(pipe.lines()))
    thread.start()
    pipe.handler.flush()
    thread.join()
    assert len(read) == 200
    for number in range(200):
        pipe.log(f"{number} {'x' * PIECE}")
    pipe.handler.flush()  # nobody reads


def test_where_no_thread_starts_the_next_line_tries_again(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        for number in range(1_000):
            pipe.log(f"{number} {'x' * 200}")
    pipe.log("1000")
    assert [int(line["message"].split()[0]) for line in pipe.lines()] == list(range(1_001))


def test_nobody_waits_for_a_terminal_that_is_not_read() -> None:
    """A stopped terminal (Ctrl-S) has room for less than a piece."""
    reader, terminal = os.openpty()
    handler = NonBlockingHandler(terminal)
    record = logging.LogRecord("a", logging.INFO, "", 0, "x" * 700, None, None)
    thread = threading.Thread(target=lambda: [handler.handle(record) for _ in range(300)], daemon=True)
    thread.start()
    thread.join(5)
    waits = thread.is_alive()
    assert os.get_blocking(terminal), "others may write to it, too"
    os.close(reader)
    os.close(terminal)
    assert not waits
