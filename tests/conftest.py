"""Fixtures for every test: `up` is a strict upstream, `serve` and `spawn` start the real proxy."""

from __future__ import annotations

import asyncio
import gc
import inspect
import logging
import os
import re
import signal
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import certifi
import httpx
import hypothesis
import pytest
import uvicorn

from tests import serving
from tests.clock import PATIENCE, Clock, hurry
from tests.fake_upstream import StrictUpstream
from tests.forking import Nursery
from tests.serving import Proxy, be_patient, served, spawned

EXAMPLES = 30
"""How many examples of a property a run without sweeps tries, if the test says nothing else. Others
try 100."""

SWEPT = re.compile(r"mark\.sweep|sampling")
"""What stands in a file that has sweeps."""


def pytest_configure(config: pytest.Config) -> None:
    # A deadline for one example would measure the machine, and machines are shared. CI also tries
    # the same examples for the same code, so that what it says is about the change; elsewhere every
    # run tries new ones.
    hypothesis.settings.register_profile(
        "offload",
        deadline=None,
        print_blob=True,
        derandomize="CI" in os.environ,
        max_examples=EXAMPLES if "not sweep" in config.getoption("markexpr") else 100,
    )
    hypothesis.settings.load_profile("offload")
    # a shell leaves Ctrl-C ignored in what it starts in the background, and processes inherit that
    signal.signal(signal.SIGINT, signal.default_int_handler)
    hurry(uvicorn.server)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import a file without sweeps for a run of the sweeps alone: that would take longer
    than most of them."""
    if collection_path.suffix == ".py" and config.getoption("markexpr").startswith("sweep"):
        return not SWEPT.search(collection_path.read_text(encoding="utf-8")) or None
    return None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while tests are imported, which takes 2 s of CPU time; afterwards, none of
    theirs (1 s)."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session", autouse=True)
def forked() -> Iterator[None]:
    """Let what tests start with `serving.started` begin as forks of one process."""
    with ExitStack() as held, pytest.MonkeyPatch.context() as patch:
        nursery = Nursery()
        begun = cache(lambda: held.enter_context(nursery))
        patch.setattr(serving, "started", lambda *arguments: begun().start(*arguments))
        yield


@pytest.fixture(scope="session", autouse=True)
def patient() -> None:
    """Let the tests' own requests wait, and proxies for their stores: five seconds, or one, are
    over soon on a busy machine."""
    be_patient()
    default = inspect.signature(httpx.get).parameters["timeout"].default
    default.connect = default.read = default.write = default.pool = PATIENCE


@pytest.fixture(scope="session", autouse=True)
def few_certificates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Give the proxies of this process one trusted certificate: reading all takes each of them 18
    ms of CPU time."""
    first, end, _ = (
        Path(certifi.where()).read_text(encoding="ascii").partition("-----END CERTIFICATE-----")
    )
    file = tmp_path_factory.mktemp("certificates") / "first.pem"
    file.write_text(first + end, encoding="ascii")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(certifi, "where", lambda: str(file))
        yield


@pytest.fixture(scope="session", autouse=True)
def own_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let nothing that tests start write into the user's state directory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture
def up() -> Iterator[StrictUpstream]:
    """A strict upstream. A request that it refuses fails the test, unless the test sets
    `expect_refusals`."""
    with StrictUpstream() as upstream:
        yield upstream


@pytest.fixture
def serve(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[..., Proxy]]:
    """`serve(policies, …)` runs the proxy in this process until the test ends. It takes
    `serving.served`'s arguments.

    A bug that the proxy logs fails the test, even if the client got the right reply.
    """
    with ExitStack() as held:
        yield lambda *args, **kwargs: held.enter_context(served(*args, **kwargs))
    ours = (record for record in caplog.get_records("call") if record.name.startswith("proxy"))
    assert [record.getMessage() for record in ours if record.levelno >= logging.ERROR] == []


@pytest.fixture
def spawn() -> Iterator[Callable[..., Proxy]]:
    """`spawn(policies, …)` runs the proxy as a child process for the test. Takes
    `serving.spawned`'s arguments."""
    running: list[Proxy] = []
    with ExitStack() as held:

        def start(*args: Any, **kwargs: Any) -> Proxy:
            running.append(held.enter_context(spawned(*args, **kwargs)))
            return running[-1]

        yield start
        assert not any("Traceback" in proxy.log() for proxy in running), running[0].log()


@pytest.fixture
async def clock() -> Clock:
    """The clock of the test's event loop, which stands still until it is put forward."""
    made = Clock()
    made.govern(asyncio.get_running_loop())
    return made


@pytest.fixture(scope="session", autouse=True)
def no_outgoing_proxy() -> Iterator[None]:
    """Connect to loopback directly, whatever proxy the machine's environment names."""
    with pytest.MonkeyPatch.context() as patch:
        for name in (
            "HTTP_PROXY",
            "HTTPS_PROXY",
            "ALL_PROXY",
            "http_proxy",
            "https_proxy",
            "all_proxy",
        ):
            patch.delenv(name, raising=False)
        yield
