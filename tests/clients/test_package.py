"""The built packages give the same first minute as a checkout: `uvx`, `pipx run` and `pip install`
from a wheel."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.clock import PATIENCE, wait_until
from tests.fake_upstream import StrictUpstream, text
from tests.serving import PLAIN

ROOT = Path(__file__).parents[2]
UV = ROOT / ".clients/uv/bin/uv"

pytestmark = [
    pytest.mark.clients,
    pytest.mark.skipif(not UV.exists(), reason="uv is not installed: make test-clients"),
    pytest.mark.xdist_group("package"),
]


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and with the wheel that is built from it."""
    made = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "hatchling", "build", "-d", str(made)]
    subprocess.run([*build, "-t", "sdist"], cwd=ROOT, check=True, capture_output=True)
    with tarfile.open(next(made.glob("*.tar.gz"))) as packed:
        packed.extractall(made / "source", filter="data")
    [source] = (made / "source").iterdir()
    subprocess.run([*build, "-t", "wheel"], cwd=source, check=True, capture_output=True)
    return made


@pytest.fixture
def uvx(dist: Path, tmp_path: Path) -> list[str]:
    """The command `uvx --from WHEEL offload-proxy`, for an empty folder with nothing of ours in
    reach."""
    [wheel] = dist.glob("*.whl")
    return [
        str(UV),
        "tool",
        "run",
        "--python",
        sys.executable,
        "--from",
        f"{wheel}[demo]",
        "offload-proxy",
    ]


def ran(command: list[str], folder: Path) -> str:
    done = subprocess.run(
        command, cwd=folder, env=environment(folder), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def environment(folder: Path) -> dict[str, str]:
    plain = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("OFFLOAD_", "OPENAI_"))
    }
    return {
        **plain,
        "HOME": str(folder),
        "UV_CACHE_DIR": str(ROOT / ".clients/uv/cache"),
        "UV_NO_PROGRESS": "1",
    }


@contextmanager
def serving(command: list[str], folder: Path) -> Iterator[str]:
    """Run `serve` on a free port. Yields its address."""
    log = folder / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, cwd=folder, env=environment(folder), stdout=out, stderr=out
        )
        try:
            wait_until(lambda: "listening on" in log.read_text() or process.poll() is not None)
            found = re.search(r"listening on (http://\S+:\d+)", log.read_text())
            assert found, log.read_text()
            yield found[1]
        finally:
            process.terminate()
            process.wait(PATIENCE)


def test_uvx_serves_from_an_empty_folder(uvx: list[str], tmp_path: Path) -> None:
    with (
        StrictUpstream() as upstream,
        serving([*uvx, "serve", "--port=0", "--upstream", upstream.url], tmp_path) as url,
    ):
        upstream.respond(lambda request: text("hello"))
        body = {"model": "gpt-4.1", "messages": [{"role": "user", "content": "hi"}]}
        reply = httpx.post(
            f"{url}/v1/chat/completions",
            json=body,
            headers={"authorization": "Bearer k"},
            verify=PLAIN,
        )
        assert reply.json()["choices"][0]["message"]["content"] == "hello", reply.text


def test_uvx_runs_the_demo_of_a_checkout(uvx: list[str], tmp_path: Path) -> None:
    here = ran([sys.executable, "-m", "proxy", "demo"], ROOT)
    there = ran([*uvx, "demo"], tmp_path)
    figures = re.compile(r"[\d,]+ tokens")
    assert figures.findall(there) == figures.findall(here) != []


def test_uvx_checks_the_policy_that_is_built_in(uvx: list[str], tmp_path: Path) -> None:
    said = ran([*uvx, "check"], tmp_path)
    assert said.startswith("built in: 1 policy, all good\n")
    assert "it first acts at request" in said


def test_the_wheel_has_what_the_checkout_has_and_nothing_more(dist: Path) -> None:
    listing = subprocess.run(
        ["git", "ls-files", "proxy"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    [wheel] = dist.glob("*.whl")
    names = subprocess.run(
        [sys.executable, "-m", "zipfile", "-l", wheel], capture_output=True, text=True, check=True
    )
    packed = {line.split()[0] for line in names.stdout.splitlines()[1:]}
    ours = {name for name in packed if not name.startswith("offload_proxy-")}
    assert ours == {*listing.stdout.split(), "proxy/commit"}


def test_the_image_and_the_wheel_install_the_same_dependencies(dist: Path) -> None:
    metadata = next((dist / "source").iterdir()) / "PKG-INFO"
    needed = set(
        re.findall(
            r"^Requires-Dist: ([\w-]+)(?![^\n]*extra ==)", metadata.read_text(), re.MULTILINE
        )
    )
    pinned = set(
        re.findall(
            r"^([\w-]+)==", (ROOT / "docs/deploy/requirements.txt").read_text(), re.MULTILINE
        )
    )
    assert needed <= pinned


def test_a_release_has_packages_and_a_graph_of_what_they_need() -> None:
    subprocess.run(["make", "dist"], cwd=ROOT, check=True, capture_output=True)
    made = ROOT / "dist"
    assert sorted(path.suffix for path in made.iterdir()) == [".gz", ".json", ".whl"]
    bill = json.loads((made / "sbom.cdx.json").read_text())
    needs = {one["ref"]: one.get("dependsOn", []) for one in bill["dependencies"]}
    assert any(ref.startswith("aiohttp") and ones for ref, ones in needs.items()), needs
    [ours] = [ref for ref in needs if ref == bill["metadata"]["component"]["bom-ref"]]
    assert needs[ours]
