"""Policies as a user writes them, with thresholds alone: each acts where it says, and says why
where it does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from proxy.tokens import Tokens
from tests.fake_upstream import Recorded, StrictUpstream, text
from tests.serving import Proxy
from tests.steps import CHAT_TOOL, chat

Json = dict[str, Any]

RECORD = "<scratchpad>so</scratchpad><state_snapshot><overall_goal>ship it</overall_goal></state_snapshot>"
COUNT = Tokens()


def session(size: int, results: int) -> list[Json]:
    """A task, and so many calls with results of about `size` tokens. The model has answered all but
    the last."""
    messages: list[Json] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Read them all."},
    ]
    for number in range(results):
        messages += chat(f"c{number}", f"{number} " + "word " * (size - 10))
    return messages


def ask(proxy: Proxy, messages: list[Json]) -> httpx.Headers:
    reply = proxy.post(
        "/v1/chat/completions", {"model": "gpt-4o", "messages": messages, "tools": [CHAT_TOOL]}
    )
    assert reply.status_code == 200, reply.text
    return reply.headers


def first_acts(
    up: StrictUpstream, proxy: Proxy, size: int, most: int = 60
) -> tuple[int, int, httpx.Headers]:
    """The tokens of history at the first request that is changed, those that were sent, and the
    reply's headers."""
    for results in range(1, most):
        messages = session(size, results)
        headers = ask(proxy, messages)
        if headers["x-offload-compacted"] != "0" or headers["x-offload-compressed"] != "0":
            return history(messages), history(up.chats[-1].messages), headers
        assert headers["x-offload-reason"].startswith("waiting: the history is"), headers[
            "x-offload-reason"
        ]
    raise AssertionError(
        f"it did not act at {history(messages):,} tokens: {headers['x-offload-reason']}"
    )


def history(messages: list[Json]) -> int:
    """About how many tokens it has behind the system message."""
    return sum(
        COUNT.count(str(message["content"] or "fetch {}"), "gpt-4o") + 4 for message in messages[1:]
    )


def answer(request: Recorded) -> Any:
    return text(
        RECORD if "private scratchpad" in str(request.messages[-1]["content"]) else "Go on."
    )


@pytest.mark.parametrize("mode", ["compact", "auto"])
@pytest.mark.parametrize(
    ("total", "limit", "size"), [(500, 100, 150), (500, 100, 400), (3_000, 500, 600)]
)
def test_it_acts_at_its_ceiling(
    up: StrictUpstream, serve: Callable[..., Proxy], mode: str, total: int, limit: int, size: int
) -> None:
    """Within one result of it, and then half of it is left, but for what the model has not
    answered."""
    up.respond(answer)
    offload = {"mode": mode, "max_total_tokens": total, "max_tool_message_tokens": limit}
    came, sent, _ = first_acts(
        up, serve({"default": {"upstream": {"base_url": up.url}, "offload": offload}}), size
    )
    assert total < came <= total + 2 * size + 40
    assert sent < came


@pytest.mark.parametrize(
    ("profile", "ceiling"), [("careful", 60_000), ("balanced", 30_000), ("frugal", 20_000)]
)
def test_a_profile_acts_at_its_ceiling_where_reads_are_free(
    up: StrictUpstream, serve: Callable[..., Proxy], profile: str, ceiling: int
) -> None:
    up.respond(answer)
    proxy = serve({"default": {"upstream": {"base_url": up.url}, "offload": {"profile": profile}}})
    for results in (ceiling // 4_000 - 1, ceiling // 4_000 + 2):
        messages = session(4_000, results)
        headers = ask(proxy, messages)
        acts = headers["x-offload-compacted"] != "0"
        assert acts == (history(messages) > ceiling), headers.get("x-offload-reason")
