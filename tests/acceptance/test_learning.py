"""What a running proxy finds out about its upstream's window."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.clock import wait_until
from tests.fake_upstream import Recorded, Reply, StrictUpstream, error, text, whole
from tests.serving import Proxy, served
from tests.steps import chat

WINDOW = 4_000
LARGEST = 12_000
"""The most bytes of a request that upstream takes."""
MODELS = {"object": "list", "data": [{"id": "gpt-4o", "max_model_len": WINDOW}]}
REFUSED = {"error": {"message": f"This model's maximum context length is {WINDOW} tokens."}}


def models(request: Recorded) -> Reply:
    """Answer all that fits, and give the list of models."""
    if request.path.endswith("/models"):
        return whole(json.dumps(MODELS).encode())
    return error(400, REFUSED) if len(request.body) > LARGEST else text("Yes.")


def policy(up: StrictUpstream, **upstream: Any) -> dict[str, Any]:
    offload = {"mode": "compact", "max_total_tokens": 100_000}
    return {"upstream": {"base_url": up.url, **upstream}, "offload": offload}


@pytest.fixture
def up() -> Iterator[StrictUpstream]:
    with StrictUpstream() as up:
        up.respond(models)
        yield up


def ask(proxy: Proxy, results: int) -> httpx.Response:
    messages: list[Any] = [{"role": "user", "content": "Search."}]
    for number in range(results):
        messages += chat(f"c{number}", f"{number} " + "one word after the other " * 60)
    return proxy.post("/v1/chat/completions", {"model": "gpt-4o", "messages": messages})


def test_upstreams_list_of_models_gives_the_window(up: StrictUpstream) -> None:
    with served({"default": policy(up) | {"asks_models": True}}) as proxy:
        assert ask(proxy, 1).status_code == 200
        wait_until(lambda: proxy.metric("learned_windows_total", "listed") == 1)
        assert ask(proxy, 12).headers["x-offload-compacted"] != "0"
        assert not proxy.metric("learned_windows_total", "refused")
    asked = [request for request in up.requests if not request.is_chat]
    assert [request.path for request in asked] == ["/v1/models"]
    assert (b"authorization", b"Bearer k") in asked[0].headers
