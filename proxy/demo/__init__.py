"""`offload-proxy demo`: an agent goes past its context window and loses nothing, without a key or a network."""

from __future__ import annotations

import asyncio
import re
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from types import FrameType

from proxy.errors import UserMistake

OK, FAILED = 0, 1


def run(*, serve: bool = False) -> int:
    """Run the demo; returns the exit code: 0, or 1 if a check failed.

    With `serve`, the proxy goes on serving its dashboard until Ctrl-C or a signal. The moved results stay in a new
    temporary folder for the user to look at; an interrupted demo removes it.
    """
    if missing := [name for name in ("openai", "rich") if find_spec(name) is None]:
        raise UserMistake(f"the demo needs {' and '.join(missing)}: pip install 'offload-proxy[demo]'")
    for name in ("SIGTERM", "SIGHUP"):
        if number := getattr(signal, name, None):
            signal.signal(number, _terminated)
    folder = Path(tempfile.mkdtemp(prefix="offload-demo-"))
    try:
        return _run(folder, serve)
    except (KeyboardInterrupt, SystemExit):
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _run(folder: Path, serve: bool) -> int:
    from openai import DefaultHttpxClient, OpenAI

    from proxy.demo import child, screen
    from proxy.demo.agent import Agent
    from proxy.demo.library import Library
    from proxy.demo.session import Session
    from proxy.demo.upstream import ScriptedUpstream

    library, count = Library(), _counter()
    with ScriptedUpstream(count) as upstream:
        with (
            child.serving(upstream.url, folder, dashboard=serve) as address,
            DefaultHttpxClient(trust_env=False) as direct,
            OpenAI(base_url=f"{address}/v1", api_key="demo", max_retries=0, http_client=direct) as client,
        ):
            session = Session(Agent(client, library), library, upstream, count)
            with screen.opened() as shown:
                for row in session.run():
                    shown.show(row)
            if serve:
                _serve(folder / "proxy.log")
        # The proxy has exited and written all its records.
        outcome = session.outcome(asyncio.run(_originals(folder / "store")))
    sys.stdout.write("\n" + screen.summary(outcome, str(folder), sys.executable))
    return FAILED if outcome.faults() else OK


def _serve(log: Path) -> None:
    """Say where the dashboard opens, which the proxy's log has, and wait for Ctrl-C or a signal."""
    found = re.search(r"the dashboard opens, once, at (\S+)", log.read_text(encoding="utf-8", errors="replace"))
    sys.stdout.write(f"\ndashboard     {found[1] if found else 'is off'} (opens once; Ctrl-C ends it)\n")
    sys.stdout.flush()
    with suppress(KeyboardInterrupt, SystemExit):
        threading.Event().wait()


def _counter() -> Callable[[str], int]:
    """A function that counts tokens, with a cache: an agent sends the same texts again and again."""
    from proxy.tokens import Tokens

    return lru_cache(maxsize=4096)(Tokens().count)


async def _originals(folder: Path) -> dict[str, bytes]:
    """The moved results that the store holds, by file name."""
    from proxy.stores import open_store

    store = open_store(str(folder))
    try:
        keys = [entry.key for entry in [entry async for entry in store.list("")] if "/originals/" in entry.key]
        return {key.rpartition("/")[2]: await store.get(key) or b"" for key in keys}
    finally:
        await store.close()


def _terminated(number: int, frame: FrameType | None) -> None:
    """Exit as on Ctrl-C, so that our child processes end too."""
    sys.exit(128 + number)
