"""A Redis that fails in every possible way: the real proxy still serves its clients, and
quickly."""

from __future__ import annotations

import logging
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from proxy.stores.guarded import Guarded, Visit
from tests.acceptance.test_openai_client import TOOL, history, references
from tests.clock import wait_until
from tests.fake_upstream import Message, Recorded, StrictUpstream, calls, text
from tests.sdks import redis as redis_client
from tests.serving import PLAIN, Proxy, tight
from tests.stores.engines import Process, redis_server

ASKED = 12
"""Requests after the fault; `tests/stores/test_guarded.py` shows that none waits for longer than
the budget."""

BUDGET = 0.2
"""Seconds that a request may wait for the store once that has failed; by default it is one."""


class Server:
    """A Redis server, and the faults that a test can give it."""

    def __init__(self, process: Process) -> None:
        self.process = process

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
        with redis_client.Redis(
            port=self.process.port, socket_timeout=5, single_connection_client=True
        ) as client:
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
    reply = proxy.post("/v1/chat/completions", body, key="")
    assert reply.status_code == 200, reply.text
    shown = "".join(re.findall(r'"content":\s*"(.*?)"', reply.text))
    return "heliotrope-7291" in shown


def store_errors(proxy: Proxy) -> dict[str, float]:
    page = httpx.get(f"{proxy.root}/metrics", verify=PLAIN).text
    found = re.findall(
        r'^offload_store_errors_total{fault="(\S+?)",operation="(\S+?)"} (\S+)$', page, re.MULTILINE
    )
    return {f"{operation}:{fault}": float(times) for fault, operation, times in found}


@pytest.mark.parametrize(
    ("fault", "counted"),
    [
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
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[Server], None],
    counted: str,
) -> None:
    assert ask(proxy, 0)
    assert store_errors(proxy) == {}
    fault(redis)
    monkeypatch.setattr(Guarded, "visit", lambda guarded, seconds=BUDGET: Visit(guarded, seconds))
    with caplog.at_level(logging.WARNING):
        assert all(ask(proxy, number) for number in range(1, 1 + ASKED))
        # writes go on after their requests' replies
        wait_until(lambda: store_errors(proxy).get(counted, 0) > 0)
    if fault is not Server.full:  # which answers reads
        wait_until(lambda: store_errors(proxy).get("get:open", 0) > 0)
        assert store_errors(proxy)[counted] < ASKED, "the breaker leaves it alone"
    said = [
        record.getMessage()
        for record in caplog.records
        if record.getMessage().startswith("store: ")
    ]
    kinds = [message.split(": ")[1] for message in said]
    assert said and len(kinds) == len(set(kinds)), said


def test_a_recovered_store_is_used_again(proxy: Proxy, redis: Server) -> None:
    redis.refusing()
    for number in range(6):
        assert ask(proxy, number)
    redis.process.start()

    def closed() -> bool:
        assert ask(proxy, 7)
        return proxy.metric("store_breakers", 'state="closed"') == 1

    wait_until(closed)
    before = store_errors(proxy)
    assert ask(proxy, 8)
    assert store_errors(proxy) == before
    with redis_client.Redis(port=redis.process.port) as client:
        assert [key for key in client.scan_iter() if b"/rounds/" in key]


TURNS, CONVERSATIONS, RESTARTS = 12, 2, 4


def conversed(proxy: Proxy, turn: Callable[[int], None]) -> None:
    """Have conversations in which each turn has a hidden round. `turn` is called before each of
    them."""
    histories = []
    for number in range(CONVERSATIONS):
        messages = history()
        messages[1] = {"role": "user", "content": f"Fetch the logs of day {number}."}
        histories.append(messages)
    for number in range(TURNS):
        turn(number)
        for messages in histories:
            body = {"model": "m", "messages": messages, "tools": [TOOL]}
            reply = proxy.post("/v1/chat/completions", body, key="").json()
            messages += [
                reply["choices"][0]["message"],
                {"role": "user", "content": f"And now, turn {number}?"},
            ]


def sent(up: StrictUpstream) -> list[list[bytes]]:
    """Return the messages of all requests upstream, with equal names for the model's calls."""
    names: dict[bytes, bytes] = {}

    def renamed(found: re.Match[bytes]) -> bytes:
        return names.setdefault(found[0], b"call-%d" % len(names))

    return [
        [re.sub(rb"call_\w+", renamed, raw) for raw in request.raw_messages] for request in up.chats
    ]


def test_restarts_of_redis_change_no_request_of_conversations_that_this_process_has(
    serve: Callable[..., Proxy], redis: Server
) -> None:
    """What could not be written is kept, so every request is what it would be with a store that
    never fails."""

    def restart(number: int) -> None:
        if number % 3 == 1 and number // 3 < RESTARTS:
            redis.process.stop()
        elif number % 3 == 2 and number // 3 < RESTARTS:
            redis.process.start()

    requests = []
    for store, turn in (
        (None, lambda number: None),
        (f"redis://127.0.0.1:{redis.process.port}/0", restart),
    ):
        with StrictUpstream() as up:
            up.respond(_finds_the_code)
            given = {"store": store} if store else {}
            proxy = serve({"default": tight(up.url)}, **given)
            conversed(proxy, turn)
            requests.append(sent(up))
    assert store_errors(proxy)
    assert len(requests[0]) == 2 * TURNS * CONVERSATIONS
    assert requests[1] == requests[0]
    with redis_client.Redis(port=redis.process.port) as client:  # they are put again
        wait_until(
            lambda: len({*client.scan_iter(match="*/rounds/*")}) == 2 * TURNS * CONVERSATIONS
        )
