"""Agents' sessions in each API: a model that answers all of them, strictly checked, and a client
that speaks them."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from typing import Any

import httpx

from tests.acceptance.test_compress import SNAPSHOT
from tests.apps.dashboard.traffic import RESULT, TOOL, begin
from tests.dialects.messages import api as messages_api
from tests.dialects.messages import converting as messages
from tests.dialects.messages.api import MessagesApi
from tests.dialects.responses import api as responses_api
from tests.dialects.responses import converting as responses
from tests.dialects.responses.api import ResponsesApi
from tests.fake_upstream import Recorded, Reply, calls, drop, error, text
from tests.serving import Proxy
from tests.steps import chat

Json = dict[str, Any]

APIS = ("chat", "responses", "messages")
PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}

SAY, READ, BOTH, FAIL, HANG_UP, NO_TOOLS = "say", "read", "both", "fail", "hang up", "no tools"
"""What the model does next: say something, read something back first, call a tool of ours and one
of the client's (in chat), answer 500, say nothing, or refuse our tools."""

SAID = "I look."
LOOKS = ("grep", {"pattern": "topic number 1"})


class Model:
    """Answers requests of every API; pass it to `StrictUpstream.respond`. `next` says how, for
    requests to come."""

    def __init__(self) -> None:
        self.next: deque[str] = deque()
        self._responses, self._messages = ResponsesApi(), MessagesApi(window=10_000_000)
        self._responses.respond(
            lambda body: self._said(body, responses_api.say, responses_api.call)
        )
        self._messages.respond(lambda body: self._said(body, messages_api.say, messages_api.call))
        self._reading = False

    def __call__(self, request: Recorded) -> Reply:
        if not request.is_chat and not request.path.endswith(("/responses", "/messages")):
            return error(404)
        asked = self.next and b"private scratchpad" not in request.body
        move = self.next[0] if asked else SAY
        if move == NO_TOOLS and b'"grep"' in request.body:
            return error(
                400, {"error": {"message": "This model does not support tools", "type": "invalid"}}
            )
        if asked:
            self.next.popleft()
        if move == FAIL:
            return error(500)
        if move == HANG_UP:
            return drop()
        if move == BOTH:
            return calls(LOOKS, ("lookup", {}))
        self._reading = move == READ
        if request.path.endswith("/responses"):
            return self._responses(request)
        if request.path.endswith("/messages"):
            return self._messages(request)
        [said] = self._said(request.json, text, lambda name, arguments: calls((name, arguments)))
        return said

    def _said(self, body: Json, say: Callable[[str], Any], call: Callable[..., Any]) -> list[Any]:
        if "private scratchpad" in json.dumps(body):
            return [say(SNAPSHOT)]
        return [call(*LOOKS)] if self._reading else [say(SAID)]


def body_of(api: str, history: list[Json], tools: list[Json], **members: Any) -> Json:
    """Return the request that says in this API what these chat messages say."""
    if api == "messages":
        return {**messages.request(history, tools), **members}
    if api == "responses":
        return {
            "model": "gpt-4o",
            "input": responses.items(history),
            "tools": responses.tools(tools),
            **members,
        }
    return {"model": "gpt-4o", "messages": history, "tools": tools, **members}


def ask(
    proxy: Proxy,
    api: str,
    history: list[Json],
    *,
    key: str = "k",
    tools: list[Json] | None = None,
    **members: Any,
) -> httpx.Response:
    """Send a history in this API, and return the reply."""
    headers = members.pop("headers", {})
    if api == "messages":
        headers, key = {"x-api-key": key, "anthropic-version": "2023-06-01", **headers}, ""
    return proxy.post(
        PATHS[api],
        body_of(api, history, [TOOL] if tools is None else tools, **members),
        key,
        **headers,
    )


def play(
    proxy: Proxy,
    model: Model,
    api: str,
    /,
    turns: int = 6,
    task: str = "Look everything up.",
    moves: dict[int, str] | None = None,
    result: str = RESULT,
    **members: Any,
) -> list[httpx.Response]:
    """Play a session of so many requests in this API. `moves` says what the model does at which."""
    history, replies = begin(task), []
    for number in range(turns):
        move = (moves or {}).get(number, SAY)
        # the proxy tries some things again
        model.next.extend([READ, SAY] if move == READ else [move] * 4)
        replies.append(ask(proxy, api, history, **members))
        model.next.clear()
        if move == READ:  # the client adopts the reply, so that what it hid is put back
            history += [
                {"role": "assistant", "content": SAID},
                {"role": "user", "content": "Go on."},
            ]
        history += chat(f"call_{number}", result.format(turn=number), "lookup")
    return replies
