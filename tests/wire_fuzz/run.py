"""Runs attackers and the honest client against a proxy, for some cases or some time, and reports
the results."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import random
import re
import socket
import subprocess
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.systems import status
from proxy.server import runner
from tests.clock import PATIENCE
from tests.probing import Probe
from tests.serving import Proxy, spawned, tight
from tests.wire import Peer, read_message, upstream
from tests.wire_fuzz import honest, replies
from tests.wire_fuzz.attacks import CHAT, LOUD, ROUGH, Act, Case, case, chat, head, sized

MIB = 1 << 20
GROWTH = 384 * MIB
"""Most bytes by which the process may grow: bounded caches fill, and eight bombs expand to the body
limit."""
DESCRIPTORS = 40
"""How many more descriptors may be open at the end than at the start: mostly idle connections to
upstreams."""
BODY_LIMIT = 4 * MIB
DRAIN = 1.0
"""Seconds of --drain-timeout."""
SLACK = runner.GRACE + 2.0
"""Seconds beyond `DRAIN` that the process may take to end: with something that hangs, it takes all
but the last two. An idle one takes a few tenths."""
SILENCE = 60.0
"""Seconds that upstream may take to begin a reply."""
STALL = 0.1
"""Seconds above which a reply of /health counts as a stall."""
CASE_SECONDS = 8.0
"""Seconds after which an attacker abandons a connection, whatever it waits for."""
HONEST = 2
"""Number of honest clients on their own connections, and of those behind the front."""
STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
LINE = 3_000
"""Most characters shown of one log line."""
BUG = re.compile(r"Traceback|a bug, at request|Task exception was never retrieved|never awaited")


@dataclass(frozen=True)
class Plan:
    """What to run: a number of `cases`, cases for `seconds`, or just the cases `only` and those of
    the `front`."""

    seed: int
    cases: int | None = None
    seconds: float | None = None
    only: tuple[int, ...] = ()
    front: tuple[int, ...] = ()
    connections: int = 8
    strangers: bool = True
    """Whether callers with unknown keys are served (by the default policy), or refused with 401."""

    def numbers(self) -> Iterable[int]:
        if self.only or self.front:
            return self.only
        return itertools.count() if self.cases is None else range(self.cases)


@dataclass
class Figures:
    """The results of a run."""

    plan: Plan
    book: honest.Book = field(default_factory=honest.Book)
    cases: Counter[str] = field(default_factory=Counter)
    statuses: Counter[tuple[str, int]] = field(default_factory=Counter)
    """Replies by kind of case and status. Status 0 counts cases without a reply."""
    seconds: float = 0.0
    rss: list[int] = field(default_factory=list)
    """Bytes of memory at the start, at most, and at the end."""
    descriptors: list[int] = field(default_factory=list)
    """Open descriptors at the start, at most, and at the end."""
    health: list[float] = field(default_factory=list)
    stalled: float = 0.0
    """Seconds of the longest stall of this process, which plays the upstreams: a machine with too
    much to do."""
    ended: float = 0.0
    """Seconds that the process took to end after SIGTERM."""

    @property
    def violations(self) -> list[str]:
        return self.book.violations

    def lines(self) -> Iterator[str]:
        mib = [f"{size / MIB:.0f}" for size in self.rss]
        stalls = sum(took > STALL for took in self.health)
        yield f"seed {self.plan.seed}: {self.cases.total()} cases in {self.seconds:.0f} s"
        yield f"honest requests: {self.book.done.total()}, of these {self.book.shared} behind an attacker's"
        yield "  " + ", ".join(f"{kind} {count}" for kind, count in sorted(self.book.done.items()))
        yield f"violations: {self.book.faults}"
        for kind, count in sorted(self.cases.items()):
            said = sorted((told, many) for (of, told), many in self.statuses.items() if of == kind)
            yield f"  {kind:14}{count:7} cases: " + ", ".join(
                f"{told or 'none'} x {many}" for told, many in said
            )
        yield f"RSS MiB start/max/end: {'/'.join(mib)}"
        yield f"descriptors start/max/end: {'/'.join(map(str, self.descriptors))}"
        slowest = max(self.health, default=0.0)
        yield f"/health: {len(self.health)} asked, slowest {slowest:.3f} s, {stalls} above {STALL * 1000:.0f} ms"
        yield f"the fuzz itself stalled for {self.stalled:.1f} s at most; the proxy waits {SILENCE:g} s for upstream"
        yield f"SIGTERM ended it within {self.ended:.1f} s"


async def run(plan: Plan, say: Callable[[str], None] = lambda _: None) -> Figures:
    """Run the plan and return the figures. `say` gets every violation as it happens."""
    figures = Figures(plan, honest.Book(say, deque(maxlen=3 * plan.connections)))
    begun = time.monotonic()
    async with _proxy(figures) as proxy:
        client = honest.Client(proxy.port, figures.book, random.Random(plan.seed))
        await client.first()
        watch = Watch(proxy, figures)
        with Probe(proxy.port, interval=0.01) as probe:
            for number in plan.front:
                await client.ask_behind(number)
            await _attack(watch, plan)
            await client.again()
        figures.health = probe.seen.health
        for fault in probe.seen.failed:
            figures.book.fault(f"/health: {fault}")
        client.close()
        await watch.settle()
        await asyncio.to_thread(_end, proxy, figures)
        watch.look()
        watch.close()
    figures.seconds = time.monotonic() - begun
    return figures


# The server and its upstreams


def _keyed(key: str, policy: dict[str, Any]) -> dict[str, Any]:
    return {"api_keys": [{"sha256": hashlib.sha256(key.encode()).hexdigest()}], **policy}


@asynccontextmanager
async def _proxy(figures: Figures) -> AsyncIterator[Proxy]:
    """Run a proxy in front of an upstream that everybody shares and one that misbehaves."""
    seed, book = figures.plan.seed, figures.book

    async def shared(peer: Peer) -> None:
        await _replying(
            peer,
            book,
            lambda message: replies.well_behaved(_chance(seed, message.get(b"x-fuzz")), message),
        )

    async def rough(peer: Peer) -> None:
        message = await read_message(peer.reader)
        chance = _chance(seed, message.get(b"x-fuzz"))
        # Some take seconds to make, and the other upstream must reply meanwhile.
        await _say(peer, await asyncio.to_thread(replies.misbehaving, chance, message))

    async with AsyncExitStack() as held:
        good = await held.enter_async_context(upstream(shared))
        bad = await held.enter_async_context(upstream(rough))
        policy = tight(f"{good.url}/v1")
        policies = {
            "honest": _keyed(honest.KEY, policy),
            "loud": _keyed(LOUD, policy),
            "rough": _keyed(ROUGH, tight(f"{bad.url}/v1")),
        }
        if figures.plan.strangers:
            policies["default"] = policy
        flags = [
            f"--body-limit={BODY_LIMIT}",
            f"--drain-timeout={DRAIN:g}",
            f"--first-byte-timeout={SILENCE:g}",
        ]
        yield held.enter_context(spawned(policies, flags=flags))


def _chance(seed: int, numbers: list[bytes]) -> random.Random:
    return random.Random(f"{seed}/{b','.join(numbers).decode('latin-1')}/reply")


async def _replying(
    peer: Peer, book: honest.Book, reply: Callable[[Any], list[replies.Piece]]
) -> None:
    """Answer requests. A malformed one is the proxy's fault, whoever sent it."""
    while True:
        try:
            message = await read_message(peer.reader)
            framing = message.get(b"content-length") + message.get(b"transfer-encoding")
            if len(framing) > 1:
                book.fault(
                    f"a request went upstream with two lengths: {message.line!r} {framing!r}"
                )
                return
        except asyncio.LimitOverrunError:
            book.fault("a head of more than 1 MiB went upstream")
            return
        except (ValueError, IndexError) as error:
            book.fault(f"what went upstream is no request: {error!r}")
            return
        if message.get(b"authorization") == [honest.IDENTITY]:
            before = len(book.violations)
            book.arrival(message)
            said: list[replies.Piece] = (
                honest.answer(message) if len(book.violations) == before else [b""]
            )
        else:
            said = reply(message)
        await _say(peer, said)


