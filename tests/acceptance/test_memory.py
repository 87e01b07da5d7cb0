"""A request leaves no reference cycles, which would keep megabytes until the garbage collector
runs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from proxy.requests.exchange import Exchange
from tests.clock import wait_until
from tests.fake_upstream import Recorded, Reply, StrictUpstream, calls, text
from tests.serving import PLAIN, served, tight
from tests.steps import CHAT_TOOL, chat

Json = dict[str, Any]


def history(results: int) -> list[Json]:
    made: list[Json] = [{"role": "user", "content": "Look."}]
    for number in range(results):
        made += chat(f"c{number}", f"{number} many words " * 400)
    return made


def searching(request: Recorded) -> Reply:
    """Search before the reply, if the request offers the tools."""
    if "grep" in request.tool_names and request.messages[-1].get("tool_call_id", "").startswith(
        "c"
    ):
        return calls(("grep", {"pattern": "1 many"}, "ours"))
    return text("ok")


ASKS: dict[str, tuple[str, Json]] = {
    "untouched": ("/v1/chat/completions", {"messages": history(1)}),
    "offloaded": ("/v1/chat/completions", {"messages": history(12), "tools": [CHAT_TOOL]}),
    "streamed": (
        "/v1/chat/completions",
        {"messages": history(12), "tools": [CHAT_TOOL], "stream": True},
    ),
    "no chat": ("/v1/chat/completions", {"messages": "none"}),
    "operation": (
        "/context_compact",
        {"messages": history(12), "store_dir": "s", "max_total_tokens": 500},
    ),
    "refused operation": ("/context_compact", {"messages": history(2), "store_dir": 7}),
}


@contextmanager
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize("ask", ASKS)
def test_requests_do_not_leak_memory(ask: str) -> None:
    path, body = ASKS[ask]
    with StrictUpstream() as up, served({"default": tight(up.url)}) as proxy:
        up.respond(searching)
        up.expect_refusals = True
        with httpx.Client(
            base_url=proxy.root,
            headers={"authorization": "Bearer k"},
            trust_env=False,
            verify=PLAIN,
        ) as client:
            client.post(path, json={"model": "gpt-4.1", **body})  # has loaded what stays
            with without_collector():
                # what another test keeps is not ours: the traceback of an exception, for one
                earlier = _living()
                for _ in range(5):
                    client.post(path, json={"model": "gpt-4.1", **body})
                wait_until(lambda: all(any(one is other for other in earlier) for one in _living()))


def _living() -> list[Exchange]:
    return [one for one in gc.get_objects() if isinstance(one, Exchange)]
