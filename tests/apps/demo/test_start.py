"""The demo waits for its proxy as long as that lives, and says why it stops."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from proxy.apps import demo
from proxy.errors import ProxyError


@contextmanager
def started(code: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run this code of Python, which writes to the log."""
    with (
        log.open("wb") as output,
        subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=output, stderr=output
        ) as process,
    ):
        yield process
        process.kill()


def test_a_slow_proxy_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "STILL", 0.0)
    log = tmp_path / "log"
    with started(
        "input(); print('listening on http://127.0.0.1:1', flush=True); open(0).read()", log
    ) as process:

        def woken(seconds: float) -> None:
            if "still waiting" in capsys.readouterr().err and process.stdin:
                process.stdin.write(b"\n")
                process.stdin.flush()

        monkeypatch.setattr(demo.time, "sleep", woken)
        assert demo._address(process, log) == "http://127.0.0.1:1"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (
            "print('no port', flush=True); exit(3)",
            r"ended with code 3 after \d+\.\d s and never listened:\nno port$",
        ),
        ("exit(0)", r"ended with code 0 .*\nit wrote nothing$"),
    ],
)
def test_a_proxy_that_ends_is_not_waited_for(tmp_path: Path, code: str, said: str) -> None:
    log = tmp_path / "log"
    with started(code, log) as process, pytest.raises(ProxyError, match=said):
        demo._address(process, log)
