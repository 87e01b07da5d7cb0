"""Asks a model for snapshots: one flight for each record, few at a time, with limits on time and calls.

A failed summary never fails a request. The first request that needs a record makes it; between two processes, the
store's *put if absent* decides. A snapshot that was paid for is stored even if the request that wanted it has ended.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import msgspec

from proxy.errors import Fault, Overloaded, UpstreamFault
from proxy.lru import Lru
from proxy.plan.forecast import cost
from proxy.requests.lines import UNUSED, Flight, Line, Lines
from proxy.requests.snapshot_writer import Failed, Snapshot, SnapshotWriter, Spent, SummaryJob
from proxy.requests.speeds import Speeds
from proxy.telemetry.outcome import DECIMALS, Basis, Kind, Outcome
from proxy.threads import WorkPool
from proxy.upstream.traffic import Idle

log = logging.getLogger(__name__)

FLIGHTS_PER_TENANT, QUEUE_PER_TENANT = 4, 64
"""The most concurrent flights of a tenant, and the most including those that wait. Each holds its conversation in
memory."""
UNSTORED_BYTES, STORE_AGAIN = 16 << 20, 60.0
"""Bytes of snapshots that are kept in memory because the store failed, and the seconds between tries to store one."""
QUIET, LONGEST_QUIET, LONGEST_QUEUE = 1.0, 30.0, 600.0
"""Seconds for which an upstream must be idle before a summary that waits for that, doubled with every request that
interrupts it, and the most; and seconds that a summary waits in all."""

Recall = Callable[[str], Awaitable[bytes | None]]
"""Takes a key; returns the record, or None."""
Keep = Callable[[str, bytes], Awaitable[bytes | None]]
"""Stores the record unless there is one; returns the stored bytes, whoever wrote them, or None if the store failed."""
Report = Callable[[SummaryJob, Spent, str, float], None]
"""Takes the job, its cost, the reason for its failure (or an empty text), and the seconds that it took."""


class _Unstored(msgspec.Struct, frozen=True):
    """A snapshot that the store failed to take, and when to try again."""

    snapshot: Snapshot
    again: float


class Summarizer:
    """All snapshots that this process is making."""

    def __init__(
        self,
        recall: Recall,
        keep: Keep,
        count: Callable[[str, str], int],
        report: Report,
        threads: WorkPool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._recall = recall
        self._keep = keep
        self._report = report
        self._writer = SnapshotWriter(count, threads)
        self.speeds = Speeds()
        self._clock = clock
        self._lines = Lines(clock)
        self._flights: dict[str, asyncio.Task[Snapshot | None]] = {}
        self._hurry: dict[Flight, asyncio.Event] = {}
        self._storing: dict[str, asyncio.Task[None]] = {}
        self._queues: Counter[str] = Counter()
        self._places: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(FLIGHTS_PER_TENANT))
        self._unstored: Lru[str, _Unstored] = Lru(UNSTORED_BYTES)

    def request(self, job: SummaryJob) -> asyncio.Task[Snapshot | None] | None:
        """Return the flight for this record, starting it if there is none yet; None if it may not start now.

        Shield it when you await it, so that the snapshot is finished even if its request is cancelled.
        """
        if self._lines.flight(job.line) or self._queues[job.tenant] >= QUEUE_PER_TENANT:
            return self._flights.get(job.key)
        return self._flights.get(job.key) or self._started(job)

    async def wait(self, job: SummaryJob) -> Snapshot | None:
        """Wait for the line's other snapshots, then for this one. Returns None if it cannot be made."""
        while job.key not in self._flights and (before := self._lines.flight(job.line)):
            self._hurry[before].set()
            await asyncio.wait([before])
        flight = self._flights.get(job.key) or self._started(job)
        if flight:
            self._hurry[flight].set()
        return await asyncio.shield(flight) if flight else None

    async def once(self, job: SummaryJob, spent: Spent) -> Snapshot:
        """Make a snapshot for a caller who waits for it and keeps it, without record, shared flight or back-off.

        Raises Failed, UpstreamFault, Overloaded and TimeoutError. `spent` then has the cost up to that point.
        """
        async with self._places[job.tenant]:
            return await self._written(job, spent)

    def answered(self, outcome: Outcome) -> None:
        """Learn from a request's outcome how fast its upstream writes."""
        upstream = outcome.namespace, outcome.model
        self.speeds.wrote(upstream, outcome.completion_tokens, outcome.seconds - outcome.added_seconds)

    def seen(self, scope: str, link: bytes) -> None:
        """Note a request whose history ends with this digest; see `Line.scope`."""
        self._lines.seen(scope, link)

    def used(self, line: Line) -> None:
        """Note that a later request used a snapshot of this line, so that the next one is worth making."""
        self._lines.used(line)

    def unstored(self, key: str) -> Snapshot | None:
        """Return the snapshot with this key if it was paid for and the store failed. From time to time, this tries to
        store it again."""
        kept = self._unstored.get(key)
        if kept is None:
            return None
        if kept.again <= self._clock() and key not in self._storing:
            task = self._storing[key] = asyncio.create_task(self._store_again(key, kept.snapshot))
            task.add_done_callback(lambda _: self._storing.pop(key))
        return kept.snapshot

    async def close(self, grace: float) -> None:
        """Wait at most `grace` seconds for flights to finish, then cancel the rest."""
        tasks = [*self._flights.values(), *self._storing.values()]
        if tasks:
            await asyncio.wait(tasks, timeout=grace)
        for task in tasks:
            task.cancel()

    def _started(self, job: SummaryJob) -> asyncio.Task[Snapshot | None] | None:
        if self._lines.paused(job.line):
            return None
        hurry = asyncio.Event()
        flight = self._flights[job.key] = asyncio.create_task(self._fly(job, hurry))
        self._hurry[flight] = hurry
        flight.add_done_callback(lambda flight: self._hurry.pop(flight))
        self._lines.started(job.line, flight)
        self._queues[job.tenant] += 1
        return flight

    async def _fly(self, job: SummaryJob, hurry: asyncio.Event) -> Snapshot | None:
        begun, spent, fault = self._clock(), Spent(), "the proxy ended"
        try:
            made = await (self._while_idle(job, job.idle, spent, hurry) if job.idle else self._made(job, spent))
            fault = ""
            return made
        except (Failed, UpstreamFault, Overloaded, TimeoutError) as error:
            fault = str(error) or "no answer in time"
            return None
        except Exception as error:  # a fault of ours in a summary must not fail the request
            fault = f"a fault of the proxy: {type(error).__name__}"
            log.exception("A summary failed because of a fault of the proxy")
            return None
        finally:
            if fault or spent.calls:
                self._report(job, spent, fault, self._clock() - begun)
            self._landed(job, fault)

    def _landed(self, job: SummaryJob, fault: str) -> None:
        del self._flights[job.key]
        self._queues[job.tenant] -= 1
        if self._lines.landed(job.line, fault):
            self._report(job, Spent(), UNUSED, 0.0)

    async def _while_idle(self, job: SummaryJob, idle: Idle, spent: Spent, hurry: asyncio.Event) -> Snapshot:
        """Make the snapshot while upstream is idle. It gives way to every request, until one waits for it or a call is
        answered, which would be paid for twice."""
        pause, until = QUIET, self._clock() + LONGEST_QUEUE
        while not hurry.is_set():
            if self._clock() > until:
                raise Failed("upstream was never idle for long enough")
            await _first(idle.quiet(pause), hurry.wait(), asyncio.sleep(LONGEST_QUEUE))
            with idle.used() as alone:
                if not alone:
                    continue
                making = asyncio.create_task(self._made(job, spent))
                try:
                    await _first(asyncio.wait([making]), idle.disturbed())
                    if making.done() or hurry.is_set() or spent.calls:
                        return await making
                finally:
                    making.cancel()
                    await asyncio.wait([making])
            pause = min(2 * pause, LONGEST_QUIET)
        return await self._made(job, spent)

    async def _made(self, job: SummaryJob, spent: Spent) -> Snapshot:
        """Return the snapshot that exists, or make and store it, in one of the tenant's places.

        If the store fails, this process keeps its own, so that it pays for no more snapshots than with a store.
        """
        async with self._places[job.tenant]:
            if known := _decoded(await self._recall(job.key)) or self.unstored(job.key):
                return known
            made = await self._written(job, spent)
            return await self._stored(job.key, made) or made

    async def _written(self, job: SummaryJob, spent: Spent) -> Snapshot:
        """Have the snapshot written, in the time that its upstream needs."""
        seconds = self.speeds.timeout(job.upstream, job.snapshot_tokens, job.timeout)
        begun = self._clock()
        try:
            async with asyncio.timeout(seconds):
                made = await self._writer.write(job, spent)
        except TimeoutError:
            self.speeds.late(job.upstream, job.snapshot_tokens, seconds)
            raise
        self.speeds.wrote(job.upstream, spent.completion_tokens, self._clock() - begun)
        return made

    async def _stored(self, key: str, made: Snapshot) -> Snapshot | None:
        """Store the snapshot. Returns the stored one, whoever made it, or None if the store failed."""
        record = msgspec.json.encode(made)
        winner = _decoded(await self._keep(key, record))
        if winner is None:
            self._unstored.put(key, _Unstored(made, self._clock() + STORE_AGAIN), len(record))
        return winner

    async def _store_again(self, key: str, made: Snapshot) -> None:
        if await self._stored(key, made):
            self._unstored.discard(key)


