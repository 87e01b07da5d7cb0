"""Runs the real proxy on a free port: `served(…)` in this process (fast), `spawned(…)` as `python
-m proxy serve`.

with StrictUpstream() as up, served({"default": tight(up.url)}) as proxy:
    client = openai.OpenAI(base_url=proxy.url, api_key="k")
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import httpx
import msgspec
import uvicorn

from proxy.apps import parts
from proxy.policies.tenants import Tenant
from proxy.requests.windows import Known
from proxy.server import access
from proxy.server.app import App
from proxy.server.runner import config
from proxy.settings import Settings
from proxy.stores.guarded import Guarded
from proxy.upstream.headers import Headers
from tests.clock import PATIENCE, Clock, wait_until
from tests.forking import Fork

Json = dict[str, Any]
Process = subprocess.Popen[bytes] | Fork
Policies = Mapping[str, Json | str]
"""Maps file names without `.yaml` to the files' contents."""

LISTENS = re.compile(r"listening on http://\S+:(\d+)")

WITHOUT = frozenset(os.environ.get("WITHOUT_PARTS", "").split())
"""Names of parts that the proxies of this run are left without. Each must do without any other, and
the core without all of them."""
parts.PARTS = {name: made for name, made in parts.PARTS.items() if name not in WITHOUT}

ADMIN = "the operator's token of tests"
"""Opens the dashboard of proxies that have one."""

