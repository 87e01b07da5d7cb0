"""What reaches the command of a run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from proxy.apps.run import command


def test_a_signal_that_comes_behind_the_commands_end_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wait = os.waitpid

    def interrupted(pid: int, options: int) -> tuple[int, int]:
        ended = wait(pid, options)
        if ended != (0, 0):
            os.kill(os.getpid(), signal.SIGUSR1)
        return ended

    monkeypatch.setattr(os, "waitpid", interrupted)
    assert command.run([sys.executable, "-c", "raise SystemExit(7)"], os.environ) == 7


WAITS = """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
print("waits", flush=True)
raise SystemExit(signal.sigwait([signal.SIGTERM]))
"""


def test_a_signal_that_comes_while_the_command_starts_reaches_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def started(words: list[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
        process = popen(words, env=env, stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline() == b"waits\n"
        process.stdout.close()
        os.kill(os.getpid(), signal.SIGTERM)
        return process

    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", started)
    assert command.run([sys.executable, "-c", WAITS], os.environ) == signal.SIGTERM


def test_a_signal_that_comes_just_before_we_wait_reaches_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(pid: int, options: int) -> tuple[int, int]:
        if not waited:
            waited.append(pid)
            os.kill(os.getpid(), signal.SIGTERM)
        return wait(pid, options)

    waited = list[int]()
    wait = os.waitpid
    monkeypatch.setattr(os, "waitpid", interrupted)
    assert command.run(["sleep", "1000"], os.environ) == -signal.SIGTERM


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
@pytest.mark.parametrize("how", [signal.SIG_BLOCK, signal.SIG_UNBLOCK])
def test_an_end_is_heard_of_where_its_signal_was_ignored_or_blocked(
    monkeypatch: pytest.MonkeyPatch, handler: signal.Handlers, how: int
) -> None:
    def ended(pid: int, options: int) -> tuple[int, int]:
        changed = wait(pid, options)
        if changed == (0, 0):
            os.kill(pid, signal.SIGKILL)
        return changed

    wait = os.waitpid
    monkeypatch.setattr(os, "waitpid", ended)
    signal.signal(signal.SIGCHLD, handler)
    signal.pthread_sigmask(how, [signal.SIGCHLD])
    try:
        assert command.run(["sleep", "1000"], os.environ) == -signal.SIGKILL
    finally:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])


def test_a_signal_that_the_command_may_not_be_sent_ends_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def started(words: list[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
        process = popen(words, env=env)
        os.kill(os.getpid(), signal.SIGTERM)
        monkeypatch.setattr(os, "kill", forbidden)
        return process

    def forbidden(pid: int, number: int) -> None:
        kill(pid, signal.SIGKILL)
        raise PermissionError

    kill = os.kill
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", started)
    assert command.run(["sleep", "1000"], os.environ) == -signal.SIGKILL