async def _first(*waits: Coroutine[Any, Any, object]) -> None:
    """Return when one of these has ended. The others are cancelled."""
    tasks = [asyncio.create_task(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _decoded(record: bytes | None) -> Snapshot | None:
    """Decode a record. Returns None if it is absent or damaged."""
    try:
        return msgspec.json.decode(record or b"", type=Snapshot)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def summary_outcome(job: SummaryJob, spent: Spent, fault: str, seconds: float) -> Outcome:
    """Return the outcome of making a snapshot, which is reported separately because its request may have ended."""
    return Outcome(
        request_id=job.key.rpartition("/")[2],
        tenant=job.tenant,
        namespace=job.key.partition("/")[0],
        kind=Kind.SUMMARY,
        method="POST",
        path="",
        dialect=job.dialect,
        model=job.model,
        status=502 if fault else 200,
        fault=Fault.UNUSED if fault == UNUSED else Fault.SUMMARY if fault else Fault.NONE,
        cost_after=cost(job.prices, spent.prompt_tokens, spent.cached_tokens, spent.completion_tokens),
        usage=Basis.BILLED if spent.prompt_tokens else Basis.UNKNOWN,
        summary_prompt_tokens=spent.prompt_tokens,
        summary_completion_tokens=spent.completion_tokens,
        cached_tokens=spent.cached_tokens,
        seconds=round(seconds, DECIMALS),
    )