PLAIN = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""For httpx's `verify`, because no test here uses TLS. By default httpx reads all certificates for
each client, and for each call without one, which takes 30 ms of CPU time."""


@dataclass
class Proxy:
    """A running proxy. `url` ends in /v1. `policies` and `store` are its directories."""

    port: int
    folder: Path
    """The proxy's own folder, deleted when it ends."""
    policies: Path | None
    store: Path
    process: Process | None = None
    log_file: Path | None = None

    @property
    def root(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"{self.root}/v1"

    def post(self, path: str, body: Any, key: str = "k", **headers: str) -> httpx.Response:
        """Post JSON, or these bytes, to a path of the proxy with this key; an empty one is none."""
        given = {
            "content-type": "application/json",
            **({"authorization": f"Bearer {key}"} if key else {}),
            **headers,
        }
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return httpx.post(
            f"{self.root}{path}", content=content, headers=given, trust_env=False, verify=PLAIN
        )

    def metric(self, name: str, label: str = "") -> float:
        """Return the sum of the metric's series that have this label."""
        series = re.findall(rf"^offload_{name}(\S*) (\S+)$", self.metrics(), re.MULTILINE)
        return sum(float(value) for labels, value in series if label in labels)

    def metrics(self) -> str:
        return httpx.get(
            f"{self.root}/metrics", timeout=PATIENCE, trust_env=False, verify=PLAIN
        ).text

    def log(self) -> str:
        """Return what a spawned proxy has written to standard output and standard error so far."""
        return self.log_file.read_text(encoding="utf-8", errors="replace") if self.log_file else ""

    def stored(self) -> list[Path]:
        """Return the paths of all record files."""
        return sorted(path for path in self.store.rglob("*") if path.is_file())


def tight(upstream: str, **sections: Json) -> Json:
    """Return a policy that moves results above 50 tokens once a history has 300. `sections`
    override it.

    Requests have our tools once something has moved.
    """
    offload: Json = {
        "mode": "compact",
        "max_total_tokens": 300,
        "max_tool_message_tokens": 50,
    }
    policy = {
        "upstream": {"base_url": upstream},
        "offload": offload,
        "tools": {"inject": "when_offloading"},
    }
    merged = {name: {**policy[name], **sections.get(name, {})} for name in ("offload", "tools")}
    return {**policy, **sections, **merged}


@contextmanager
def served(
    policies: Policies | None = None,
    store: Path | None = None,
    clock: Clock | None = None,
    **settings: Any,
) -> Iterator[Proxy]:
    """Run the application and its server in a thread of this process. `settings` are fields of
    `Settings`; `clock` governs its event loop."""
    with ExitStack() as held:
        listener = held.enter_context(socket.create_server(("127.0.0.1", 0), backlog=2048))
        proxy = _prepared(held, listener.getsockname()[1], policies, store)
        made = Settings(
            port=proxy.port, policies=proxy.policies, store=str(proxy.store), drain_timeout=5
        )
        given = {"admin_token": ADMIN} if "dashboard" in settings else {}
        made = msgspec.structs.replace(
            made, **{"monitor_networks": ("127.0.0.0/8",), **given, **settings}
        )
        # Not `server.serve`, which takes over the process' signals and logging.
        server = uvicorn.Server(config(made, App(made, parts.PARTS.values())))

        async def by_our_clock() -> None:
            if clock is not None:
                clock.govern(asyncio.get_running_loop())
            await server.serve([listener])

        factory = None if clock is not None else server.config.get_loop_factory()

        def run() -> None:
            with asyncio.Runner(loop_factory=factory) as runner:
                runner.run(by_our_clock())

        thread = threading.Thread(target=run, name="proxy", daemon=True)
        thread.start()
        held.callback(thread.join, PATIENCE)
        held.callback(setattr, server, "should_exit", True)
        _wait_until_healthy(proxy, thread.is_alive)
        yield proxy


Start = Callable[[Sequence[str], Mapping[str, str], BinaryIO, BinaryIO], Process]
"""Runs `python -m proxy` with these arguments and environment, and these files for output and
errors."""


def started(
    arguments: Sequence[str], environment: Mapping[str, str], out: BinaryIO, errors: BinaryIO
) -> Process:
    """Start `python -m proxy` as users do. Tests replace this with a faster start (conftest.py)."""
    command = [sys.executable, "-m", "proxy", *arguments]
    return subprocess.Popen(
        command, stdout=out, stderr=errors, env=environment, cwd=Path(__file__).parents[1]
    )


@contextmanager
def spawned(
    policies: Policies | None = None,
    store: Path | None = None,
    flags: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Iterator[Proxy]:
    """Run `python -m proxy serve` as a process. It ends with SIGTERM, or is killed if it ignores
    that."""
    with ExitStack() as held:
        proxy = _prepared(held, 0, policies, store)
        proxy.log_file = proxy.folder / "proxy.log"
        arguments = ["serve", "--port=0", f"--store={proxy.store}", *flags]
        arguments += [f"--policies={proxy.policies}"] if proxy.policies else []
        told = {
            **clean_environment(),
            "OFFLOAD_MONITOR_NETWORKS": "127.0.0.0/8",
            "XDG_STATE_HOME": str(proxy.folder / "state"),
            **(environment or {}),
        }
        if policies and not any(isinstance(policy, str) for policy in policies.values()):
            told["QUIET"] = "yes"  # for forks: their upstreams are not asked for models
        with proxy.log_file.open("wb") as log:
            proxy.process = started(arguments, told, log, log)
        held.callback(stop, proxy.process)
        proxy.port = _announced_port(proxy, proxy.process)
        _wait_until_healthy(
            proxy, lambda: proxy.process is not None and proxy.process.poll() is None
        )
        yield proxy


def be_patient() -> None:
    """Let this process' proxies wait for a slow store and in deep health, not for one second or two
    only."""
    defaults = Guarded.__init__.__kwdefaults__
    assert "budget_seconds" in defaults and access.SECONDS
    defaults["budget_seconds"] = access.SECONDS = PATIENCE


def listens(port: int) -> bool:
    """Return whether somebody accepts connections there."""
    with closing(socket.socket()) as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def stop(process: Process) -> None:
    """Send SIGTERM, and after 30 seconds SIGKILL."""
    process.terminate()
    try:
        process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


_QUIET: set[str] = set()
"""Upstreams that are not asked for their models, so that tests see the requests that they cause."""
_list_models = Known.list_models


def _list_unless_quiet(known: Known, tenant: Tenant, headers: Headers) -> None:
    if tenant.policy.upstream.base_url not in _QUIET:
        _list_models(known, tenant, headers)


Known.list_models = _list_unless_quiet  # type: ignore[method-assign]


def write_policies(folder: Path, policies: Policies) -> None:
    """Write the files of a policies directory. JSON is valid YAML.

    Upstreams are asked for their models only if `asks_models` stands beside the policy's sections.
    """
    folder.mkdir(exist_ok=True)
    for name, policy in policies.items():
        if not isinstance(policy, str):
            policy = dict(policy)
            heard = _QUIET.discard if policy.pop("asks_models", False) else _QUIET.add
            policy = json.dumps(policy)
            for url in re.findall(r'"base_url": "([^"]+)"', policy):
                heard(url)
        (folder / f"{name}.yaml").write_text(policy, encoding="utf-8")


def _prepared(held: ExitStack, port: int, policies: Policies | None, store: Path | None) -> Proxy:
    folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="offload-test-")))
    proxy = Proxy(
        port, folder, folder / "policies" if policies else None, store or folder / "store"
    )
    if policies:
        write_policies(folder / "policies", policies)
    return proxy


def _announced_port(proxy: Proxy, process: Process) -> int:
    wait_until(lambda: process.poll() is not None or LISTENS.search(proxy.log()))
    if found := LISTENS.search(proxy.log()):
        return int(found[1])
    raise RuntimeError(f"the proxy did not come up: {proxy.log()[-2000:] or 'it said nothing'}")


def clean_environment() -> dict[str, str]:
    """Return our environment without the variables that configure the proxy or route it through
    another one. The dashboard, which is on by default, is off."""
    steering = ("OFFLOAD_", "OPENAI_", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
    plain = {
        name: value for name, value in os.environ.items() if not name.upper().startswith(steering)
    }
    return {**plain, "OFFLOAD_DASHBOARD": "off"}


def _wait_until_healthy(proxy: Proxy, alive: Callable[[], bool]) -> None:
    def healthy() -> bool:
        with suppress(httpx.TransportError):
            return httpx.get(
                f"{proxy.root}/health", timeout=PATIENCE, trust_env=False, verify=PLAIN
            ).is_success
        return False

    wait_until(lambda: healthy() or not alive())
    if not alive():
        raise RuntimeError(f"the proxy is not well: {proxy.log()[-2000:]}")
