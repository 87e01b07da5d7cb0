"""What reaches the command of a run."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from proxy.apps.run import command


def test_a_signal_that_comes_behind_the_commands_end_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wait = os.waitpid

    def interrupted(pid: int, options: int) -> tuple[int, int]:
        ended = wait(pid, options)
        os.kill(os.getpid(), signal.SIGUSR1)
        return ended

    monkeypatch.setattr(os, "waitpid", interrupted)
    assert command.run([sys.executable, "-c", "raise SystemExit(7)"], os.environ) == 7
