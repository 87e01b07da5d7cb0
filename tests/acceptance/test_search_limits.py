"""Limits of our tools' calls: how many there are, and how long they search."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from proxy.policy import Tools
from tests.fake_upstream import Recorded, StrictUpstream, calls, text
from tests.serving import PLAIN, Proxy, tight

Json = dict[str, Any]

NASTY = "(?:.{0,99}m){9}zq"
"""RE2 needs microseconds for each byte of a text that is full of m."""

TOOL = {"type": "function", "function": {"name": "fetch", "parameters": {"type": "object"}}}


def history(content: str) -> list[Json]:
    """Return one call with this result, and a next question."""
    call = {"id": "call_0", "type": "function", "function": {"name": "fetch", "arguments": "{}"}}
    return [
        {"role": "user", "content": "Go."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_0", "content": content},
        {"role": "assistant", "content": "Done."},
        {"role": "user", "content": "And now?"},
    ]


def asked(content: str) -> Json:
    return {"model": "m", "messages": history(content), "tools": [TOOL]}


def searching(request: Recorded, times: int = 12) -> Any:
    """Nasty calls as long as there is somebody who answers them; nothing but text for who has no history."""
    if len(request.messages) < 5 or request.messages[-1]["role"] == "tool":
        return text("Hello.")
    return calls(*((request.tool_names[-2], {"pattern": NASTY}, f"call_n{number}") for number in range(times)))


@pytest.fixture
def up() -> Iterator[StrictUpstream]:
    with StrictUpstream() as made:
        yield made


def ask(proxy: Proxy, body: Json, key: str = "a") -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.post(
        f"{proxy.url}/chat/completions", json=body, headers=headers, timeout=120, trust_env=False, verify=PLAIN
    )


def test_all_searches_of_a_turn_share_one_budget(
    up: StrictUpstream, serve: Callable[..., Proxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tools, "max_search_seconds", 0.3)
    proxy = serve({"default": tight(up.url)})
    up.respond(lambda request: searching(request, 30))
    begun = time.process_time()
    assert ask(proxy, asked(("m" * 2_000 + "\n") * 300)).status_code == 200
    assert time.process_time() - begun < 5, "seconds of processor time; without the budget it is a minute"
    answers = [message["content"] for message in up.chats[1].messages[-30:]]
    assert all("searching took more than 0.3 seconds" in answer for answer in answers[:16])
    assert all("at most 16 calls" in answer for answer in answers[16:])
