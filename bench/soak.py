"""Many concurrent conversations over two workers, while their Redis keeps restarting.

In every turn the model reads one whole moved result back and answers with its digest, which the
client compares with the right one. So a wrong answer and a lost original both show as a different
digest. After each half, with no requests under way, memory, descriptors and threads of the workers
are measured. The same conversations are sent repeatedly, so that the in-process caches, which
otherwise fill over hours, are full after the first half.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import itertools
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

from bench.systems import status
from tests.fake_upstream import Message, Recorded, StrictUpstream, calls, text
from tests.serving import Proxy, spawned, tight
from tests.stores.engines import Process, redis_server
from tests.tools.paging import undone

Json = dict[str, Any]

SECONDS = 120.0
CONVERSATIONS = 64
WORKERS = 2
TURNS = 6
DISTINCT = 256
"""Distinct conversations; each is repeated, as by a client that retries."""
RESTARTS_EVERY = 3.0
"""Seconds; less than the breaker's pause, so that restarts meet it in every state."""
AWAY = 0.5
"""Seconds that Redis is away each time."""
TOOL = {"type": "function", "function": {"name": "fetch", "parameters": {"type": "object"}}}
REFERENCE = re.compile(r"stored in (/context_store/\S+?)[;)]")


@dataclass
class Held:
    """The resources of all workers together, with no requests under way."""

    rss: int
    """Bytes."""
    descriptors: int
    threads: int
    in_flight: int
    cached: int
    """Bytes of in-process caches, from the metrics."""


@dataclass
class Figures:
    """The results."""

    turns: int = 0
    failed: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    restarts: int = 0
    store_errors: float = 0
    halves: list[Held] = field(default_factory=list)

    def lines(self) -> Iterator[str]:
        yield f"turns {self.turns}, failed {len(self.failed)}, wrong {len(self.wrong)}"
        yield f"Redis restarted {self.restarts} times, store operations without an answer {self.store_errors:.0f}"
        for name, held in zip(("first", "second"), self.halves, strict=True):
            yield (
                f"after the {name} half: RSS {held.rss / 2**20:.1f} MiB (caches {held.cached / 2**20:.1f} MiB), "
                f"descriptors {held.descriptors}, threads {held.threads}, requests in flight {held.in_flight}"
            )
        yield f"RSS grew by {self.growth:+.1%}"

    @property
    def growth(self) -> float:
        """The growth of the RSS over the second half, as a share."""
        return self.halves[1].rss / self.halves[0].rss - 1


def run(seconds: float) -> Figures:
    """The soak, in two halves."""
    figures = Figures()
    with TemporaryDirectory(prefix="offload-soak-") as folder, StrictUpstream() as up:
        up.respond(model)
        with redis_server(Path(folder)) as redis:
            store = f"--store=redis://127.0.0.1:{redis.port}/0"
            with spawned(
                {"default": tight(up.url)}, flags=[store, f"--workers={WORKERS}"]
            ) as proxy:
                numbers = itertools.cycle(range(DISTINCT))
                for _ in range(2):
                    with _restarting(redis, figures):
                        asyncio.run(_converse(proxy, up, figures, numbers, seconds / 2))
                    figures.halves.append(_held(proxy))
                figures.store_errors = sum(_samples(proxy, "offload_store_errors_total"))
    return figures


# The conversations


async def _converse(
    proxy: Proxy, up: StrictUpstream, figures: Figures, numbers: Iterator[int], seconds: float
) -> None:
    until = time.monotonic() + seconds
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=CONVERSATIONS)
    async with httpx.AsyncClient(
        base_url=proxy.url, limits=limits, timeout=30, trust_env=False
    ) as client:

        async def one() -> None:
            while time.monotonic() < until:
                await _conversation(client, figures, next(numbers))
                up.requests.clear()

        await asyncio.gather(*(one() for _ in range(CONVERSATIONS)))


