"""`offload-proxy demo`: an agent goes past its context window and loses nothing, without a key or a network."""

from __future__ import annotations

import asyncio
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from types import FrameType

from proxy.errors import UserMistake

OK, FAILED = 0, 1


def run() -> int:
    """Run the demo; returns the exit code: 0, or 1 if a check failed.

    The moved results stay in a new temporary folder for the user to look at; an interrupted demo removes it.
    """
    if missing := [name for name in ("openai", "rich") if find_spec(name) is None]:
        raise UserMistake(f"the demo needs {' and '.join(missing)}: pip install 'offload-proxy[demo]'")
    for name in ("SIGTERM", "SIGHUP"):
        if number := getattr(signal, name, None):
            signal.signal(number, _terminated)
    folder = Path(tempfile.mkdtemp(prefix="offload-demo-"))
    try:
        return _run(folder)
    except (KeyboardInterrupt, SystemExit):
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _run(folder: Path) -> int:
    from openai import DefaultHttpxClient, OpenAI

    from proxy.demo import child, screen
    from proxy.demo.agent import Agent
    from proxy.demo.library import Library
    from proxy.demo.session import Session
    from proxy.demo.upstream import ScriptedUpstream

    library, count = Library(), _counter()
    with ScriptedUpstream(count) as upstream:
        with (
            child.serving(upstream.url, folder) as address,
            DefaultHttpxClient(trust_env=False) as direct,
            OpenAI(base_url=f"{address}/v1", api_key="demo", max_retries=0, http_client=direct) as client,
            screen.opened() as shown,
        ):
            session = Session(Agent(client, library), library, upstream, count)
            for row in session.run():
                shown.show(row)
        # The proxy has exited and written all its records.
        outcome = session.outcome(asyncio.run(_originals(folder / "store")))
    sys.stdout.write("\n" + screen.summary(outcome, str(folder), sys.executable))
    return FAILED if outcome.faults() else OK


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
