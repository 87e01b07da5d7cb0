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
    """Run the demo; the exit code: 0, or 1 where something was not as it must be.

    What was moved stays in a new folder of the system's temporary one, and is looked at afterwards; an interrupted demo
    leaves nothing.
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
        # The proxy has ended, so that all it had to write is written.
        outcome = session.outcome(asyncio.run(_originals(folder / "store")))
    sys.stdout.write("\n" + screen.summary(outcome, str(folder), sys.executable))
    return FAILED if outcome.faults() else OK


def _counter() -> Callable[[str], int]:
    """Counts tokens, each text once: an agent sends the same ones again and again."""
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
    """What else may end us does it as Ctrl-C does: together with what we started."""
    sys.exit(128 + number)
