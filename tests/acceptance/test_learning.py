"""What a running proxy finds out about its upstream's window."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.clock import wait_until
from tests.dialects.chat import turns as chats
from tests.dialects.messages import turns as messages
from tests.dialects.responses import turns as responses
from tests.fake_upstream import Recorded, Reply, StrictUpstream, error, pieces, text, whole
from tests.serving import Proxy, served
from tests.steps import STEP, chat, tool

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


CUT = 6_000
"""The tokens that upstream reads of a prompt. It says so only by its usage."""


def cutting(api: str, request: Recorded) -> Reply:
    """Answer in this API, and count what is read of the prompt."""
    read = min(len(request.body) // 4, CUT)
    streams = bool(request.json.get("stream"))
    spent = {"input_tokens": read, "output_tokens": 3}
    if api == "chat":
        spent = chats.usage(read, 3)
        if streams:
            end = [chats.chunk({}, "stop"), chats.chunk(usage=spent), chats.DONE]
            return pieces(chats.stream(chats.ROLE, chats.chunk({"content": "ok"}), *end))
        return whole(chats.whole({"content": "ok"}, usage=spent))
    if api == "messages":
        made = messages.message({"type": "text", "text": "ok"}, usage=spent)
        return pieces(messages.stream(made)) if streams else whole(made)
    said = {"type": "output_text", "text": "ok", "annotations": []}
    item = {"type": "message", "role": "assistant", "status": "completed", "content": [said]}
    made = responses.response(item, usage=spent)
    return pieces(responses.stream(made)) if streams else whole(made)


PATHS = {"chat": "chat/completions", "messages": "messages", "responses": "responses"}


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("api", PATHS)
def test_window_that_upstream_enforces_in_silence(
    api: str, streams: bool, up: StrictUpstream
) -> None:
    up.respond(lambda request: cutting(api, request))
    history: list[Any] = [{"role": "user", "content": "Search."}]
    asked: dict[str, Any] = {"model": "m", "tools": [tool(api)], "stream": streams}
    asked |= {"max_tokens": 90} if api == "messages" else {}
    asked |= {"stream_options": {"include_usage": True}} if api == "chat" and streams else {}
    with served({"default": policy(up)}) as proxy:
        for number in range(20):
            history += STEP[api](f"call_{number}", f"{number} " + "one word after the other " * 180)
            entries = {"input" if api == "responses" else "messages": history}
            reply = proxy.post(f"/v1/{PATHS[api]}", asked | entries)
            assert reply.status_code == 200
            if "Upstream reads only" in reply.headers["x-offload-reason"]:
                break
        assert proxy.metric("learned_windows_total", "cut") == 1
    assert (
        f"Upstream reads only {CUT:,} tokens of a prompt for m" in reply.headers["x-offload-reason"]
    )
    assert (
        int(reply.headers["x-offload-tokens-after"])
        < CUT
        < int(reply.headers["x-offload-tokens-before"])
    )