async def _say(peer: Peer, pieces: list[replies.Piece]) -> None:
    for piece in pieces:
        if isinstance(piece, bytes):
            await peer.send(piece)
        else:
            await asyncio.sleep(piece)


# The attackers


class Watch:
    """Watches the proxy's process: its memory, descriptors and log."""

    def __init__(self, proxy: Proxy, figures: Figures) -> None:
        assert proxy.process and proxy.log_file
        self.proxy, self.figures = proxy, figures
        self._process = proxy.process
        self._log = proxy.log_file.open(encoding="utf-8", errors="replace")
        figures.rss = [self._rss()] * 3
        figures.descriptors = [self._descriptors()] * 3

    def look(self) -> bool:
        """Record anything wrong as a violation. Returns whether the process is alive."""
        for line in self._log.read().splitlines():
            if BUG.search(line):
                self.figures.book.fault(f"the log says: {line[:LINE]}")
        if self._process.poll() is not None:
            return False
        self.figures.rss[1:] = [max(self.figures.rss[1], self._rss()), self._rss()]
        self.figures.descriptors[1:] = [
            max(self.figures.descriptors[1], self._descriptors()),
            self._descriptors(),
        ]
        return True

    def close(self) -> None:
        self._log.close()

    async def watching(self) -> None:
        """Look repeatedly, until the process is dead."""
        while self.look():
            slept = time.monotonic()
            await asyncio.sleep(0.25)
            self.figures.stalled = max(self.figures.stalled, time.monotonic() - slept - 0.25)
        self.figures.book.fault(f"the process ended: {self._process.returncode}")

    async def settle(self) -> None:
        """After everybody has gone, check what the process still holds."""
        deadline = time.monotonic() + PATIENCE
        allowed = self.figures.descriptors[0] + DESCRIPTORS
        while (  # noqa: ASYNC110 - another process closes them
            self.look() and self.figures.descriptors[2] > allowed and time.monotonic() < deadline
        ):
            await asyncio.sleep(0.25)
        if self.figures.descriptors[2] > allowed:
            self.figures.book.fault(f"descriptors did not come back: {self.figures.descriptors}")
        if self.figures.rss[1] - self.figures.rss[0] > GROWTH:
            self.figures.book.fault(
                f"RSS grew by more than {GROWTH // MIB} MiB: {[size // MIB for size in self.figures.rss]}"
            )

    def _rss(self) -> int:
        return status(self._process.pid)["VmRSS"] * 1024

    def _descriptors(self) -> int:
        return len(list(Path(f"/proc/{self._process.pid}/fd").iterdir()))