async def _conversation(client: httpx.AsyncClient, figures: Figures, number: int) -> None:
    messages: list[Json] = [{"role": "system", "content": f"Conversation {number}."}]
    messages.append({"role": "user", "content": "Fetch the logs."})
    for turn in range(TURNS):
        for part in range(2):
            messages += _fetched(number, f"{turn}_{part}")
        messages.append({"role": "assistant", "content": "I have them."})
        wanted = f"{turn // 2}_{turn % 2}"
        messages.append({"role": "user", "content": f"Read call_{number}_{wanted}."})
        answer = await _ask(client, figures, messages, stream=bool(turn % 2))
        if answer is None:
            return
        figures.turns += 1
        if answer != _digest(_log(number, wanted)):
            figures.wrong.append(f"conversation {number}, turn {turn}: {answer[:200]}")
        messages.append({"role": "assistant", "content": answer})


def _fetched(number: int, name: str) -> list[Json]:
    identity = f"call_{number}_{name}"
    call = {
        "id": identity,
        "type": "function",
        "function": {"name": "fetch", "arguments": json.dumps({"n": name})},
    }
    return [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": identity, "content": _log(number, name)},
    ]


def _log(number: int, name: str) -> str:
    return "".join(
        f"conversation {number}, log {name}, line {line}: {line * 7919 % 104729}\n"
        for line in range(40)
    )


async def _ask(
    client: httpx.AsyncClient, figures: Figures, messages: list[Json], *, stream: bool
) -> str | None:
    body = {"model": "m", "messages": messages, "tools": [TOOL], "stream": stream}
    try:
        reply = await client.post("/chat/completions", json=body)
    except httpx.TransportError as error:
        figures.failed.append(repr(error))
        return None
    if reply.status_code != 200:
        figures.failed.append(f"{reply.status_code} {reply.text[:200]}")
        return None
    return "".join(re.findall(r'"content":\s*"(.*?)"', reply.text))


def _digest(content: str) -> str:
    return hashlib.sha256(content.encode()).hexdigest()


def model(request: Recorded) -> Message:
    """Reads the result that the last user message names, and answers with its digest."""
    last = request.messages[-1]
    if last["role"] == "tool":
        content, more = undone(last["content"])
        return text(_digest(content) if more is None else "more")
    [wanted] = re.findall(r"^Read (\S+)\.$", last["content"])
    [result] = [
        message["content"] for message in request.messages if message.get("tool_call_id") == wanted
    ]
    [path] = REFERENCE.findall(result)
    return calls(("read_file", {"path": path}))


# Restarts and measurements


@contextmanager
def _restarting(redis: Process, figures: Figures) -> Iterator[None]:
    over = threading.Event()

    def restart() -> None:
        while not over.wait(RESTARTS_EVERY):
            redis.stop()
            over.wait(AWAY)
            redis.start()
            figures.restarts += 1

    thread = threading.Thread(target=restart)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _held(proxy: Proxy) -> Held:
    """Measure, once background work has ended."""
    time.sleep(2)
    workers = _workers(proxy)
    told = [status(pid) for pid in workers]
    return Held(
        rss=sum(each["VmRSS"] for each in told) * 1024,
        descriptors=sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in workers),
        threads=sum(each["Threads"] for each in told),
        in_flight=int(sum(_samples(proxy, "offload_requests_in_flight"))),
        cached=int(sum(_samples(proxy, "offload_cache_bytes"))),
    )


def _workers(proxy: Proxy) -> list[int]:
    assert proxy.process
    pid = proxy.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [
        int(pid) for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


def _samples(proxy: Proxy, name: str) -> list[float]:
    page = httpx.get(f"{proxy.root}/metrics", timeout=10, trust_env=False).text
    return [
        float(value) for value in re.findall(rf"^{name}(?:{{.*?}})? (\S+)$", page, re.MULTILINE)
    ]


def main(options: argparse.Namespace) -> bool:
    """Print the figures. Returns whether a turn failed or was wrong."""
    figures = run(10.0 if options.smoke else SECONDS)
    print("\n".join(figures.lines()))
    for fault in (*figures.failed[:5], *figures.wrong[:5]):
        print(f"  {fault}")
    return bool(figures.failed or figures.wrong)
