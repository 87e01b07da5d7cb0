"""The systems under measurement, started side by side: each in a process of its own, in front of
the same upstream.

A system is a name and a function that says how to start it at a `Site`. Other people's systems are
in `competitors`.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.ports import free_port

ROOT = Path(__file__).parents[1]

Offload = dict[str, object]
"""The section `offload` of a policy."""

NGINX = """
daemon off; worker_processes 1; pid {folder}/pid; error_log {folder}/error.log;
events {{ worker_connections 1024; }}
http {{
  access_log off; client_body_temp_path {folder}; proxy_temp_path {folder}; keepalive_requests 1000000;
  fastcgi_temp_path {folder}; uwsgi_temp_path {folder}; scgi_temp_path {folder};
  client_max_body_size 64m; client_body_buffer_size 2m;
  upstream up {{ server 127.0.0.1:{upstream}; keepalive 128; keepalive_requests 1000000; }}
  server {{
    listen 127.0.0.1:{port};
    location / {{ proxy_pass http://up; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off; }}
  }}
}}
"""

MIB = 1 << 20
STARTING = 60.0
"""Seconds until a system must listen."""
SETTLING = 5.0
"""Seconds to wait for a system's background work to end. It is measured after that in any case."""
QUIET = 0.002
"""Seconds of processor time within 50 ms below which a system counts as idle."""


@dataclass(frozen=True)
class Site:
    """The ports and the folder that a system gets. It keeps its configuration and all that it
    writes in `folder`."""

    upstream: int
    port: int
    folder: Path

    @property
    def url(self) -> str:
        """The upstream's address, without a path."""
        return f"http://127.0.0.1:{self.upstream}"

    def write(self, name: str, content: object) -> Path:
        """Write a configuration file. JSON is valid YAML too."""
        path = self.folder / name
        path.write_text(json.dumps(content))
        return path


@dataclass(frozen=True)
class Launch:
    """How to start a system, and the extra headers that its clients must send."""

    command: list[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)


Launcher = Callable[[Site], Launch]


@dataclass(frozen=True)
class System:
    """A running system."""

    name: str
    port: int
    process: subprocess.Popen[bytes]
    headers: Mapping[str, str]

    @property
    def ended(self) -> str:
        """How the process ended; empty while it runs."""
        status = self.process.poll()
        return "" if status is None else f"ended with status {status}"

    def rss(self) -> float:
        """Resident memory of its processes, in MB."""
        told = [_read(Path(f"/proc/{pid}/statm")).split() for pid in tree(self.process.pid)]
        return sum(int(one[1]) for one in told if one) * os.sysconf("SC_PAGE_SIZE") / 1e6

    def cpu(self) -> float:
        """Seconds of processor time that its processes have used, ended threads included, to the
        nanosecond."""
        return sum(map(clock, tree(self.process.pid)))

    async def settle(self) -> None:
        """Wait until its background work has ended."""
        deadline = time.monotonic() + SETTLING
        quiet = 0
        while quiet < 2 and time.monotonic() < deadline:
            before = self.cpu()
            await asyncio.sleep(0.05)
            quiet = quiet + 1 if self.cpu() - before < QUIET else 0


def start(running: ExitStack, folder: Path, launchers: Mapping[str, Launcher]) -> list[System]:
    """Start `launchers` in front of `bench.wire`. All listen, except those that failed to
    start."""
    upstream = free_port()
    replying = ours([sys.executable, "-m", "bench.wire", str(upstream)])
    site = Site(0, upstream, _made(folder / "upstream"))
    begun = [_begun(running, "upstream", replying, site)]
    for number, (name, launcher) in enumerate(launchers.items()):
        site = Site(upstream, free_port(), _made(folder / str(number)))
        begun.append(_begun(running, name, launcher(site), site))
    for system in begun:
        _await_port(system)
    return begun[1:]


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


def _begun(running: ExitStack, name: str, launch: Launch, site: Site) -> System:
    process = running.enter_context(_running(launch, site.folder))
    return System(name, site.port, process, launch.headers)


@contextmanager
def _running(launch: Launch, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run it in its folder and in a session of its own, offline, with none of this machine's
    environment but PATH."""
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "HF_HUB_OFFLINE": "1",
        **launch.environment,
    }
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            launch.command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(15)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _await_port(system: System) -> None:
    deadline = time.monotonic() + STARTING
    while time.monotonic() < deadline and not system.ended:
        try:
            socket.create_connection(("127.0.0.1", system.port)).close()
            return
        except OSError:
            time.sleep(0.05)


def status(pid: int) -> dict[str, int]:
    """The numbers in /proc/PID/status, such as `VmRSS`, `VmHWM` (kilobytes) and `Threads`."""
    told = Path(f"/proc/{pid}/status").read_text()
    return {name: int(value) for name, value in re.findall(r"^(\w+):\s+(\d+)", told, re.MULTILINE)}


def tree(pid: int) -> Iterator[int]:
    """A process and all its descendants."""
    yield pid
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in _read(children).split():
            yield from tree(int(child))


def clock(pid: int) -> float:
    """A process' processor time in seconds; 0 if it has ended meanwhile."""
    try:
        # Linux's clock of a process: clock_getcpuclockid(3)
        return time.clock_gettime(~pid << 3 | 2)
    except OSError:
        return 0.0


def _read(path: Path) -> str:
    """The file's text; empty if the process has ended meanwhile."""
    try:
        return path.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


# -- the proxy and its baselines -------------------------------------------------------------------


def ours(command: list[str], **environment: str) -> Launch:
    return Launch(command, {"PYTHONPATH": str(ROOT), **environment})


def nginx(program: str) -> Launcher:
    def launch(site: Site) -> Launch:
        configuration = site.folder / "nginx.conf"
        configuration.write_text(
            NGINX.format(folder=site.folder, upstream=site.upstream, port=site.port)
        )
        return Launch([program, "-p", str(site.folder), "-c", str(configuration)])

    return launch


def bare(site: Site) -> Launch:
    """Starlette over the proxy's own transport; see `bare.py`."""
    flags = [f"--port={site.port}", "--no-access-log", "--log-level=error", "--no-proxy-headers"]
    return ours([sys.executable, "-m", "uvicorn", "bench.bare:app", *flags], BARE_UPSTREAM=site.url)


def proxy(offload: Offload, *, dashboard: bool = False) -> Launcher:
    """The proxy with its default settings and this policy."""

    def launch(site: Site) -> Launch:
        policies = _made(site.folder / "policies")
        policy = {"upstream": {"base_url": f"{site.url}/v1"}, "offload": offload}
        (policies / "default.yaml").write_text(json.dumps(policy))
        flags = [
            f"--port={site.port}",
            f"--policies={policies}",
            f"--store={site.folder / 'store'}",
            "--dashboard=off",
        ]
        if dashboard:
            flags.append(f"--dashboard={site.folder / 'rows.db'}")
        command = [sys.executable, "-m", "proxy", "serve", *flags]
        return ours(command, OFFLOAD_ADMIN_TOKEN="the token of the benchmark")

    return launch
