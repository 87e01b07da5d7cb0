"""The tests of HTTP caches (the package `http-cache-tests`), unmodified: what a cache or a client
is told by a server arrives through the proxy as it does without.

The proxy caches nothing, so most of these tests end as they do without a cache. What matters is
that they end alike.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients.running import answers
from tests.clock import wait_until
from tests.ports import free_port
from tests.serving import spawned

TESTS = Path(__file__).parent / "cache/node_modules/http-cache-tests"
LEAST = 320
"""The tests that are compared, of 350."""
BROKEN = "FetchError"
"""How a test ends in which the server breaks off or sends no HTTP. The proxy answers 502
instead."""

pytestmark = pytest.mark.clients


def environment(**settings: str) -> dict[str, str]:
    return {
        **os.environ,
        "npm_package_config_id": "",
        **{f"npm_config_{key}": one for key, one in settings.items()},
    }


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    if not TESTS.exists():
        pytest.skip("http-cache-tests is not installed: make test-suites (needs npm)")
    port = free_port()
    told = environment(protocol="http", port=str(port), pidfile=str(tmp_path / "pid"))
    process = subprocess.Popen(
        ["node", "server/server.mjs"], cwd=TESTS, env=told, stdout=subprocess.DEVNULL
    )
    try:
        wait_until(lambda: answers(f"http://127.0.0.1:{port}/"))
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def outcomes(url: str) -> dict[str, Any]:
    """Test → true, or what it found."""
    ran = subprocess.run(
        ["node", "--no-warnings", "cli.mjs"],
        cwd=TESTS,
        env=environment(base=url),
        capture_output=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


def compared(directly: dict[str, Any], through: dict[str, Any]) -> dict[str, Any]:
    """What ended differently, of the tests in which the server keeps to HTTP."""
    assert through.keys() == directly.keys()
    kept = {name: ended for name, ended in directly.items() if ended is True or ended[0] != BROKEN}
    assert len(kept) >= LEAST
    return {name: (ended, through[name]) for name, ended in kept.items() if through[name] != ended}


def test_a_servers_words_to_caches_arrive_as_without_the_proxy(server: str) -> None:
    with spawned({"default": {"upstream": {"base_url": server}, "relay": ["/*"]}}) as proxy:
        differing = compared(outcomes(server), outcomes(proxy.root))
        if differing:  # many of these tests depend on the second in which they run
            again = compared(outcomes(server), outcomes(proxy.root))
            differing = {name: ended for name, ended in again.items() if name in differing}
    assert differing == {}
