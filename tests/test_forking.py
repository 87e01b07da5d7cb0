"""Proxies that tests fork are processes like others: arguments, environment, output and how they end."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from tests import serving
from tests.clock import PATIENCE
from tests.forking import Fork
from tests.serving import spawned


def test_a_fork_has_arguments_environment_output_and_exit_code(tmp_path: Path) -> None:
    with (tmp_path / "out").open("wb") as out, (tmp_path / "errors").open("wb") as errors:
        mistaken = serving.started(["serve", "--port=0"], {"OFFLOAD_STORE": "nowhere://x"}, out, errors)
        assert mistaken.wait(PATIENCE) == mistaken.poll() == 2
        assert serving.started(["--help"], {}, out, errors).wait(PATIENCE) == 0
    assert (tmp_path / "out").read_text().startswith("usage: ")
    assert (tmp_path / "errors").read_text().startswith("offload-proxy: no store is known for nowhere://")


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 0), (signal.SIGKILL, -signal.SIGKILL)])
def test_a_fork_serves_and_takes_signals(number: signal.Signals, code: int) -> None:
    with spawned() as proxy:
        assert isinstance(proxy.process, Fork) and proxy.process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            proxy.process.wait(0)
        proxy.process.send_signal(number)
        assert proxy.process.wait(PATIENCE) == code
