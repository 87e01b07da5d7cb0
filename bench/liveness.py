"""Whether one caller can stop the others.

Each attack is made on a proxy of its own (a process, two tenants, an upstream that is a process as
well). While its requests are under way, a third process asks for /health and for a tiny chat of
another tenant every 5 ms, and every 50 ms for one of 20 KB, which has to be read in a thread, each
on a connection of its own. A row is an attack: what it was answered, the 99th percentile of each
latency, and the CPU time and the peak memory of the server. A request that waits hides those that
would have been asked meanwhile, so each latency counts as all of those too (HdrHistogram's
correction of coordinated omission). The row "nothing" is the baseline. An attack that is not over
after `LIMIT` is stopped.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import hashlib
import json
import os
import subprocess
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import brotli  # type: ignore[import-untyped]
import zstandard

from bench.misbehaving import CODINGS
from bench.systems import MIB, clock, status, tree
from tests.probing import READ_INTERVAL, Probe, Seen
from tests.serving import Proxy, spawned
from tests.wire import read_message

LIMIT = 12.0
"""Seconds."""
HEALTH = 0.1
CHAT = 0.25
"""Seconds: the bounds for the 99th percentile of /health and of another tenant's small chat."""
INTERVAL = 0.005
LEAST = 1.0
"""Seconds that are watched at least, however soon an attack is over."""
ATTACKER = "attacker-key"
VICTIM = "victim-key"
STRANGER = "a-strangers-key"
WRONG = "wrong-key"

Request = Iterable[bytes]
"""What is written to one connection, piece by piece."""


@dataclass(frozen=True)
class Attack:
    """Requests that go out at once, each on a connection of its own, and are waited for."""

    name: str
    requests: Callable[[], Sequence[Request]]
    turns: int = 1
    """How often, one after the other."""
    hold: float = 0.0
    """Seconds that unfinished requests are left as they are; 0: replies are waited for."""
    strangers: bool = True
    """Whether callers with unknown keys are served."""
    victim: str = VICTIM
    prepare: Callable[[Proxy], None] = lambda proxy: None
    model: str = ""
    """The reply of `misbehaving` that it provokes."""


# Bodies


def post(target: str, body: bytes, key: str, *fields: str) -> Request:
    lines = [
        f"POST {target} HTTP/1.1",
        "Host: 127.0.0.1",
        f"Authorization: Bearer {key}",
        f"Content-Length: {len(body)}",
    ]
    head = "\r\n".join([*lines, "Content-Type: application/json", *fields, "", ""]).encode()
    return [head, body]


def chat(body: bytes, *fields: str, key: str = ATTACKER) -> list[Request]:
    return [post("/v1/chat/completions", body, key, *fields)]


def with_messages(messages: bytes, model: str = "m") -> bytes:
    return b'{"model":"%b","messages":[%b]}' % (model.encode(), messages)


def one_message(size: int, text: str = "x") -> bytes:
    return with_messages(b'{"role":"user","content":"%b"}' % (text.encode() * size))


def history(results: Sequence[str], model: str = "m", **members: Any) -> bytes:
    """An agent's: a call and its result, then a user who goes on."""
    messages: list[Any] = [{"role": "user", "content": "Fetch the logs."}]
    for number, result in enumerate(results):
        call = {
            "id": f"call_{number}",
            "type": "function",
            "function": {"name": "fetch", "arguments": "{}"},
        }
        messages += [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": result},
        ]
    messages += [
        {"role": "assistant", "content": "I have them."},
        {"role": "user", "content": "And now?"},
    ]
    tool = {"type": "function", "function": {"name": "fetch", "parameters": {"type": "object"}}}
    return json.dumps({"model": model, "messages": messages, "tools": [tool], **members}).encode()


