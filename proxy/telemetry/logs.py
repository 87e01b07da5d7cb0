"""Structured logging with the standard library: a line for each request, and each kind of fault at most once a minute.

Every line has a time, a level, the logger's name, a message and fields: as JSON, or as text with `key=value` after the
message. No line contains content or keys. A request's line contains its `Outcome`, with the path cut off at its `?`.

Nobody waits for whoever reads the log: lines go through a bounded queue to a thread that writes them. Beyond `WAITING`
they are dropped, and a line in their place says how many.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import re
import select
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache
from logging.handlers import QueueHandler
from typing import Any, Literal, TextIO

import msgspec

from proxy.telemetry.outcome import Outcome

Format = Literal["json", "text"]

LONGEST = 200
"""The most characters that are logged of a field whose value clients choose, such as the model's name."""

TOGETHER = 4
"""The most lines that are written at once. A line has some 900 bytes, and so many arrive in one piece (PIPE_BUF), even
in a pipe that several processes write to."""

WAITING = 2_000
"""The most records that wait to be written. One has up to `TOGETHER` lines, so they take some 8 MB."""

LAST = 0.5
"""Seconds that what waits may take when the process ends."""

MOST, LATEST = 64, 0.05
"""The most outcomes that are recorded together, which takes a millisecond, and the most seconds that one waits."""

logger = logging.getLogger(__name__)
_log = logging.getLogger("proxy.request")
_PLAIN = re.compile(r"[!#-<>-\[\]-~]+")
"""Matches text that needs no quotes: printable ASCII without spaces, quotes, equals signs and backslashes."""


class Requests(tuple[Outcome, ...]):
    """The fields of a record that stands for several requests, each with a line of its own."""

    __slots__ = ()


def configure(form: Format, stream: TextIO | None = None) -> None:
    """Send all logging of this process to `stream` (default: standard error, which is never waited for): ours and the
    server's from INFO on, everything else from WARNING on."""
    # No line shows these, and collecting them costs time.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    handler = logging.StreamHandler(stream) if stream else _standard_error()
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    for name in ("proxy", "uvicorn"):
        logging.getLogger(name).setLevel(logging.INFO)


def _standard_error() -> logging.Handler:
    if sys.stderr is None:  # it was closed when the process began
        return logging.NullHandler()
    return Lines(sys.stderr.fileno())


class Lines(QueueHandler):
    """Hands lines to a thread that writes them to a file descriptor, or drops and counts them."""

    def __init__(self, descriptor: int) -> None:
        self._waiting: queue.Queue[bytes] = queue.Queue(WAITING)
        super().__init__(self._waiting)
        self._descriptor = descriptor
        self._dropped = 0
        self._counting = threading.Lock()
        threading.Thread(target=self._run, name="log", daemon=True).start()

    def prepare(self, record: logging.LogRecord) -> Any:
        """Return the record's lines."""
        return f"{self.format(record)}\n".encode(errors="backslashreplace")

    def enqueue(self, record: Any) -> None:
        """Have the lines written, or drop them."""
        try:
            self._waiting.put_nowait(record)
        except queue.Full:
            self._drop(record)

    def flush(self) -> None:
        """Wait until all is written, for at most `LAST`. Logging calls this when the process ends."""
        until = time.monotonic() + LAST
        while self._waiting.unfinished_tasks and time.monotonic() < until:
            time.sleep(0.005)

    def _run(self) -> None:
        while True:
            lines = self._waiting.get()
            with self._counting:
                dropped, self._dropped = self._dropped, 0
            try:
                self._write((self._gap(dropped) if dropped else b"") + lines)
            except OSError:  # a full disk, or a reader that is gone
                self._drop(lines, dropped)
            self._waiting.task_done()

    def _drop(self, lines: bytes, before: int = 0) -> None:
        with self._counting:
            self._dropped += lines.count(b"\n") + before

    def _write(self, lines: bytes) -> None:
        while lines:
            try:
                lines = lines[os.write(self._descriptor, lines) :]
            except BlockingIOError:  # another process has made it so
                select.select([], [self._descriptor], [])

    def _gap(self, dropped: int) -> bytes:
        record = logging.LogRecord(__name__, logging.WARNING, "", 0, "lines of the log were dropped", None, None)
        record.__dict__["fields"] = {"lines": dropped}
        lines: bytes = self.prepare(record)
        return lines


class Recorder:
    """Passes every outcome to each of the `sinks`, in small batches. A failing sink does not touch the others.

    Recording outcomes one by one between requests took several times as long, as the processor's caches go cold.
    `record` needs a running event loop; `flush` does not.
    """

    def __init__(self, *sinks: Callable[[Sequence[Outcome]], None]) -> None:
        self._sinks = sinks
        self._waiting: list[Outcome] = []
        self._timer: asyncio.TimerHandle | None = None
        """Flushes a batch that does not get full. It ends with its batch, or it would cut the next one short."""

    def record(self, outcome: Outcome) -> None:
        """Record `outcome` within `LATEST` seconds."""
        self._waiting.append(outcome)
        if len(self._waiting) >= MOST:
            self.flush()
        elif len(self._waiting) == 1:
            self._timer = asyncio.get_running_loop().call_later(LATEST, self.flush)

    def flush(self) -> None:
        """Record all waiting outcomes. Call it before the metrics are read, and at the end."""
        if self._timer:
            self._timer.cancel()
            self._timer = None
        waiting, self._waiting = self._waiting, []
        for sink in self._sinks:
            try:
                sink(waiting)
            except Exception:
                logger.exception("a bug, in recording requests: %s", getattr(sink, "__qualname__", sink))


