"""A proxy in a process of its own, on this machine alone, which ends with the process that started
it.

The two talk over the proxy's standard input and output, in lines of JSON: settings, then where it
listens or why it cannot, and at the end what its requests came to. When its input ends, so does the
proxy: however the process at the other end was killed, none is left behind.
`proxy.apps.run.companion` is the other side.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

import proxy
from proxy.apps.run.totals import Totals
from proxy.errors import ProxyError, UserMistake
from proxy.settings import Settings

T = TypeVar("T")

DRAIN = 5.0
STOP = 15.0
"""Seconds that requests get to finish, and within which the proxy must end before it is killed."""


class Start(msgspec.Struct):
    """What the proxy is told at its start: its settings, and whether a link of its dashboard will
    be printed."""

    settings: Settings
    link: bool = False


class Listening(msgspec.Struct):
    """What the proxy says at its start: its address and the link of its dashboard, or why it does
    not serve."""

    address: str = ""
    link: str | None = None
    fault: str = ""


def written(said: msgspec.Struct) -> bytes:
    """Return a line for the other side. It is Python's JSON, because variables and paths need not
    be UTF-8."""
    return json.dumps(msgspec.to_builtins(said, enc_hook=str)).encode() + b"\n"


def read(line: bytes, kind: type[T]) -> T:
    """Return what the other side has written."""
    return msgspec.convert(json.loads(line), kind, dec_hook=lambda made, value: made(value))


class Serving:
    """A running proxy. Raises UserMistake if the settings are at fault, and ProxyError if it does
    not come up."""

    def __init__(self, settings: Settings, log: Path, *, link: bool = False) -> None:
        # -P: nothing is imported from the folder that we are in, which is the user's.
        command = [sys.executable, "-P", "-c", "from proxy.apps.run.companion import main; main()"]
        package = str(Path(proxy.__file__).parents[1])
        paths = os.pathsep.join(filter(None, (package, settings.environment.get("PYTHONPATH", ""))))
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**settings.environment, "PYTHONPATH": paths},
                start_new_session=True,  # a terminal's signals are for the command alone
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input: BinaryIO = self._process.stdin  # type: ignore[assignment]
        self._output: BinaryIO = self._process.stdout  # type: ignore[assignment]
        said = b""
        with suppress(BrokenPipeError):
            self._input.write(written(Start(settings, link)))
            self._input.flush()
            said = self._output.readline()
        if not said:
            self.end()
            raise ProxyError(f"the proxy did not come up; {log} says why")
        listening = read(said, Listening)
        if listening.fault:
            self.end()
            raise UserMistake(listening.fault)
        self.address = listening.address
        self.link = listening.link

    def end(self) -> Totals | None:
        """End the proxy. Returns what its requests came to; None if it was killed."""
        with suppress(OSError):
            self._input.close()
        overdue = threading.Timer(STOP, self._process.kill)
        overdue.start()
        try:
            said = self._output.read()
            self._process.wait()
        finally:
            overdue.cancel()
            self._process.kill()
            self._process.wait()
            self._output.close()
        return read(said, Totals) if said else None
