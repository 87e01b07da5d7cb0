"""Systems under comparison: each can be told its port and upstream, and is pinned."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.competitors import COMPETITORS, PINS
from bench.systems import POLICIES, Launcher, Site, bare, nginx, proxy


def launchers() -> Iterator[tuple[str, Launcher]]:
    yield "nginx", nginx("nginx")
    yield "bare", bare
    yield from ((name, proxy(offload)) for name, offload in POLICIES.items())
    yield from ((competitor.name, competitor.at) for competitor in COMPETITORS)


@pytest.mark.parametrize(("name", "launcher"), list(launchers()))
def test_every_launcher_passes_its_port_and_the_upstream(name: str, launcher: Launcher, tmp_path: Path) -> None:
    launch = launcher(Site(40001, 40002, tmp_path))
    files = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    told = b" ".join([*(part.encode() for part in (*launch.command, *launch.environment.values())), *files])
    told += b" ".join(value.encode() for value in launch.headers.values())
    assert b"127.0.0.1:40001" in told and b"40002" in told
    assert all(isinstance(part, str) for part in launch.command)


def test_every_competitor_is_pinned_at_the_version_in_its_name() -> None:
    pins = "\n".join(path.read_text() for path in PINS.glob("*.in")) + (PINS / "portkey/package.json").read_text()
    for competitor in COMPETITORS:
        version = competitor.name.rpartition(" ")[2]
        assert re.search(rf'[=\s":]{re.escape(version)}\b', pins), competitor.name


def test_no_compromised_release_of_litellm_and_no_pin_without_a_hash() -> None:
    for path in PINS.glob("*.txt"):
        pins = path.read_text()
        for version in re.findall(r"(?m)^litellm==(\d+)\.(\d+)\.", pins):
            assert tuple(map(int, version)) < (1, 107), path.name
        named = re.findall(r"(?m)^[a-z0-9][^=\s]*==[^\\\n]*(\\?)$", pins)
        assert named and all(named), f"{path.name}: every pin is followed by its hashes"


def test_the_lock_of_node_names_no_registry() -> None:
    lock = json.loads((PINS / "portkey/package-lock.json").read_text())
    packages = {name: package for name, package in lock["packages"].items() if name}
    assert packages["node_modules/@portkey-ai/gateway"]["version"] == "1.15.2"
    assert all("integrity" in package and "resolved" not in package for package in packages.values())
