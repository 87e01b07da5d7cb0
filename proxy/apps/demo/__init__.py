"""`offload-proxy demo`: an agent goes past its context window and loses nothing, without a key or a
network."""

from __future__ import annotations

import asyncio
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

import msgspec

from proxy.errors import ProxyError, UserMistake
from proxy.plan.prices import price_of
from proxy.policy import Profile
from proxy.release import install
from proxy.settings import Settings

OK = 0
FAILED = 1

OPENAI = "https://api.openai.com/v1"
PRICED_AS = "gpt-5.5"
"""Whose list price the scripted model has."""

STILL = 20.0
STOP = 10.0
"""Seconds after which we say that we still wait for the proxy to listen, and within which it must
exit before it is killed."""


def demo(settings: Settings, chosen: Namespace) -> int:
    """Run the demo; returns the exit code: 0, or 1 if a check failed.

    With `--serve`, the proxy goes on serving its dashboard until Ctrl-C or a signal. The moved
    results stay in a new temporary folder for the user to look at; an interrupted demo removes it.
    """
    if find_spec("openai") is None:
        raise UserMistake(f"the demo needs openai: {install('demo')}")
    for name in ("SIGTERM", "SIGHUP"):
        if number := getattr(signal, name, None):
            # so that our child processes end, too
            signal.signal(number, lambda number, frame: sys.exit(128 + number))
    folder = Path(tempfile.mkdtemp(prefix="offload-demo-"))
    try:
        return _run(settings, folder, serve=chosen.serve)
    except (KeyboardInterrupt, SystemExit):
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _run(settings: Settings, folder: Path, *, serve: bool) -> int:
    from openai import DefaultHttpxClient, OpenAI

    from proxy.apps.demo import session
    from proxy.apps.demo.model import ScriptedUpstream

    with ScriptedUpstream().serving() as upstream:
        with (
            _serving(settings, upstream.url, folder, dashboard=serve) as address,
            DefaultHttpxClient(trust_env=False) as direct,
            OpenAI(
                base_url=f"{address}/v1", api_key="demo", max_retries=0, http_client=direct
            ) as client,
        ):
            agent = session.Agent(client, upstream)
            session.show(agent)
            if serve:
                said = (folder / "proxy.log").read_text(encoding="utf-8", errors="replace")
                found = re.search(r"the dashboard opens, once, at (\S+)", said)
                sys.stdout.write(
                    f"\ndashboard     {found[1] if found else 'is off'} (opens once; Ctrl-C ends it)\n"
                )
                sys.stdout.flush()
                with suppress(KeyboardInterrupt, SystemExit):
                    threading.Event().wait()
        # The proxy has exited and written all its records.
        faults = session.summary(agent, asyncio.run(_originals(folder / "store")), folder)
    return FAILED if faults else OK


@contextmanager
def _serving(settings: Settings, upstream: str, folder: Path, *, dashboard: bool) -> Iterator[str]:
    """Run the proxy for the block as a user would; yields its address. Raises ProxyError."""
    log = folder / "proxy.log"
    policies = folder / "policies"
    policies.mkdir()
    (policies / "default.yaml").write_text(_policy(settings.profile), encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "proxy",
        "serve",
        "--host=127.0.0.1",
        "--port=0",
        "--log-format=full",
    ]
    command += [f"--upstream={upstream}", f"--store={folder / 'store'}", f"--policies={policies}"]
    command += [f"--dashboard={folder / 'dashboard.db' if dashboard else 'off'}"]
    # All is on loopback, and the policy has the profile.
    ours = {
        name: value
        for name, value in settings.environment.items()
        if not name.upper().endswith("_PROXY") and name != "OFFLOAD_PROFILE"
    }
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=ours)
    try:
        yield _address(process, log)
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP)
        process.kill()
        process.wait()


def _policy(profile: Profile | None) -> str:
    """Return the policy's text, with the prices that the model would have at its provider's."""
    prices = price_of(OPENAI, PRICED_AS)
    offload = {
        name: getattr(prices, name) for name in ("cached_read", "cache_write", "input_price")
    }
    return msgspec.json.encode(
        {"offload": {"profile": profile or Profile.BALANCED, **offload}}
    ).decode()


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    """Return the address once the proxy listens there, however long a slow machine takes. Raises
    ProxyError if the proxy has ended."""
    began = time.monotonic()
    written = STILL
    while True:
        code = process.poll()  # first, as it may write until it ends
        said = log.read_text(encoding="utf-8", errors="replace")
        seconds = time.monotonic() - began
        if found := re.search(r"listening on (http://\S+)", said):
            return found[1]
        if code is not None:
            text = said[-2000:].strip() or "it wrote nothing"
            raise ProxyError(
                f"the proxy ended with code {code} after {seconds:.1f} s and never listened:\n{text}"
            )
        if seconds > written:
            sys.stderr.write(
                f"still waiting for the proxy to listen, for {seconds:.0f} s (Ctrl-C ends it)\n"
            )
            written += STILL
        time.sleep(0.02)


async def _originals(folder: Path) -> dict[str, bytes]:
    """The moved results that the store holds, by file name."""
    from proxy.stores import open_store

    store = open_store(str(folder))
    try:
        keys = [
            entry.key
            for entry in [entry async for entry in store.list("")]
            if "/originals/" in entry.key
        ]
        return {key.rpartition("/")[2]: await store.get(key) or b"" for key in keys}
    finally:
        await store.close()
