"""What the proxy adds to a small chat request that it has nothing to do about: `python -m tests.bench.overhead`.

Measured side by side, each in a process of its own and in front of the same upstream: no proxy at all, nginx (where it
is there), a bare Starlette relay over the proxy's transport (`bare.py`), and the proxy with its policy off and with the
default one. The runs take turns, so that what else happens on the machine happens to all; shown are medians.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CONNECTIONS = (1, 64)

NGINX = """
daemon off; worker_processes 1; pid {folder}/pid; error_log {folder}/error.log;
events {{ worker_connections 1024; }}
http {{
  access_log off; client_body_temp_path {folder}; proxy_temp_path {folder}; keepalive_requests 1000000;
  fastcgi_temp_path {folder}; uwsgi_temp_path {folder}; scgi_temp_path {folder};
  upstream up {{ server 127.0.0.1:{upstream}; keepalive 128; keepalive_requests 1000000; }}
  server {{
    listen 127.0.0.1:{port};
    location / {{ proxy_pass http://up; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off; }}
  }}
}}
"""

Figures = dict[str, float]
Offload = dict[str, Any]


def main() -> int:
    options = _options()
    with ExitStack() as running:
        folder = Path(running.enter_context(tempfile.TemporaryDirectory(prefix="offload-bench-")))
        ports = start(running, folder, PROXIES)
        for connections in CONNECTIONS:
            _show(connections, _measured(ports, connections, options.runs, options.seconds))
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.overhead", description=(__doc__ or "").partition(":")[0]
    )
    parser.add_argument("--runs", type=int, default=5, help="runs of each, taking turns [5]")
    parser.add_argument("--seconds", type=float, default=2.0, help="of one run [2]")
    parser.add_argument("--smoke", action="store_true", help="only to see that it works: under 10 s")
    options = parser.parse_args()
    if options.smoke:
        options.runs, options.seconds = 1, 0.2
    return options


PROXIES: dict[str, Offload] = {"proxy, mode off": {"mode": "off"}, "proxy, mode auto": {"mode": "auto"}}


def start(running: ExitStack, folder: Path, proxies: dict[str, Offload]) -> dict[str, int]:
    """Everything that is measured, running: its name → its port. `proxies`: by name, the policy's section `offload`."""
    upstream = _free_port()
    running.enter_context(_process("tests.bench.wire", "upstream", str(upstream)))
    ports = {"direct": upstream}
    if nginx := shutil.which("nginx"):
        ports["nginx"] = running.enter_context(_nginx(nginx, folder, upstream))
    else:
        print("nginx is not installed: left out")
    ports["bare relay"] = running.enter_context(_bare(upstream))
    for number, (name, offload) in enumerate(proxies.items()):
        ports[name] = running.enter_context(_proxy(folder / str(number), offload, upstream))
    for port in ports.values():
        _await_port(port)
    return ports


@contextmanager
def _process(module: str, *arguments: str, **environment: str) -> Iterator[None]:
    with _running([sys.executable, "-m", module, *arguments], environment):
        yield


@contextmanager
def _running(command: list[str], environment: dict[str, str] | None = None) -> Iterator[None]:
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL, env={**os.environ, **(environment or {})})
    try:
        yield
    finally:
        process.terminate()
        process.wait(10)


@contextmanager
def _nginx(command: str, folder: Path, upstream: int) -> Iterator[int]:
    port = _free_port()
    configuration = folder / "nginx.conf"
    configuration.write_text(NGINX.format(folder=folder, upstream=upstream, port=port))
    with _running([command, "-p", str(folder), "-c", str(configuration)]):
        yield port


@contextmanager
def _bare(upstream: int) -> Iterator[int]:
    port = _free_port()
    flags = ("tests.bench.bare:app", f"--port={port}", "--no-access-log", "--log-level=error", "--no-proxy-headers")
    with _process("uvicorn", *flags, BARE_UPSTREAM=f"http://127.0.0.1:{upstream}"):
        yield port


@contextmanager
def _proxy(folder: Path, offload: Offload, upstream: int) -> Iterator[int]:
    port = _free_port()
    folder.mkdir()
    policy = {"upstream": {"base_url": f"http://127.0.0.1:{upstream}/v1"}, "offload": offload}
    (folder / "default.yaml").write_text(json.dumps(policy))
    with _process("proxy", "serve", f"--port={port}", f"--policies={folder}", f"--store={folder / 'store'}"):
        yield port


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def _await_port(port: int) -> None:
    deadline = time.monotonic() + 20
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def _measured(ports: dict[str, int], connections: int, runs: int, seconds: float) -> dict[str, Figures]:
    """The median of each figure, after one short run of each to warm up."""
    for port in ports.values():
        _load(port, connections, min(seconds, 0.5))
    taken: dict[str, list[Figures]] = {name: [] for name in ports}
    for _ in range(runs):
        for name, port in ports.items():
            taken[name].append(_load(port, connections, seconds))
    return {
        name: {figure: statistics.median(one[figure] for one in figures) for figure in figures[0]}
        for name, figures in taken.items()
    }


def _load(port: int, connections: int, seconds: float) -> Figures:
    command = [sys.executable, "-m", "tests.bench.wire", "load", str(port), str(connections), str(seconds)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=seconds + 20)
    figures: Figures = json.loads(done.stdout)
    return figures


def _show(connections: int, measured: dict[str, Figures]) -> None:
    direct, bare = measured["direct"], measured["bare relay"]
    print(f"\n{connections} connection{'s' if connections > 1 else ''}, a chat request of 1 KB")
    print(f"{'':18}{'req/s':>9}{'p50 ms':>9}{'p99 ms':>9}{'added p50':>11}{'added p99':>11}{'of bare':>9}")
    for name, figures in measured.items():
        added = [f"{(figures[one] - direct[one]) * 1000:11.2f}" for one in ("p50", "p99")]
        times = [f"{figures[one] * 1000:9.2f}" for one in ("p50", "p99")]
        print(f"{name:18}{figures['rate']:9.0f}{''.join(times + added)}{figures['rate'] / bare['rate']:9.2f}")


if __name__ == "__main__":
    sys.exit(main())
