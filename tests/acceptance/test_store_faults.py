"""A Redis that fails in every possible way: the real proxy still serves its clients, and quickly."""

from __future__ import annotations

import logging
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from redis import Redis

from tests.acceptance.test_openai_client import TOOL, history, references
from tests.fake_upstream import Message, Recorded, StrictUpstream, calls, text
from tests.serving import PLAIN, Proxy, tight
from tests.stores.engines import Process, redis_server

ASKED = 12
"""Requests after the fault; `tests/stores/test_guarded.py` shows that none waits for longer than the budget."""


class Server:
    """A Redis server, and the faults that a test can give it."""

    def __init__(self, process: Process) -> None:
        self.process = process

    def slow(self) -> None:
        self._ask("CLIENT PAUSE 60000 ALL")

    def frozen(self) -> None:
        self.process.signal(signal.SIGSTOP)

    def refusing(self) -> None:
        self.process.stop()

    def full(self) -> None:
        self._ask("CONFIG SET maxmemory 1")

    def locked(self) -> None:
        # Existing connections are authenticated already and would continue to work.
        self._ask("CONFIG SET requirepass another", "CLIENT KILL TYPE normal SKIPME yes")

    def _ask(self, *commands: str) -> None:
        with Redis(port=self.process.port, socket_timeout=5, single_connection_client=True) as client:
            for command in commands:
                client.execute_command(*command.split())


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[Server]:
    with redis_server(tmp_path, "--maxmemory-policy", "noeviction") as process:
        yield Server(process)


@pytest.fixture
def proxy(up: StrictUpstream, serve: Callable[..., Proxy], redis: Server) -> Proxy:
    up.respond(_finds_the_code)
    policy = tight(up.url, offload={"mode": "auto", "compress": {"wait": "always"}})
    return serve({"default": policy}, store=f"redis://127.0.0.1:{redis.process.port}/0")


def _finds_the_code(request: Recorded) -> Message:
    last = request.messages[-1]
    if last["role"] == "tool":
        found = re.search(r"heliotrope-\d+", str(last["content"]))
        return text(f"It is {found[0] if found else 'not to be found'}.")
    return calls(("grep", {"pattern": "code is", "path": references(request)[0]}))


def ask(proxy: Proxy, number: int) -> bool:
    """Return whether the answer is right. Each number is a history that the proxy has not seen."""
    messages = history()
    messages[1] = {"role": "user", "content": f"Fetch the logs of day {number}."}
    body = {"model": "m", "messages": messages, "tools": [TOOL], "stream": bool(number % 2)}
    reply = httpx.post(f"{proxy.url}/chat/completions", json=body, timeout=20, verify=PLAIN)
    assert reply.status_code == 200, reply.text
    shown = "".join(re.findall(r'"content":\s*"(.*?)"', reply.text))
    return "heliotrope-7291" in shown


def store_errors(proxy: Proxy) -> dict[str, float]:
    page = httpx.get(f"{proxy.root}/metrics", verify=PLAIN).text
    found = re.findall(r'^offload_store_errors_total{fault="(\S+?)",operation="(\S+?)"} (\S+)$', page, re.MULTILINE)
    return {f"{operation}:{fault}": float(times) for fault, operation, times in found}


def waits(errors: dict[str, float]) -> float:
    """Return the errors that a request waited for, with the breaker closed and time left."""
    return sum(times for name, times in errors.items() if name.endswith((":timeout", ":failed")))


@pytest.mark.parametrize(
    ("fault", "counted"),
    [
        (Server.slow, "get:timeout"),
        (Server.frozen, "get:timeout"),
        (Server.refusing, "get:failed"),
        (Server.full, "put:failed"),
        (Server.locked, "get:failed"),
    ],
)
def test_a_failed_store_delays_requests_briefly_and_is_logged_once(
    proxy: Proxy,
    redis: Server,
    caplog: pytest.LogCaptureFixture,
    fault: Callable[[Server], None],
    counted: str,
) -> None:
    assert ask(proxy, 0)
    assert store_errors(proxy) == {}
    fault(redis)
    with caplog.at_level(logging.WARNING):
        assert all(ask(proxy, number) for number in range(1, 1 + ASKED))
    if fault is not Server.full:  # which answers reads
        assert store_errors(proxy)["get:open"] > 0
        assert waits(store_errors(proxy)) < ASKED, "the breaker leaves it alone"
    assert store_errors(proxy)[counted] > 0
    said = [record.getMessage() for record in caplog.records if record.getMessage().startswith("store: ")]
    kinds = [message.split(": ")[1] for message in said]
    assert said and len(kinds) == len(set(kinds)), said


def test_a_recovered_store_is_used_again(proxy: Proxy, redis: Server) -> None:
    redis.refusing()
    for number in range(6):
        assert ask(proxy, number)
    redis.process.start()
    deadline = time.monotonic() + 15
    while 'offload_store_breakers{state="closed"} 1.0' not in httpx.get(f"{proxy.root}/metrics", verify=PLAIN).text:
        assert time.monotonic() < deadline
        assert ask(proxy, 7)
        time.sleep(0.2)
    before = store_errors(proxy)
    assert ask(proxy, 8)
    assert store_errors(proxy) == before
    with Redis(port=redis.process.port) as client:
        assert [key for key in client.scan_iter() if b"/rounds/" in key]
