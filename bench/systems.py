"""The systems under measurement, started side by side: each in a process of its own, in front of
the same upstream.

A system is a name and a function that says how to start it at a `Site`. Other people's systems are
in `competitors`.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]

Offload = dict[str, object]
"""The section `offload` of a policy."""

POLICIES: dict[str, Offload] = {
    "proxy, off": {"mode": "off"},
    # The threshold is above every body's size: the proxy reads and plans, and moves nothing.
    "proxy, planning": {"mode": "auto", "max_total_tokens": 1_000_000_000},
    # Results have 1 KB. Without this ratio their previews would already call for a summary, which
    # is not measured here.
    "proxy, moving": {
        "mode": "auto",
        "max_tool_message_tokens": 200,
        "compact_ratio_threshold": 1.0,
    },
}

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

STARTING = 60.0
"""Seconds until a system must listen."""
SETTLING = 10.0
"""Seconds to wait for a system's background work to end. It is measured after that in any case."""
QUIET = 0.1
"""The share of one processor below which a process counts as idle."""


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
        pages = sum(_numbers(pid, "statm")[1] for pid in _tree(self.process.pid))
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6

    def cpu(self) -> float:
        """Seconds of processor time that its processes have used, ended ones included."""
        ticks = sum(sum(_numbers(pid, "stat")[10:14]) for pid in _tree(self.process.pid))
        return ticks / os.sysconf("SC_CLK_TCK")

    def busy(self) -> float:
        """Seconds of processor time that its first process has used, ended threads included, to the
        nanosecond."""
        # Linux's clock of a process: clock_getcpuclockid(3)
        return time.clock_gettime(~self.process.pid << 3 | 2)

    def settle(self) -> None:
        """Wait until its background work has ended."""
        deadline = time.monotonic() + SETTLING
        while time.monotonic() < deadline:
            before = self.cpu()
            time.sleep(0.1)
            if self.cpu() - before <= QUIET * 0.1:
                return


def start(running: ExitStack, folder: Path, launchers: Mapping[str, Launcher]) -> list[System]:
    """Start the upstream itself, called `direct`, then `launchers`. All listen, except those that
    failed to start."""
    upstream = free_port()
    replying = ours([sys.executable, "-m", "bench.wire", str(upstream)])
    begun = [_begun(running, "direct", replying, Site(0, upstream, _made(folder / "direct")))]
    for number, (name, launcher) in enumerate(launchers.items()):
        site = Site(upstream, free_port(), _made(folder / str(number)))
        begun.append(_begun(running, name, launcher(site), site))
    for system in begun:
        _await_port(system)
    return begun


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


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def _await_port(system: System) -> None:
    deadline = time.monotonic() + STARTING
    while time.monotonic() < deadline and not system.ended:
        try:
            socket.create_connection(("127.0.0.1", system.port)).close()
            return
        except OSError:
            time.sleep(0.05)


def _tree(pid: int) -> Iterator[int]:
    """A process and all its descendants."""
    yield pid
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in _read(children).split():
            yield from _tree(int(child))


def _numbers(pid: int, name: str) -> list[int]:
    """The numbers in a file of /proc/PID, after name and state (proc(5)); zeros for a process that
    has ended."""
    fields = _read(Path(f"/proc/{pid}/{name}")).rpartition(")")[2].split()
    return [int(field) for field in fields if field.lstrip("-").isdigit()] or [0] * 14


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


def proxy(offload: Offload) -> Launcher:
    """The proxy with its default settings and this policy."""

    def launch(site: Site) -> Launch:
        policies = _made(site.folder / "policies")
        policy = {"upstream": {"base_url": f"{site.url}/v1"}, "offload": offload}
        (policies / "default.yaml").write_text(json.dumps(policy))
        flags = [
            f"--port={site.port}",
            f"--policies={policies}",
            f"--store={site.folder / 'store'}",
        ]
        return ours([sys.executable, "-m", "proxy", "serve", *flags])

    return launch
