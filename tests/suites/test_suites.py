"""The SDKs' own tests, unmodified, against a mock server: those that pass directly pass through the
proxy.

The tests come from the SDKs' source packages. Steady, the mock server that the SDKs use themselves,
follows a document of the SDK's own types (document.py).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.clients.running import answers
from tests.clock import wait_until
from tests.ports import free_port
from tests.serving import spawned

HERE = Path(__file__).parent
STEADY = HERE / "steady/node_modules/.bin/steady"
STYLES = [
    f"--validator-{kind}-{style}-format=brackets"
    for kind in ("query", "form")
    for style in ("array", "object")
]

pytestmark = pytest.mark.clients


@dataclass(frozen=True)
class Suite:
    """One SDK: `prefix` is what its base URL ends in, `chats` the tests whose requests get our
    tools."""

    sdk: str
    prefix: str
    chats: tuple[str, ...]

    @property
    def environment(self) -> Path:
        return HERE.parents[1] / ".clients" / f"suite_{self.sdk}"


SUITES = (
    Suite("openai", "/v1", ("chat", "test_responses.py")),
    Suite("anthropic", "", ("test_messages.py", "beta/test_messages.py")),
)


@pytest.fixture(scope="module", params=SUITES, ids=lambda suite: suite.sdk)
def suite(request: pytest.FixtureRequest) -> Suite:
    found: Suite = request.param
    if not (found.environment / ".installed").exists():
        pytest.skip(f"the tests of {found.sdk} are not installed: make test-suites")
    if not STEADY.exists():
        pytest.skip("the mock server is not installed: make test-suites (needs npm)")
    return found


@pytest.fixture(scope="module")
def tests(suite: Suite, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The SDK's tests, unpacked."""
    [packed] = (suite.environment / "sdist").glob("*.tar.gz")
    unpacked = tmp_path_factory.mktemp("sdk")
    with tarfile.open(packed) as archive:
        archive.extractall(unpacked, filter="data")
    return next(unpacked.iterdir())


@pytest.fixture(scope="module")
def mock(suite: Suite, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the mock server."""
    document = tmp_path_factory.mktemp("mock") / "openapi.json"
    made = [suite.environment / "bin/python", HERE / "document.py", suite.sdk, suite.prefix]
    document.write_bytes(subprocess.run(made, check=True, capture_output=True).stdout)
    port = free_port()
    command = [STEADY, "--quiet", "--host=127.0.0.1", f"--port={port}", *STYLES, document]
    with serving(command, f"http://127.0.0.1:{port}/_x-steady/health"):
        yield f"http://127.0.0.1:{port}"


@contextmanager
def serving(command: list[str | Path], health: str) -> Iterator[None]:
    """Run a server, which is the child of a script."""
    output = subprocess.DEVNULL
    process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    try:
        wait_until(lambda: answers(health))
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


DISTINCT = "not loose and not raw_response and not path_params and not (Async and strict)"
"""Left out: what sends the same and forgives more, what sends the same and reads it at once, what
sends nothing, and of the asynchronous tests those with httpx, as only those with aiohttp send other
bytes than the synchronous ones."""


def outcomes(suite: Suite, tests: Path, url: str, *flags: str) -> Mapping[str, str]:
    """Run some of the SDK's tests against a server. Returns "passed", "failed" or "skipped" for
    each."""
    report = tests.parent / "report.xml"
    python = suite.environment / "bin/python"
    command = [
        python,
        "-m",
        "pytest",
        "-qq",
        "-n2",
        "-oaddopts=",
        f"-k{DISTINCT}",
        f"--junitxml={report}",
        *flags,
    ]
    home = {
        "PATH": f"{python.parent}:/usr/bin:/bin",
        "HOME": str(tests.parent),
        "TEST_API_BASE_URL": url,
    }
    done = subprocess.run(command, cwd=tests, env=home, capture_output=True, text=True, timeout=800)
    # 1: some failed; 5: there was nothing to run
    assert done.returncode in (0, 1, 5), done.stdout + done.stderr
    cases = ElementTree.parse(report).iter("testcase")
    return {f"{case.get('classname')}.{case.get('name')}": outcome(case) for case in cases}


def outcome(case: ElementTree.Element) -> str:
    ended = {child.tag for child in case}
    return (
        "failed" if ended & {"failure", "error"} else "skipped" if "skipped" in ended else "passed"
    )


def passed(ended: Mapping[str, str]) -> list[str]:
    return [name for name, how in ended.items() if how == "passed"]


def check(
    suite: Suite, tests: Path, mock: str, policy: dict[str, Any], least: int, paths: Sequence[str]
) -> str:
    """Run tests through the proxy, then directly those that failed, which must fail again. Returns
    the proxy's log."""
    where = [f"tests/api_resources/{path}" for path in paths]
    with spawned({"default": {"upstream": {"base_url": f"{mock}/v1"}, **policy}}) as proxy:
        through = outcomes(suite, tests, f"{proxy.root}{suite.prefix}", "--cache-clear", *where)
        log = proxy.log()
    assert len(passed(through)) >= least
    again = ("--last-failed", "--last-failed-no-failures=none")
    assert passed(outcomes(suite, tests, f"{mock}{suite.prefix}", *again, *where)) == []
    return log


def test_the_sdks_tests_pass_through_the_proxy(suite: Suite, tests: Path, mock: str) -> None:
    check(suite, tests, mock, {"relay": ["/*"]}, 1_500, [""])


def test_they_pass_with_our_tools(suite: Suite, tests: Path, mock: str) -> None:
    log = check(suite, tests, mock, {"tools": {"inject": "always"}}, 10, suite.chats)
    lines = [json.loads(line) for line in log.splitlines() if '"tokens_before"' in line]
    assert any(line["tokens_after"] > line["tokens_before"] for line in lines), (
        "our tools were offered"
    )