async def _attack(watch: Watch, plan: Plan) -> None:
    """Run all cases and the honest clients at the same time."""
    numbers = iter(plan.numbers())
    attackers = [
        asyncio.create_task(_attacking(watch, plan, numbers)) for _ in range(plan.connections)
    ]
    beside = [
        asyncio.create_task(_asking(watch, plan.seed * HONEST + one)) for one in range(HONEST)
    ]
    beside.append(asyncio.create_task(watch.watching()))
    over = asyncio.create_task(asyncio.wait(attackers))
    await asyncio.wait([over, *beside], return_when=asyncio.FIRST_COMPLETED)
    for task in (*attackers, *beside):
        task.cancel()
    for ended in await asyncio.gather(*attackers, *beside, return_exceptions=True):
        if isinstance(ended, Exception):
            raise ended


async def _attacking(watch: Watch, plan: Plan, numbers: Iterator[int]) -> None:
    figures = watch.figures
    until = time.monotonic() + plan.seconds if plan.seconds else float("inf")
    for number in numbers:
        made = case(plan.seed, number)
        figures.book.recent.append(number)
        figures.cases[made.kind] += 1
        for told in await attacked(watch.proxy.port, made):
            figures.statuses[made.kind, told] += 1
        if time.monotonic() > until:
            return


async def _asking(watch: Watch, seed: int) -> None:
    """Ask by turns on an own connection and after an attacker on its connection, until
    cancelled."""
    chance = random.Random(seed)
    client = honest.Client(watch.proxy.port, watch.figures.book, chance)
    for number in itertools.count(seed * 1_000_000):
        await (client.ask() if number % 2 else client.ask_behind(number))
        await asyncio.sleep(chance.random() * 0.02)


async def attacked(port: int, made: Case) -> list[int]:
    """Run one case. Returns the statuses that came back, or [0] if there were none."""
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return [0]
    said = bytearray()
    reading = asyncio.create_task(_read_into(said, reader))
    try:
        async with asyncio.timeout(CASE_SECONDS):
            await _write(writer, made.steps)
            await asyncio.wait([reading], timeout=made.patience)
    except (OSError, TimeoutError):
        pass
    finally:
        reading.cancel()
        writer.transport.abort() if made.number % 3 == 0 else writer.close()
    return [int(told) for told in STATUS.findall(said)] or [0]


async def _write(writer: asyncio.StreamWriter, steps: Iterable[bytes | float | Act]) -> None:
    for step in steps:
        if isinstance(step, bytes):
            writer.write(step)
            await writer.drain()
        elif step is Act.HALF_CLOSE:
            writer.write_eof()
        elif step is Act.RESET:
            writer.transport.abort()
            return
        elif isinstance(step, float):
            await asyncio.sleep(step)


async def _read_into(said: bytearray, reader: asyncio.StreamReader) -> None:
    with suppress(OSError):
        while data := await reader.read(65536):
            said += data[:4096] if len(said) > MIB else data


# The end


def _end(proxy: Proxy, figures: Figures) -> None:
    """Send SIGTERM while clients are in the middle of a head, a body and a reply."""
    process = proxy.process
    assert process
    if process.poll() is not None:
        return
    whole = sized(0, CHAT, ROUGH, chat(random.Random(0)))
    unfinished = (
        b"POST /v1/chat",
        head(0, "POST", CHAT, LOUD, b"Content-Length: 1000") + b"{",
        whole,
    )
    with ExitStack() as left:
        for data in unfinished:
            left.enter_context(socket.create_connection(("127.0.0.1", proxy.port))).sendall(data)
        time.sleep(0.2)
        begun = time.monotonic()
        process.terminate()
        try:
            if process.wait(DRAIN + SLACK):
                figures.book.fault(f"SIGTERM ended it with {process.returncode}: something hung")
        except subprocess.TimeoutExpired:
            figures.book.fault(f"SIGTERM did not end it within {DRAIN + SLACK:g} s")
        figures.ended = time.monotonic() - begun
