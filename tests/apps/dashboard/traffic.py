"""An agent's session through a proxy with a dashboard: each turn calls a tool and gets a long
result."""

from __future__ import annotations

import json
import os
import zlib
from typing import Any

import httpx

from proxy.apps.dashboard.queries import Reader
from proxy.apps.dashboard.rows import DAY, SUMS, Recorded
from proxy.telemetry.outcome import Kind, Outcome
from tests.clock import wait_until
from tests.fake_upstream import StrictUpstream, calls, text
from tests.serving import ADMIN, PLAIN, Proxy
from tests.steps import chat

TOOL = {
    "type": "function",
    "function": {"name": "lookup", "parameters": {"type": "object", "properties": {}}},
}
RESULT = "A line about the topic number {turn} that an agent has looked up.\n" * 12
OPERATOR = {"authorization": f"Bearer {ADMIN}"}


def key(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}"}


def begin(task: str = "Look everything up.") -> list[dict[str, Any]]:
    return [{"role": "system", "content": "You look things up."}, {"role": "user", "content": task}]


def turn(
    proxy: Proxy, messages: list[dict[str, Any]], number: int, result: str = "", **request: Any
) -> httpx.Response:
    """Ask once, and add the model's call and its result to the messages."""
    caller, headers = request.pop("key", "k"), request.pop("headers", {})
    body = {"model": "gpt-4.1-mini", "messages": messages, "tools": [TOOL], **request}
    reply = proxy.post("/v1/chat/completions", body, caller, **headers)
    messages += chat(f"call_{number}", result or RESULT.format(turn=number), "lookup")
    return reply


def session(
    proxy: Proxy,
    upstream: StrictUpstream,
    turns: int = 8,
    task: str = "Look everything up.",
    **request: Any,
) -> None:
    """Play a whole session, in the last turn of which the model reads something back."""
    messages = begin(task)
    for number in range(turns):
        if number == turns - 1 and "read" in request:
            upstream.script(calls(("grep", {"pattern": "topic number 1"})))
        upstream.script(text("Looking.") if request.get("stream") else text("I look."))
        turn(
            proxy,
            messages,
            number,
            **{name: value for name, value in request.items() if name != "read"},
        )


def dashboard(proxy: Proxy, path: str, **options: Any) -> Any:
    """Return the JSON of one of the dashboard's answers, by default to the operator."""
    options = {"headers": OPERATOR, **options}
    reply = httpx.get(f"{proxy.root}/_offload/api/{path}", verify=PLAIN, **options)
    assert reply.status_code == 200, reply.text
    return json.loads(reply.content)


def recorded(proxy: Proxy, count: int) -> list[dict[str, Any]]:
    """Wait for so many rows, and return them, the newest first."""
    wait_until(lambda: len(dashboard(proxy, "requests")) >= count)
    rows: list[dict[str, Any]] = dashboard(proxy, "requests")
    return rows


def sums(reader: Reader, since: float, span: int = DAY) -> list[dict[str, Any]]:
    """Return the sums of each model."""
    return reader.sums("model", {name: name for name in SUMS}, span, since)


def outcome(number: int = 0, namespace: str = "acme-1", **fields: Any) -> Outcome:
    """Return the outcome of a rewritten request."""
    given = {
        "tenant": namespace.partition("-")[0], "kind": Kind.OFFLOADED, "method": "POST",
        "path": "/v1/chat/completions", "dialect": "chat", "model": "gpt-4.1-mini", **fields,
    }  # fmt: skip
    return Outcome(request_id=f"req_{number:032}", namespace=namespace, **given)


def ended(
    count: int, start: int = 0, at: float = 0.0, namespace: str = "acme-1", detail: int = 0
) -> list[Recorded]:
    """Return requests that ended a second after each other, ten in a session, each described with
    so many bytes."""
    return [
        Recorded(
            at + number, outcome(number, namespace, tokens_before=7), number // 10, [1] * 8,
            zlib.compress(os.urandom(detail)) if detail else None,
        )
        for number in range(start, start + count)
    ]  # fmt: skip