def requests(outcomes: Sequence[Outcome]) -> None:
    """Log one line for each request."""
    if not _log.isEnabledFor(logging.INFO):
        return
    for at in range(0, len(outcomes), TOGETHER):
        # Not `_log.info`, which searches the stack for its caller.
        fields = Requests(map(bounded, outcomes[at : at + TOGETHER]))
        _log.handle(_log.makeRecord(_log.name, logging.INFO, "", 0, "request", (), None, extra={"fields": fields}))


def event(logger: logging.Logger, message: str, level: int = logging.INFO, **fields: object) -> None:
    """Log a line with fields, for instance about a reload of the policies."""
    fields = {name: _valid(value) if isinstance(value, str) else value for name, value in fields.items()}
    logger.log(level, message, extra={"fields": fields})


class Limited:
    """Logs warnings to one logger, at most one of each kind in `seconds`. Callers keep the number of kinds small."""

    def __init__(
        self, logger: logging.Logger, *, seconds: float = 60.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._logger = logger
        self._seconds = seconds
        self._clock = clock
        self._kinds: dict[str, tuple[float, int]] = {}

    def __call__(self, kind: str, message: str) -> None:
        """Log `message`, or only count it. The next line of its `kind` gives the number of skipped ones as `more`."""
        now = self._clock()
        next_at, more = self._kinds.get(kind, (now, 0))
        if now < next_at:
            self._kinds[kind] = (next_at, more + 1)
            return
        self._kinds[kind] = (now + self._seconds, 0)
        event(self._logger, message, logging.WARNING, kind=kind, more=more)


def bounded(outcome: Outcome) -> Outcome:
    """Return the outcome as it is logged: fields that clients choose are cut to `LONGEST`."""
    chosen = outcome.method + outcome.path + outcome.model + outcome.detail
    if len(chosen) <= LONGEST and "?" not in chosen and chosen.isascii():
        return outcome
    return msgspec.structs.replace(
        outcome,
        method=_bounded(outcome.method),
        path=_bounded(outcome.path.partition("?")[0]),
        model=_bounded(outcome.model),
        detail=_bounded(outcome.detail),
    )


class JsonLines(logging.Formatter):
    """Writes each record as one line of JSON."""

    def __init__(self) -> None:
        super().__init__()
        self._encode = msgspec.json.Encoder(enc_hook=str).encode

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, or the lines. Values without a JSON form are written as text."""
        head = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _valid(record.getMessage()),
        }
        fields = _fields(record)
        if isinstance(fields, Requests):
            # Every request is logged here, and encoding the struct is five times as fast as encoding a mapping.
            start = self._encode(head)[:-1] + b","
            return b"\n".join([start + self._encode(outcome)[1:] for outcome in fields]).decode()
        error = {"error": _valid(self.formatException(record.exc_info))} if record.exc_info else {}
        return self._encode({**head, **fields, **head, **error}).decode()


class TextLines(logging.Formatter):
    """Writes each record as a line for people, without fields that are empty or zero."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, followed by the traceback if there is one, or the lines."""
        start = [_time(record), record.levelname.lower(), record.name, _printable(record.getMessage())]
        fields = _fields(record)
        if isinstance(fields, Requests):
            return "\n".join([" ".join([*start, *_words(msgspec.structs.asdict(outcome))]) for outcome in fields])
        line = " ".join([*start, *_words(fields)])
        return f"{line}\n{_valid(self.formatException(record.exc_info))}" if record.exc_info else line


def _fields(record: logging.LogRecord) -> Mapping[str, object] | Requests:
    fields: Mapping[str, object] | Requests = getattr(record, "fields", {})
    return fields


def _time(record: logging.LogRecord) -> str:
    """Return the record's time in UTC, to the millisecond."""
    second, milliseconds = divmod(int(record.created * 1000), 1000)
    return f"{_second(second)}.{milliseconds:03d}Z"


@lru_cache(maxsize=16)
def _second(second: int) -> str:
    return datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%S")


def _bounded(text: str) -> str:
    return text if text.isascii() and len(text) <= LONGEST else _valid(text[:LONGEST])


def _valid(text: str) -> str:
    """Replace lone surrogates, which UTF-8 cannot encode."""
    return text if text.isascii() else text.encode(errors="replace").decode()


def _printable(message: str) -> str:
    """Escape control characters, so that no client can forge a line."""
    return message if message.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in message)


def _words(fields: Mapping[str, object]) -> list[str]:
    return [f"{name}={_word(value)}" for name, value in fields.items() if value]


def _word(value: object) -> str:
    if isinstance(value, str):
        return value if _PLAIN.fullmatch(value) else msgspec.json.encode(value).decode()
    return msgspec.json.encode(value, enc_hook=str).decode()
