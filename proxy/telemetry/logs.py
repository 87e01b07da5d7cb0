"""Structured logging with the standard library: a line for each request, and each kind of fault at
most once a minute.

Every line has a time, a level, the logger's name, a message and fields: as JSON, or in `full` as
text with `key=value` after the message. `short` is for a terminal. A request that upstream did not
serve is a warning. No line contains content or keys. A request's line contains its `Outcome`, with
the path cut off at its `?`.

Nobody waits for whoever reads the log: lines go through a bounded queue to a thread that writes
them. Beyond `WAITING` they are dropped, and a line in their place says how many.
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from logging.handlers import QueueHandler
from typing import Any, Literal, TextIO

import msgspec
from msgspec.structs import asdict, replace

from proxy.errors import Fault, OffloadError
from proxy.telemetry.outcome import Kind, Outcome

Format = Literal["json", "full", "short"]

LONGEST = 200
"""The most characters that are logged of a field whose value clients choose, such as the model's
name."""

WAITING = 8_000
"""The most lines that wait to be written: some 8 MB."""

LAST = 0.5
"""Seconds that what waits may take when the process ends."""

LATEST = 0.05
"""Seconds until an outcome is recorded."""

UPSTREAMS = frozenset((Fault.CONNECT, Fault.TIMEOUT, Fault.BROKEN, Fault.PROTOCOL))
"""Faults of upstream's, whose requests are warnings."""

logger = logging.getLogger(__name__)
_log = logging.getLogger("proxy.request")
_PLAIN = re.compile(r"[!#-<>-\[\]-~]+")
"""Matches text that needs no quotes: printable ASCII without spaces, quotes, equals signs and
backslashes."""


def configure(form: Format, stream: TextIO | None = None) -> None:
    """Send all logging of this process to `stream` (default: standard error, which is never waited
    for): ours and the server's from INFO on, everything else from WARNING on."""
    handler: logging.Handler = logging.NullHandler()
    if stream or sys.stderr:  # it is None if it was closed when the process began
        handler = logging.StreamHandler(stream) if stream else Lines(sys.stderr.fileno())
    handler.setFormatter({"json": JsonLines, "full": TextLines, "short": ShortLines}[form]())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    for name in ("proxy", "uvicorn"):
        logging.getLogger(name).setLevel(logging.INFO)


@contextmanager
def beside(log: logging.Logger, doing: str) -> Iterator[None]:
    """Run what is done beside a reply, such as keeping records. If it fails, the log says so and
    the reply goes on."""
    try:
        yield
    except OffloadError as error:
        log.warning("%s failed: %s", doing, error)
    except Exception:
        log.exception("a bug, in %s", doing)


class Lines(QueueHandler):
    """Hands lines to a thread that writes them to a file descriptor, or drops and counts them."""

    def __init__(self, descriptor: int) -> None:
        self._waiting: queue.Queue[bytes] = queue.Queue(WAITING)
        super().__init__(self._waiting)
        self._descriptor = descriptor
        self._dropped = self._failed = 0
        """Lines for which there was no room, counted by callers, and those not written, counted by
        the thread."""
        threading.Thread(target=self._run, name="log", daemon=True).start()

    def prepare(self, record: logging.LogRecord) -> Any:
        """Return the record's line."""
        return f"{self.format(record)}\n".encode(errors="backslashreplace")

    def enqueue(self, record: Any) -> None:
        """Have the line written, or drop it."""
        try:
            self._waiting.put_nowait(record)
        except queue.Full:
            self._dropped += 1

    def flush(self) -> None:
        """Wait until all is written, for at most `LAST`. Logging calls this when the process
        ends."""
        until = time.monotonic() + LAST
        while self._waiting.unfinished_tasks and time.monotonic() < until:
            time.sleep(0.005)

    def _run(self) -> None:
        told = 0
        while True:
            lines = self._waiting.get()
            missing = self._dropped + self._failed
            if missing > told:
                gap = logging.LogRecord(
                    __name__, logging.WARNING, "", 0, "lines of the log were dropped", None, None
                )
                gap.__dict__["fields"] = {"lines": missing - told}
                lines = self.prepare(gap) + lines
            try:
                # in one piece if not longer than PIPE_BUF: several processes write to one pipe
                while lines:
                    try:
                        lines = lines[os.write(self._descriptor, lines) :]
                    except BlockingIOError:  # another process has made it so
                        select.select([], [self._descriptor], [])
                told = missing
            except OSError:  # a full disk, or a reader that is gone
                self._failed += 1
            self._waiting.task_done()


class Recorder:
    """Passes outcomes to each of the `sinks`, those of `LATEST` seconds together: one by one took
    several times as long. A failing sink does not touch the others. `record` needs a running event
    loop; `flush` does not.
    """

    def __init__(self, *sinks: Callable[[Sequence[Outcome]], None]) -> None:
        self._sinks = sinks
        self._waiting: list[Outcome] = []

    def record(self, outcome: Outcome) -> None:
        """Record `outcome` within `LATEST` seconds."""
        if not self._waiting:
            asyncio.get_running_loop().call_later(LATEST, self.flush)
        self._waiting.append(outcome)

    def flush(self) -> None:
        """Record all waiting outcomes. Call it before the metrics are read, and at the end."""
        waiting = self._waiting
        self._waiting = []
        for sink in self._sinks:
            try:
                sink(waiting)
            except Exception:
                logger.exception(
                    "a bug, in recording requests: %s", getattr(sink, "__qualname__", sink)
                )


