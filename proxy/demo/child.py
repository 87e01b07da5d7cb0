"""The real proxy as a child process, started as a user would, and stopped at the end in any case."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from proxy.errors import ProxyError
from proxy.settings import read

START = 20.0
"""Seconds within which the proxy must listen."""
STOP = 10.0
"""Seconds within which the proxy must exit before it is killed."""

_listening = re.compile(r"listening on (http://\S+)")


@contextmanager
def serving(upstream: str, folder: Path, *, dashboard: bool = False) -> Iterator[str]:
    """Run the proxy for the block; yields its address. Policies, store and log are in `folder`. Raises ProxyError."""
    policies, log = folder / "policies", folder / "proxy.log"
    policies.mkdir()
    # All other keys keep their defaults, so the demo shows the results that a user gets in front of OpenAI.
    policy = {"upstream": {"base_url": upstream}, "offload": {"cached_read": 0.1, "cache_write": 1.0}}
    (policies / "default.yaml").write_text(json.dumps(policy), encoding="utf-8")
    command = [sys.executable, "-m", "proxy", "serve", "--host=127.0.0.1", "--port=0", "--log-format=text"]
    command += [f"--policies={policies}", f"--store={folder / 'store'}"]
    command += [f"--dashboard={folder / 'dashboard.db'}"] if dashboard else []
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=_direct(upstream))
    try:
        yield _address(process, log)
    finally:
        _end(process)


def _direct(upstream: str) -> Mapping[str, str]:
    """The environment without outgoing proxies: everything here is on loopback."""
    environment = read({"upstream": upstream, "port": "0"}).environment
    return {name: value for name, value in environment.items() if not name.upper().endswith("_PROXY")}


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + START
    while time.monotonic() < deadline and process.poll() is None:
        if found := _listening.search(log.read_text(encoding="utf-8", errors="replace")):
            return found[1]
        time.sleep(0.02)
    raise ProxyError(f"the proxy did not come up:\n{log.read_text(encoding='utf-8', errors='replace')[-2000:]}")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