def lines(size: int) -> str:
    """Text of about so many characters, no two lines alike."""
    return "".join(
        f"line {number}: the monument is number {number * 7919 % 104729}\n"
        for number in range(size // 44)
    )


def conversation(size: int, model: str) -> bytes:
    """Nothing that could be moved, only summarised."""
    turns = [
        {"role": ("user", "assistant")[n % 2], "content": f"{n} {lines(2_000)}"}
        for n in range(size // 2_000)
    ]
    return json.dumps(
        {"model": model, "messages": [*turns, {"role": "user", "content": "And now?"}]}
    ).encode()


def unfinished(number: int, size: int) -> Iterator[bytes]:
    """A body of which one byte is missing; no two keys alike."""
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer junk-{number}\r\n"
    yield f"{head}Content-Length: {size + 1}\r\n\r\n".encode()
    for _ in range(size >> 20):
        yield b" " * MIB
    yield b" " * (size & (MIB - 1))


def headers(count: int, size: int) -> Iterator[bytes]:
    yield b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    for start in range(0, count, 1_000):
        yield b"".join(
            b"X-%d: %b\r\n" % (n, b"y" * size) for n in range(start, min(start + 1_000, count))
        )
    yield b"\r\n"


# Stores


def _stored(proxy: Proxy) -> None:
    """60,000 files: one through the front door, the others as links to its record."""
    limits = {"max_total_tokens": 0, "max_tool_message_tokens": 0, "keep_recent_count": 0}
    body = json.dumps(
        {"messages": json.loads(history([lines(400)]))["messages"], "store_dir": "/s", **limits}
    ).encode()
    asyncio.run(_sent(proxy.port, [post("/context_compact", body, ATTACKER)], 30))
    [record] = [path for path in proxy.stored() if path.parent.name == "files"]
    for number in range(60_000):
        os.link(record, record.with_name(f"_s.-{number}..txt"))


# The table


COMPRESSED = {
    "empty gzip members, 1.2 MB": ("gzip", lambda: gzip.compress(b"") * 60_000),
    "stored deflate, 60 MiB": ("deflate", lambda: zlib.compress(one_message(60 * MIB), 0)),
    "gzip bomb, 60 MiB": ("gzip", lambda: gzip.compress(one_message(60 * MIB))),
    "br bomb, 60 MiB": ("br", lambda: brotli.compress(one_message(60 * MIB), quality=1)),
    "zstd bomb, 60 MiB": ("zstd", lambda: zstandard.compress(one_message(60 * MIB))),
}
BIG = 400_000
"""Characters of the histories with which a reply attacks."""
REPLYING = {
    "12 greps of 9 nested runs in one reply": (
        "grep",
        lambda: history([lines(2 * MIB)] * 4, "grep"),
    ),
    "grep of x* in one line of 15 MB": (
        "grep-empty",
        lambda: history([" " * 15_000_000], "grep-empty"),
    ),
    "16 reads of a 20 MB result in one reply": (
        "read",
        lambda: history([lines(20_000_000)], "read"),
    ),
    "tool call in 16,000 pieces with its name": (
        "pieces",
        lambda: history([lines(BIG)], "pieces", stream=True),
    ),
    "the same without an index": (
        "pieces-loose",
        lambda: history([lines(BIG)], "pieces-loose", stream=True),
    ),
    "summary: <think> 8,000 times": ("summary-think", lambda: conversation(BIG, "summary-think")),
    "summary: <state_snapshot> 20,000 times": (
        "summary-snapshots",
        lambda: conversation(BIG, "summary-snapshots"),
    ),
    "summary: 200,000 <": ("summary-angles", lambda: conversation(BIG, "summary-angles")),
    "summary in a window of 8,192": ("summary", lambda: conversation(BIG, "summary")),
}


def _replied(model: str, *, stream: bool) -> Callable[[], Sequence[Request]]:
    return lambda: chat(history([lines(BIG)], model, stream=stream))


ATTACKS: tuple[Attack, ...] = (
    Attack("nothing", list),
    *(
        Attack(name, lambda how=how: chat(how[1](), f"Content-Encoding: {how[0]}", key=STRANGER))  # type: ignore[misc]
        for name, how in COMPRESSED.items()
    ),
    *(
        Attack(
            f"reply: {name}{way}",
            _replied(f"reply-{name}{way}", stream=bool(way)),
            model=f"reply-{name}{way}",
        )
        for name in CODINGS
        for way in ("", "-streamed")
    ),
    Attack(
        "8 x 2 MB to /context_offload, wrong key",
        lambda: (
            [
                post(
                    "/context_offload",
                    gzip.compress(b"") * 100_000,
                    WRONG,
                    "Content-Encoding: gzip",
                )
            ]
            * 8
        ),
        strangers=False,
    ),
    Attack(
        "256 unfinished bodies, junk keys",
        lambda: [unfinished(n, 10) for n in range(256)],
        hold=8,
        victim=STRANGER,
    ),
    Attack(
        "20 unfinished bodies of 30 MB",
        lambda: [unfinished(n, 30_000_000) for n in range(20)],
        hold=8,
    ),
    Attack("200 MB of headers", lambda: [headers(200_000, 990)]),
    Attack("100,000 header fields", lambda: [headers(100_000, 1)]),
    Attack("15 MB of empty messages", lambda: chat(with_messages(b",".join([b"{}"] * 5_000_000)))),
    Attack(
        "32 MB, 1,000,000 messages",
        lambda: chat(with_messages(b",".join([b'{"role":"user","content":"a"}'] * 1_000_000))),
    ),
    Attack(
        "26 MB, 500,000 tools",
        lambda: chat(
            b'{"model":"m","messages":[{"role":"user","content":"a"}],"tools":[%b]}'
            % b",".join([b'{"type":"function","function":{"name":"fetch"}}'] * 500_000)
        ),
    ),
    Attack(
        "40 MB with a lone surrogate, 5 turns",
        lambda: chat(with_messages(b'{"role":"user","content":"\\ud800%b"}' % (b"x" * 40_000_000))),
        turns=5,
    ),
    Attack(
        "64 MB, 90,000 messages, offloaded",
        lambda: chat(
            with_messages(
                b",".join(
                    b'{"role":"user","content":"%d %b"}' % (n, b"word " * 133)
                    for n in range(90_000)
                )
            )
        ),
    ),
    Attack(
        "10 MB of nesting",
        lambda: chat(with_messages(b'{"role":"user","content":' + b"[" * 10_000_000)),
    ),
    Attack(
        "2,000,000 nested objects in a tool",
        lambda: chat(
            b'{"model":"m","messages":[],"tools":'
            + b'[{"a":' * 1_000_000
            + b"1"
            + b"}]" * 1_000_000
            + b"}"
        ),
    ),
    Attack("one string of 60 MB", lambda: chat(one_message(60_000_000))),
    Attack("one string of 60 MB, all escapes", lambda: chat(one_message(10_000_000, "\\u00e9"))),
    Attack(
        "2 strings of 30 MB at once, two callers",
        lambda: [chat(one_message(30_000_000), key=key)[0] for key in (ATTACKER, STRANGER)],
    ),
    Attack(
        "60 MB of numbers",
        lambda: chat(with_messages(b'{"role":"user","content":[%b1]}' % (b"1," * 30_000_000))),
    ),
    Attack("a result of 5 MB of =", lambda: chat(history(["=" * 5_000_000]))),
    *(
        Attack(name, lambda how=how: chat(how[1]()), model=how[0])  # type: ignore[misc]
        for name, how in REPLYING.items()
    ),
    Attack(
        "/grep over 60,000 files",
        lambda: [post("/grep", b'{"pattern": "nowhere to be found", "path": "/s"}', ATTACKER)],
        prepare=_stored,
    ),
)


# The measurement


@dataclass
class Row:
    """What one attack came to. Times are seconds."""

    name: str
    seconds: float = 0.0
    statuses: Counter[str] = field(default_factory=Counter)
    seen: Seen = field(default_factory=Seen)
    cpu: float = 0.0
    peak: int = 0
    """Bytes of RSS of the server and its children, the highest of each."""

    @property
    def holds(self) -> bool:
        slow = [percentile(values, 99) for values in self.latencies]
        return not self.seen.failed and slow[0] <= HEALTH and max(slow[1:]) <= CHAT

    @property
    def latencies(self) -> list[list[float]]:
        """Of /health, the tiny chat and the one that needs a thread, corrected."""
        seen = self.seen
        return [corrected(seen.health), corrected(seen.chat), corrected(seen.read, READ_INTERVAL)]

    def cells(self) -> list[str]:
        answered = ", ".join(
            f"{told} x {many}" if many > 1 else told for told, many in sorted(self.statuses.items())
        )
        verdict = "yes" if self.holds else "**no**"
        failed = f" ({len(self.seen.failed)} failed)" if self.seen.failed else ""
        health, chat, read = (f"{percentile(values, 99) * 1000:.0f}" for values in self.latencies)
        return [
            self.name,
            answered or "-",
            health,
            f"{chat}, {read}",
            f"{self.cpu:.1f}",
            f"{self.peak / MIB:.0f}",
            verdict + failed,
        ]


def corrected(took: Sequence[float], interval: float = INTERVAL) -> list[float]:
    """With the requests that would have been asked while one was waited for."""
    return [
        took_now - late * interval
        for took_now in took
        for late in range(int(took_now / interval) + 1)
    ]


def percentile(values: Sequence[float], percent: int) -> float:
    return sorted(values)[len(values) * percent // 100] if values else 0.0


COLUMNS = (
    "attack",
    "answered",
    "`/health` p99 ms",
    "chat p99 ms, tiny and 20 KB",
    "CPU s",
    "peak MiB",
    "holds",
)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def measured(attack: Attack, limit: float) -> Row:
    """One attack on a proxy of its own, given up after `limit` seconds."""
    row = Row(attack.name)
    with (
        _upstream(attack.model) as base,
        spawned(_policies(base, strangers=attack.strangers)) as proxy,
    ):
        assert proxy.process
        attack.prepare(proxy)
        # brings the vocabulary in
        asyncio.run(_sent(proxy.port, chat(history([lines(20_000)]), key=VICTIM), limit))
        turns = [attack.requests() for _ in range(attack.turns)]
        before = cpu(proxy.process.pid)
        begun = time.monotonic()
        with Probe(proxy.port, attack.victim, INTERVAL) as probe:
            for requests in turns:
                left = max(limit - (time.monotonic() - begun), 0.1)
                row.statuses += asyncio.run(_sent(proxy.port, requests, left, attack.hold))
            row.seconds = time.monotonic() - begun
            time.sleep(max(LEAST - row.seconds, 0))
        row.seen = probe.seen
        row.cpu = cpu(proxy.process.pid) - before
        row.peak = sum(status(pid)["VmHWM"] * 1024 for pid in tree(proxy.process.pid))
    return row


def _policies(base: str, *, strangers: bool) -> dict[str, Any]:
    """The attacker's, whose results move early; the victim's, and the one for strangers."""
    upstream = {"base_url": base}
    early = {"mode": "compact", "max_total_tokens": 300, "max_tool_message_tokens": 50}
    summarised = {"mode": "compress", "compress": {"wait": "always"}}
    rules: list[Any] = [
        {"model": "summary", "offload": summarised, "upstream": {"context_window": 8_192}},
        {"model": "summary-*", "offload": summarised},
    ]
    offload = {**early, "cached_read": 1.0, "cache_write": 1.0}
    made: dict[str, Any] = {
        "attacker": {
            "api_keys": [_key(ATTACKER)],
            "upstream": upstream,
            "offload": offload,
            "rules": rules,
        },
        "victim": {"api_keys": [_key(VICTIM)], "upstream": upstream},
    }
    return {**made, "default": {"upstream": upstream}} if strangers else made


def _key(key: str) -> dict[str, str]:
    return {"sha256": hashlib.sha256(key.encode()).hexdigest()}


@contextmanager
def _upstream(model: str) -> Iterator[str]:
    """`misbehaving` as a child: its base URL, once the reply is made."""
    command = [sys.executable, "-m", "bench.misbehaving", *([model] if model else [])]
    root = Path(__file__).parents[1]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=root
    ) as process:
        assert process.stdin and process.stdout
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}/v1"
        finally:
            process.stdin.close()


async def _sent(
    port: int, requests: Sequence[Request], limit: float, hold: float = 0.0
) -> Counter[str]:
    """All at once; what each was answered."""
    return Counter(
        await asyncio.gather(*(_one(port, request, limit, hold) for request in requests))
    )


async def _one(port: int, request: Request, limit: float, hold: float) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=MIB)
    try:
        async with asyncio.timeout(hold or limit):
            reading = asyncio.create_task(read_message(reader))
            # given up, nobody asks
            reading.add_done_callback(lambda done: done.cancelled() or done.exception())
            with suppress(OSError):
                for piece in request:
                    writer.write(piece)
                    await writer.drain()
            return str((await reading).status)
    except TimeoutError:
        return "held" if hold else "cut"
    except (OSError, asyncio.IncompleteReadError):
        return "closed"
    finally:
        writer.transport.abort()


def cpu(pid: int) -> float:
    """Seconds of processor time, of the process and its descendants."""
    return sum(map(clock, tree(pid)))


def main(options: argparse.Namespace) -> bool:
    """Print a row for each attack. Returns whether one misses the bounds, if that is checked."""
    only = ["100,000 header"] if options.smoke else options.only
    chosen = [
        one
        for one in ATTACKS
        if not only or one.name == "nothing" or any(word in one.name for word in only)
    ]
    print(
        f"bounds at p99: /health {HEALTH * 1000:.0f} ms, another tenant's chat {CHAT * 1000:.0f} ms"
    )
    print(_line(COLUMNS), _line(["---"] * len(COLUMNS)), sep="\n", flush=True)
    missed = []
    for attack in chosen:
        row = measured(attack, LIMIT)
        print(_line(row.cells()), flush=True)
        if not row.holds:
            missed.append(row.name)
    print(f"missed: {', '.join(missed) or 'none'}")
    return bool(options.check and missed)
