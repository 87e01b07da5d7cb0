"""One client or reply must not harm the others, and clients may leave at every possible point."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.requests.cache import MessageCache
from proxy.requests.records import Records
from proxy.requests.rounds import Rounds
from proxy.server.app import App
from proxy.settings import Settings
from tests.acceptance.test_openai_client import TOOL, history
from tests.asgi import ScriptedClient
from tests.clock import PATIENCE, soon, until
from tests.fake_upstream import HANG, Cut, Reply, Rules, StrictUpstream, calls, hang, text
from tests.serving import Proxy, tight, write_policies

Json = dict[str, Any]

GREP = ("grep", {"pattern": "code is"})
BODY: Json = {"model": "m", "messages": history(), "tools": [TOOL]}


def post(proxy: Proxy, **fields: Any) -> httpx.Response:
    return proxy.post("/v1/chat/completions", {**BODY, **fields})


def ours(reply: httpx.Response) -> Json:
    """Return the proxy's own headers, which say what it did to a request."""
    return {name: value for name, value in reply.headers.items() if name.startswith("x-offload-")}


# -- what one client's mistake must not teach ------------------------------------------------------


def test_asking_for_too_many_completion_tokens_does_not_shrink_the_window(
    serve: Callable[..., Proxy],
) -> None:
    with StrictUpstream(Rules(context_window=20_000), expect_refusals=True) as up:
        up.respond(lambda _: text("Yes."))
        proxy = serve({"default": tight(up.url, offload={"max_total_tokens": 3_000})})
        assert [post(proxy, max_tokens=1_000_000).status_code for _ in range(12)] == [200] * 12
        assert len(up.refusals) == 1, (
            "which names the window; from then on the reply is limited to its room"
        )
        assert ours(post(proxy))["x-offload-compacted"] == "0"


# -- a client that leaves --------------------------------------------------------------------------


@asynccontextmanager
async def running(settings: Settings) -> AsyncIterator[Any]:
    """Run the application in this event loop, where a test can count its tasks."""
    app = App(settings)
    orders: asyncio.Queue[Json] = asyncio.Queue()
    said: asyncio.Queue[Json] = asyncio.Queue()
    living = asyncio.create_task(
        app({"type": "lifespan", "asgi": {}, "state": {}}, orders.get, said.put)
    )
    await orders.put({"type": "lifespan.startup"})
    assert (await said.get())["type"] == "lifespan.startup.complete"
    yield app
    await orders.put({"type": "lifespan.shutdown"})
    await living


LONG = Cut(text("One two three four five six seven"), 3, HANG)
LEAVING: dict[str, tuple[type | None, str, list[Reply]]] = {
    "before its body is complete": (None, "", []),
    "during planning": (MessageCache, "read", []),
    "before the first head": (None, "", [hang()]),
    "mid-stream": (None, "", [LONG]),
    "before a hidden round's head": (None, "", [calls(GREP), hang()]),
    "in a later round": (None, "", [calls(GREP), LONG]),
    "while tools answer": (Rounds, "resolve", [calls(GREP)]),
    "while rounds are remembered": (Records, "remember", [calls(GREP), text("Yes.")]),
}


@pytest.mark.parametrize("where", LEAVING)
async def test_a_client_that_leaves_leaves_nothing_behind(
    up: StrictUpstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    there = asyncio.Event()

    async def forever(*_: Any) -> None:
        there.set()
        await asyncio.Event().wait()

    owner, slow, replies = LEAVING[where]
    if owner is not None:
        monkeypatch.setattr(owner, slow, forever)
    up.script(*replies)
    write_policies(tmp_path / "policies", {"default": tight(up.url)})
    settings = Settings(
        policies=tmp_path / "policies", store=str(tmp_path / "store"), drain_timeout=2
    )
    async with running(settings) as app:
        tasks = len(asyncio.all_tasks())
        body = json.dumps({**BODY, "stream": True}).encode()
        path = "/v1/chat/completions"
        one = ScriptedClient(
            headers=[(b"content-length", b"%d" % len(body))], path=path, raw_path=path.encode()
        )
        partly = where == "before its body is complete"
        one.say(body[:100] if partly else body, more=partly)
        serving = asyncio.create_task(app(one.scope, one.receive, one.send))

        def arrived() -> bool:
            shown = not replies or replies[-1] is not LONG or len(one.messages) > len(replies)
            return (
                partly
                or there.is_set()
                or (owner is None and len(up.chats) == len(replies) and shown)
            )

        await until(arrived)
        one.hang_up()
        await soon(serving)
        if owner is None and replies:
            assert await asyncio.to_thread(up.chats[-1].left.wait, PATIENCE)
        await until(lambda: len(asyncio.all_tasks()) <= tasks)
    assert not one.complete
