"""Starts `python -m proxy …` as a fork of a process that has imported the proxy and loaded the vocabularies before.

    with Nursery() as nursery:
        process = nursery.start(["serve", "--port=0"], os.environ, log)

A start then takes 0.1 s of CPU time in place of 1 s. Forks share one seed of `hash`, and differ in it from the tests'
process.
"""

from __future__ import annotations

import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

ROOT = Path(__file__).parents[1]
MOST = 1 << 17
"""Bytes of a request: arguments and environment."""
NUMBER = struct.Struct("q")
"""A process id or an exit code."""


class Fork:
    """A process that a nursery started, with as much of `subprocess.Popen` as tests use."""

    def __init__(self, said: int) -> None:
        self.returncode: int | None = None
        self._said = said
        self.pid = _read(said)

    def poll(self) -> int | None:
        return self._ended(0)

    def wait(self, timeout: float | None = None) -> int:
        if (code := self._ended(timeout)) is None:
            raise subprocess.TimeoutExpired("python -m proxy", timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _ended(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._said], [], [], timeout)[0]:
            self.returncode = _read(self._said)
            os.close(self._said)
        return self.returncode


class Nursery:
    """The process that forks. It ends with the block, or when this process does."""

    def __enter__(self) -> Self:
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", "tests.forking", str(theirs.fileno())]
            self._process = subprocess.Popen(command, cwd=ROOT, pass_fds=[theirs.fileno()])
        return self

    def __exit__(self, kind: type[BaseException] | None, raised: BaseException | None, _: TracebackType | None) -> None:
        self._ours.close()
        self._process.wait()

    def start(self, arguments: Sequence[str], environment: Mapping[str, str], log: BinaryIO) -> Fork:
        """Run `python -m proxy` with these arguments in the project's folder. What it says goes to `log`."""
        said, says = os.pipe()
        try:
            request = json.dumps([[*arguments], {**environment}]).encode()
            socket.send_fds(self._ours, [request], [log.fileno(), says])
        finally:
            os.close(says)
        return Fork(said)


def _read(pipe: int) -> int:
    [number] = NUMBER.unpack(os.read(pipe, NUMBER.size))
    return number


def _write(pipe: int, number: int) -> None:
    os.write(pipe, NUMBER.pack(number))


def _serve(requests: socket.socket) -> None:
    """Begin a process for each request, and for each a second one, which waits for it and says how it ended."""
    while True:
        request, fds, _, _ = socket.recv_fds(requests, MOST, 2)
        if not request:
            return
        log, says = fds
        if os.fork() == 0:
            requests.close()
            if (pid := os.fork()) == 0:
                os.close(says)
                return _become(*json.loads(request), log)
            _write(says, pid)
            _write(says, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            os._exit(0)
        os.close(log)
        os.close(says)


def _become(arguments: Sequence[str], environment: Mapping[str, str], log: int) -> None:
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["proxy", *arguments]
    runpy.run_module("proxy", run_name="__main__", alter_sys=True)


def main(requests: socket.socket) -> None:
    import uvloop  # noqa: F401 (what the proxy imports as late as it can)

    from proxy.server import runner  # noqa: F401
    from proxy.tokens import Tokens

    Tokens().load_all()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # from a terminal it reaches the tests as well, which then end us
    _serve(requests)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