def requests(outcomes: Sequence[Outcome]) -> None:
    """Log one line for each request. Fields that clients choose are cut to `LONGEST`."""
    for outcome in outcomes if _log.isEnabledFor(logging.INFO) else ():
        chosen = {"path": outcome.path.partition("?")[0]}
        chosen |= {name: getattr(outcome, name) for name in ("method", "model", "detail")}
        fields = replace(outcome, **{name: _valid(text[:LONGEST]) for name, text in chosen.items()})
        # Not `_log.info`, which searches the stack for its caller.
        level = logging.WARNING if outcome.fault in UPSTREAMS else logging.INFO
        _log.handle(
            _log.makeRecord(_log.name, level, "", 0, "request", (), None, extra={"fields": fields})
        )


def event(
    logger: logging.Logger, message: str, level: int = logging.INFO, **fields: object
) -> None:
    """Log a line with fields, for instance about a reload of the policies."""
    fields = {
        name: _valid(value) if isinstance(value, str) else value for name, value in fields.items()
    }
    logger.log(level, message, extra={"fields": fields})


class Limited:
    """Logs warnings to one logger, at most one of each kind in `seconds`. Callers keep the number
    of kinds small."""

    def __init__(
        self,
        logger: logging.Logger,
        *,
        seconds: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logger = logger
        self._seconds = seconds
        self._clock = clock
        self._kinds: dict[str, tuple[float, int]] = {}

    def __call__(self, kind: str, message: str) -> None:
        """Log `message`, or only count it. The next line of its `kind` gives the number of skipped
        ones as `more`."""
        now = self._clock()
        next_at, more = self._kinds.get(kind, (now, 0))
        if now < next_at:
            self._kinds[kind] = (next_at, more + 1)
            return
        self._kinds[kind] = (now + self._seconds, 0)
        event(self._logger, message, logging.WARNING, kind=kind, more=more)


class JsonLines(logging.Formatter):
    """Writes each record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line. Values without a JSON form are written as text."""
        head = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _valid(record.getMessage()),
        }
        fields = getattr(record, "fields", {})
        # encoding the struct is five times as fast as encoding a mapping
        if isinstance(fields, Outcome):
            return (
                msgspec.json.encode(head)[:-1] + b"," + msgspec.json.encode(fields)[1:]
            ).decode()
        error = {"error": _valid(self.formatException(record.exc_info))} if record.exc_info else {}
        return msgspec.json.encode({**head, **fields, **head, **error}, enc_hook=str).decode()


class TextLines(logging.Formatter):
    """Writes each record as a line for people, without fields that are empty or zero."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, followed by the traceback if there is one."""
        fields = getattr(record, "fields", {})
        fields = asdict(fields) if isinstance(fields, Outcome) else fields
        message = record.getMessage()
        if not message.isprintable():  # so that no client can forge a line
            message = _shown(message)
        words = [_time(record), record.levelname.lower(), record.name, message]
        for name, value in fields.items():
            if value:
                plain = isinstance(value, str) and _PLAIN.fullmatch(value)
                words.append(
                    f"{name}={value if plain else msgspec.json.encode(value, enc_hook=str).decode()}"
                )
        line = " ".join(words)
        return (
            f"{line}\n{_valid(self.formatException(record.exc_info))}" if record.exc_info else line
        )


class ShortLines(TextLines):
    """Writes each record as a short line for whoever watches a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%H:%M:%S", time.localtime(record.created))
        outcome = getattr(record, "fields", None)
        if not isinstance(outcome, Outcome):
            _, _, _, rest = super().format(record).split(" ", 3)
            return f"{at} {record.levelname.lower()}: {rest}"
        words = [
            at,
            str(outcome.status or "gone"),
            _shown(outcome.model or f"{outcome.method} {outcome.path}"),
        ]
        before = outcome.tokens_before
        after = outcome.tokens_after
        if outcome.kind is Kind.OBSERVED and before != after:
            words.append("only observed:")
        if before and before == after:
            words.append(f"{before:,} tokens")
        elif before:
            words.append(
                f"{before:,} → {after:,} tokens ({100 * (after - before) / before:+.0f} %)".replace(
                    "-", "\N{MINUS SIGN}"
                )
            )
        line = " ".join(words)
        if outcome.moved:
            line += f", moved {outcome.moved:,} {'result' if outcome.moved == 1 else 'results'}"
        if outcome.detail:
            line += f", warning: {_shown(outcome.detail)}"
        elif outcome.status >= 400:
            line += f", from {'the proxy' if outcome.fault else 'upstream'}"
        return line


def _shown(text: str) -> str:
    """Return text without what could forge a line or control a terminal."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def _time(record: logging.LogRecord) -> str:
    """Return the record's time in UTC, to the millisecond."""
    return (
        datetime.fromtimestamp(record.created, UTC)
        .isoformat(timespec="milliseconds")
        .replace("+00:00", "Z")
    )


def _valid(text: str) -> str:
    """Replace lone surrogates, which UTF-8 cannot encode."""
    return text if text.isascii() else text.encode(errors="replace").decode()
