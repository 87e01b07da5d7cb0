"""The SDKs' own tests, unmodified, against a mock server: directly and through the proxy they end alike.

The tests come from the SDKs' source packages. Steady, the mock server that the SDKs use themselves, follows a document
of the SDK's own types (document.py).
"""

from __future__ import annotations

import json
import subprocess
import tarfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import httpx
import pytest

from tests.clients.running import free_port
from tests.clock import wait_until
from tests.serving import PLAIN, spawned

HERE = Path(__file__).parent
STEADY = HERE / "steady/node_modules/.bin/steady"
STYLES = [f"--validator-{kind}-{style}-format=brackets" for kind in ("query", "form") for style in ("array", "object")]

pytestmark = pytest.mark.clients


@dataclass(frozen=True)
class Suite:
    """One SDK: `prefix` is what its base URL ends in, `least` how many of its tests pass, `chats` which make requests
    that get our tools."""

    sdk: str
    prefix: str
    least: int
    chats: tuple[str, ...]

    @property
    def environment(self) -> Path:
        return HERE.parents[1] / ".clients" / f"suite_{self.sdk}"


SUITES = (
    Suite("openai", "/v1", 5_000, ("chat", "test_responses.py")),
    Suite("anthropic", "", 5_000, ("test_messages.py", "beta/test_messages.py")),
)


@pytest.fixture(params=SUITES, ids=lambda suite: suite.sdk)
def suite(request: pytest.FixtureRequest) -> Suite:
    found: Suite = request.param
    if not (found.environment / ".installed").exists():
        pytest.skip(f"the tests of {found.sdk} are not installed: make test-suites")
    if not STEADY.exists():
        pytest.skip("the mock server is not installed: make test-suites (needs npm)")
    return found


@pytest.fixture
def tests(suite: Suite, tmp_path: Path) -> Path:
    """The SDK's tests, unpacked."""
    [packed] = (suite.environment / "sdist").glob("*.tar.gz")
    with tarfile.open(packed) as archive:
        archive.extractall(tmp_path / "sdk", filter="data")
    return next((tmp_path / "sdk").iterdir())


@pytest.fixture
def mock(suite: Suite, tmp_path: Path) -> Iterator[str]:
    """The address of the mock server."""
    document = tmp_path / "openapi.json"
    made = [suite.environment / "bin/python", HERE / "document.py", suite.sdk, suite.prefix]
    document.write_bytes(subprocess.run(made, check=True, capture_output=True).stdout)
    port = free_port()
    command = [STEADY, "--quiet", "--host=127.0.0.1", f"--port={port}", *STYLES, document]
    with serving(command, f"http://127.0.0.1:{port}/_x-steady/health"):
        yield f"http://127.0.0.1:{port}"


@contextmanager
def serving(command: list[str | Path], health: str) -> Iterator[None]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: answers(health))
        yield
    finally:
        process.kill()
        process.wait()


def answers(url: str) -> bool:
    try:
        return httpx.get(url, verify=PLAIN, trust_env=False).is_success
    except httpx.TransportError:
        return False


def outcomes(suite: Suite, tests: Path, url: str, paths: tuple[str, ...] = ("",)) -> Mapping[str, str]:
    """Run the SDK's tests against a server. Returns "passed", "failed" or "skipped" for each.

    Left out are the runs with a loose client: it sends the same and forgives more.
    """
    report = tests.parent / "report.xml"
    python = suite.environment / "bin/python"
    where = [f"tests/api_resources/{path}" for path in paths]
    flags = ["-qq", "-n2", "-oaddopts=", "-pno:cacheprovider", "-knot loose", f"--junitxml={report}"]
    command = [python, "-m", "pytest", *flags, *where]
    home = {"PATH": f"{python.parent}:/usr/bin:/bin", "HOME": str(tests.parent), "TEST_API_BASE_URL": url}
    done = subprocess.run(command, cwd=tests, env=home, capture_output=True, text=True, timeout=500)
    assert done.returncode in (0, 1), done.stdout + done.stderr  # 1: some failed
    cases = ElementTree.parse(report).iter("testcase")
    return {f"{case.get('classname')}.{case.get('name')}": outcome(case) for case in cases}


def outcome(case: ElementTree.Element) -> str:
    ended = {child.tag for child in case}
    return "failed" if ended & {"failure", "error"} else "skipped" if "skipped" in ended else "passed"


def test_the_sdks_tests_end_as_without_the_proxy(suite: Suite, tests: Path, mock: str) -> None:
    directly = outcomes(suite, tests, f"{mock}{suite.prefix}")
    assert Counter(directly.values())["passed"] >= suite.least
    with spawned({"default": {"upstream": {"base_url": f"{mock}/v1"}, "relay": ["/*"]}}) as proxy:
        through = outcomes(suite, tests, f"{proxy.root}{suite.prefix}")
    assert {name: ended for name, ended in through.items() if ended != directly[name]} == {}
    assert through.keys() == directly.keys()


def test_requests_with_our_tools_end_alike(suite: Suite, tests: Path, mock: str) -> None:
    policy = {
        "upstream": {"base_url": f"{mock}/v1"},
        "tools": {"inject": "always"},
    }
    directly = outcomes(suite, tests, f"{mock}{suite.prefix}", suite.chats)
    with spawned({"default": policy}) as proxy:
        through = outcomes(suite, tests, f"{proxy.root}{suite.prefix}", suite.chats)
        lines = [json.loads(line) for line in proxy.log().splitlines() if '"tokens_before"' in line]
    assert through == directly
    assert any(line["tokens_after"] > line["tokens_before"] for line in lines), "our tools were offered"
