"""Starts `python -m proxy …` as a fork of a process that has imported the proxy and loaded the
vocabularies before.

    with Nursery() as nursery:
        process = nursery.start(["serve", "--port=0"], os.environ, out, errors)

A start then takes 0.1 s of CPU time in place of 1 s. Forks share one seed of `hash`, and differ in
it from the tests' process.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, NoReturn, Self

from tests.clock import hurry

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
    """The process that forks. It ends with the block, or when this process does. Its environment is
    that in which this was made, whoever begins the block: a test's patches would be in all forks."""

    def __init__(self) -> None:
        self._environment = {**os.environ}

    def __enter__(self) -> Self:
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", "tests.forking", str(theirs.fileno())]
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=self._environment, pass_fds=[theirs.fileno()]
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        raised: BaseException | None,
        _: TracebackType | None,
    ) -> None:
        self._ours.close()
        self._process.wait()

    def start(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        out: BinaryIO,
        errors: BinaryIO,
    ) -> Fork:
        """Run `python -m proxy` with these arguments, in the project's folder."""
        said, says = os.pipe()
        try:
            request = json.dumps([[*arguments], {**environment}]).encode()
            socket.send_fds(self._ours, [request], [out.fileno(), errors.fileno(), says])
        finally:
            os.close(says)
        return Fork(said)


def _read(pipe: int) -> int:
    [number] = NUMBER.unpack(os.read(pipe, NUMBER.size))
    return number


def _write(pipe: int, number: int) -> None:
    os.write(pipe, NUMBER.pack(number))


def _serve(requests: socket.socket) -> None:
    """Begin a process for each request, and for each a second one, which waits for it and says how
    it ended."""
    while True:
        request, fds, _, _ = socket.recv_fds(requests, MOST, 3)
        _reap()
        if not request:
            return
        *outputs, says = fds
        if os.fork() == 0:
            requests.close()
            if (pid := os.fork()) == 0:
                os.close(says)
                return _become(*json.loads(request), outputs)
            _write(says, pid)
            _write(says, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            os._exit(0)
        for fd in fds:
            os.close(fd)


def _reap() -> None:
    """Take leave of those that have ended, so that their CPU time counts as the tests'."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _become(
    arguments: Sequence[str], environment: Mapping[str, str], outputs: Sequence[int]
) -> None:
    for fd, output in enumerate(outputs, start=1):
        os.dup2(output, fd)
        os.close(output)
    sys.stdout = os.fdopen(1, "w")
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace")
    os.environ.clear()
    os.environ.update(environment)
    if os.environ.pop("QUIET", ""):
        from proxy.requests.windows import Known

        Known.list_models = lambda *_: None  # type: ignore[assignment,method-assign,misc]
    if patch := os.environ.pop("PATCH", ""):
        runpy.run_path(patch)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["proxy", *arguments]
    try:
        runpy.run_module("proxy", run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        _exit(ended.code)


def _exit(code: int) -> NoReturn:
    """End as the interpreter does, but free nothing: that would copy each page of the vocabularies,
    for 0.3 s."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)


def main(requests: socket.socket) -> None:
    import uvicorn
    import uvloop  # noqa: F401 (what the proxy imports as late as it can)

    from proxy.apps import dashboard, parts  # noqa: F401
    from proxy.server import runner  # noqa: F401
    from proxy.tokens import counter
    from tests.serving import be_patient

    hurry(uvicorn.server)
    be_patient()
    counter()
    # from a terminal it reaches the tests as well, which then end us
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _serve(requests)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
