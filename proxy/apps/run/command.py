"""Runs a command as if nothing stood before it: terminal, standard input, signals and exit status
are its."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    process: subprocess.Popen[bytes] | None = None

    def ours(number: int, frame: FrameType | None) -> None:
        pass  # a handler, and not SIG_IGN, which the command would inherit

    def pass_on(number: int, frame: FrameType | None) -> None:
        if process is not None:
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(process.pid, number)

    with _handling(_FROM_TERMINAL, ours), _handling(_PASSED_ON, pass_on):
        process = subprocess.Popen(command, env=environment)
        return _waited(process)


def _waited(process: subprocess.Popen[bytes]) -> int:
    """Wait for the end of the command. While it is stopped, so are we, as a shell expects of one
    job.

    Nothing else may wait for it, as `send_signal` does: then its status would be lost.
    """
    while True:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            process.returncode = os.waitstatus_to_exitcode(status)
            return process.returncode
        os.kill(os.getpid(), signal.SIGSTOP)
        os.kill(process.pid, signal.SIGCONT)


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
def _handling(
    names: Sequence[str], handler: Callable[[int, FrameType | None], None]
) -> Iterator[None]:
    """Handle these signals within the block, but for those that are ignored, as after `nohup`."""
    before = dict[signal.Signals, object]()
    for name in names:
        number = signal.Signals[name]
        if signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)  # type: ignore[arg-type]
