"""Runs a command as if nothing stood before it: terminal, standard input, signals and exit status
are its."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

NOT_FOUND = 127
NOT_EXECUTABLE = 126
"""Exit statuses of shells (POSIX, 2.8.2)."""

_FROM_TERMINAL = ("SIGINT", "SIGQUIT", "SIGTSTP")
"""The terminal sends these to us and to the command, which decides."""
_PASSED_ON = ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
"""These are sent to us alone."""
_DEADLY = (signal.SIGINT, signal.SIGTERM)
"""A shell goes by these: it ends its script if its command was interrupted."""


def run(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Return the status with which the command ended: its exit status, or -N if signal N ended it.
    Raises OSError if it cannot be started."""
    # whoever started us may ignore or block it, and then we would wait for ever
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
    with _caught(*_FROM_TERMINAL, *_PASSED_ON, "SIGCHLD") as caught:
        return _waited(subprocess.Popen(command, env=environment), caught)


def _waited(process: subprocess.Popen[bytes], caught: int) -> int:
    """Wait for the end of the command, and pass signals on to it. While it is stopped, so are we,
    as a shell expects of one job.

    Nothing else may wait for it, as `send_signal` does: then its status would be lost.
    """
    while True:
        changed, status = os.waitpid(process.pid, os.WUNTRACED | os.WNOHANG)
        if not changed:
            number = signal.Signals(os.read(caught, 1)[0])
            if number.name in _PASSED_ON:
                _send(process, number)
        elif os.WIFSTOPPED(status):
            os.kill(os.getpid(), signal.SIGSTOP)
            _send(process, signal.SIGCONT)
        else:
            process.returncode = os.waitstatus_to_exitcode(status)
            return process.returncode


def _send(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with suppress(PermissionError):  # it has become another user, as sudo does
        os.kill(process.pid, number)


def status_of(code: int) -> int:
    """Return the exit status for this end of a command. If a signal of the user ended it, it ends
    us, too."""
    if code >= 0:
        return code
    if -code in _DEADLY:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return 128 - code


@contextmanager
def _caught(*names: str) -> Iterator[int]:
    """Catch these signals within the block, but for those that are ignored, as after `nohup`. Yields
    a pipe with a byte for each, its number.

    A handler in Python would run too late for a signal that comes just before a wait.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    before = dict[signal.Signals, object]()
    for name in names:
        number = signal.Signals[name]
        if signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, _nothing)
    try:
        yield reader
    finally:
        for number, former in before.items():
            signal.signal(number, former)  # type: ignore[arg-type]
        signal.set_wakeup_fd(wakeup)
        os.close(writer)
        os.close(reader)


def _nothing(number: int, frame: FrameType | None) -> None:
    """Handle a signal. With SIG_IGN instead, the command would ignore it as well."""
