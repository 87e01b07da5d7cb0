"""`offload-proxy run` on a terminal, whose size and signals are the agent's."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.apps.run.terminal import missing, terminal
from tests.apps.run.test_run import AGENT, environment

pytestmark = pytest.mark.skipif(missing(), reason="tmux is not installed")
RUN = f"{sys.executable} -m proxy run -- {sys.executable} {AGENT}"


def test_size_and_signals_of_the_terminal_are_the_agents(tmp_path: Path) -> None:
    with terminal(tmp_path, environment(tmp_path)) as shown:
        shown.type("clear; stty size")
        shown.until("24 80")
        shown.type(f"clear; {RUN} terminal wait")
        screen = shown.until("waiting")
        first = next(line for line in screen.splitlines() if line.startswith("offload-proxy: "))
        assert (
            first.startswith("offload-proxy: dashboard http://127.0.0.1:")
            and "/_offload/login?once=" in first
        )
        assert "\n80 24\n" in screen
        shown.press("C-c")
        shown.until("no request came")
        shown.type("echo status $?")
        screen = shown.until("status 42")
        assert screen.count("offload-proxy: ") == 2
        assert "Traceback" not in screen


def test_a_stopped_agent_is_one_job_and_goes_on(tmp_path: Path) -> None:
    with terminal(tmp_path, environment(tmp_path)) as shown:
        shown.type(f"clear; {RUN} wait")
        shown.until("waiting")
        shown.press("C-z")
        shown.until("Stopped")
        shown.type("clear; fg")
        shown.until("agent.py wait")
        shown.until_foreground()
        shown.press("C-c")
        shown.until("no request came")
        shown.type("echo status $?")
        shown.until("status 42")


def test_an_agent_that_does_not_stop_stops_nobody(tmp_path: Path) -> None:
    with terminal(tmp_path, environment(tmp_path)) as shown:
        script = 'trap "" TSTP; echo waiting; read said; echo "heard $said"'
        shown.type(f"clear; {sys.executable} -m proxy run -- sh -c '{script}'")
        shown.until("\nwaiting")
        shown.press("C-z")
        shown.type("it")
        shown.until("heard it")
        shown.until("no request came")


def test_an_agent_that_stops_itself_stops_us(tmp_path: Path) -> None:
    with terminal(tmp_path, environment(tmp_path)) as shown:
        shown.type(
            f"clear; {sys.executable} -m proxy run -- sh -c 'kill -STOP $$; echo went on; exit 6'"
        )
        shown.until("Stopped")
        shown.type("clear; fg")
        shown.until("went on")
        shown.until("no request came")
        shown.type("echo status $?")
        shown.until("status 6")
