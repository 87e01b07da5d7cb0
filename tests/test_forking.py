"""Proxies that tests fork are processes like others: arguments, environment, output and how they end."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from tests import serving
from tests.forking import Fork
from tests.serving import spawned


def test_a_fork_has_arguments_environment_output_and_exit_code(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log:
        mistaken = serving.started(["serve", "--port=0"], {"OFFLOAD_STORE": "nowhere://x", "PATH": "/bin"}, log)
        assert mistaken.wait(30) == mistaken.poll() == 2
        assert serving.started(["--help"], {}, log).wait(30) == 0
    said = (tmp_path / "log").read_text()
    assert "nowhere" in said and "usage: " in said and "Traceback" not in said


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 0), (signal.SIGKILL, -signal.SIGKILL)])
def test_a_fork_serves_and_takes_signals(number: signal.Signals, code: int) -> None:
    with spawned() as proxy:
        assert isinstance(proxy.process, Fork) and proxy.process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            proxy.process.wait(0)
        proxy.process.send_signal(number)
        assert proxy.process.wait(30) == code
