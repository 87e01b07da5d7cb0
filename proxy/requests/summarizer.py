"""Asks a model for snapshots: one flight for each record, few at a time, with limits on time and calls.

A failed summary never fails a request. The first request that needs a record makes it; between two processes, the
store's *put if absent* decides. A snapshot that was paid for is stored even if the request that wanted it has ended.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

import msgspec

from proxy.core import summary
from proxy.core.summary import Section, SummaryAnswer, Unusable
from proxy.errors import Fault, OffloadError, Overloaded, UpstreamFault
from proxy.lru import Lru
from proxy.telemetry.outcome import Kind, Outcome
from proxy.threads import WorkPool

T = TypeVar("T")

FLIGHTS_PER_TENANT, QUEUE_PER_TENANT = 4, 64
"""The most concurrent flights of a tenant, and the most including those that wait. Each holds its conversation in
memory."""
FIRST_BACKOFF, LONGEST_BACKOFF = 60.0, 3600.0
"""Seconds without summaries after a conversation's first failure. Each further failure doubles them, up to the
longest."""
UNUSED_LIMIT, UNUSED_PAUSE, UNUSED = 5, 3600.0, "snapshots of this conversation are never used; none for an hour"
"""`UNUSED_LIMIT` unused snapshots in a row mean that the client rewrites its past. Then the conversation gets no
snapshots for `UNUSED_PAUSE` seconds, and `UNUSED` is the reason."""
UNKNOWN_WINDOW = 64_000
"""Tokens of history for one call if the summary model's window is unknown (most have 128,000)."""
CONVERSATIONS = 10_000
"""The number of conversations whose health is remembered."""


class Snapshot(msgspec.Struct, frozen=True):
    """The stored record: the text between the tags, its tokens, and the model that wrote it."""

    text: str
    tokens: int
    model: str


class SummaryJob(msgspec.Struct, frozen=True):
    """Everything that is needed to make one snapshot. The request that builds the job may end before the job does."""

    key: str
    tenant: str
    conversation: str
    """Identifies the caller and the beginning of the history. Failures back off per conversation."""
    model: str
    snapshot_tokens: int
    replaced_tokens: int
    store_dir: str
    timeout: float
    group_tokens: int
    """The most tokens of history for one call; 0 if unknown."""
    max_calls: int
    """The most calls, including failed ones."""
    riding: Callable[[str], bytes] | None
    """The task → the body of a call on the cached prefix; None if that is impossible, as with another model."""
    alone: Callable[[str], bytes]
    """The whole prompt, history and task → the body of a call."""
    history: Callable[[], list[Section]]
    """Returns the originals to record. Any thread may call this and the two functions above."""
    earlier: str
    """The text of the snapshot that this one replaces; empty if there is none."""
    originals: str
    """The path where the whole history can be read."""
    ask: Callable[[bytes], Awaitable[SummaryAnswer]]
    """Sends one body to the request's own upstream with its credentials."""


class Spent(msgspec.Struct):
    """The cost of all calls for one snapshot."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    calls: int = 0

    def add(self, answer: SummaryAnswer) -> None:
        self.calls += 1
        self.prompt_tokens += answer.prompt_tokens
        self.completion_tokens += answer.completion_tokens
        self.cached_tokens += answer.cached_tokens


class Failed(OffloadError):
    """There is no usable snapshot; the text gives the reason."""


class TooLong(Exception):
    """A call has too many tokens. `window` is the context window that upstream named, if it did."""

    def __init__(self, window: int | None) -> None:
        super().__init__("upstream says that it is too long")
        self.window = window


class Calls:
    """The calls for one snapshot, counted."""

    def __init__(self, job: SummaryJob, spent: Spent) -> None:
        self.job = job
        self._left = job.max_calls
        self.fault = ""
        """Why the last answer could not be used. The next call tells the model."""
        self._spent = spent

    def left(self) -> int:
        """Return how many more calls are allowed. Raises Failed if there are none."""
        if not self._left:
            raise Failed(f"no usable record within {self.job.max_calls} calls (`compress.max_calls`)")
        return self._left

    async def ask(self, body: bytes) -> SummaryAnswer:
        """Make one call. Raises UpstreamFault, TooLong, or Failed if no call is left or upstream refuses this one."""
        self._left = self.left() - 1
        answer = await self.job.ask(body)
        self._spent.add(answer)
        if answer.too_long:
            raise TooLong(answer.window)
        if answer.status != 200:
            raise Failed(f"upstream answered {answer.status}")
        return answer

    def unusable(self, fault: str) -> None:
        """Note the fault for the next call. Raises Failed if it is the second in a row or no call is left."""
        if self.fault or not self._left:
            raise Failed(f"the model's answer cannot be used: {fault}")
        self.fault = fault


Recall = Callable[[str], Awaitable[bytes | None]]
"""Takes a key; returns the record, or None."""
Keep = Callable[[str, bytes], Awaitable[bytes | None]]
"""Stores the record unless there is one; returns the stored bytes, whoever wrote them, or None if the store failed."""
Report = Callable[[SummaryJob, Spent, str, float], None]
"""Takes the job, its cost, the reason for its failure (or an empty text), and the seconds that it took."""


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
        self._count = count
        self._report = report
        self._threads = threads
        # The same threads read requests, so all summaries of a tenant together use only one of them at a time.
        self._working: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(1))
        self._clock = clock
        self._flights: dict[str, asyncio.Task[Snapshot | None]] = {}
        self._busy: dict[str, asyncio.Task[Snapshot | None]] = {}
        self._queues: Counter[str] = Counter()
        self._places: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(FLIGHTS_PER_TENANT))
        self._health: Lru[str, _Health] = Lru(CONVERSATIONS)

    @property
    def under_way(self) -> int:
        return len(self._flights)

    def request(self, job: SummaryJob) -> asyncio.Task[Snapshot | None] | None:
        """Return the flight for this record, starting it if there is none yet; None if it may not start now.

        Shield it when you await it, so that the snapshot is finished even if its request is cancelled.
        """
        if job.conversation in self._busy or self._queues[job.tenant] >= QUEUE_PER_TENANT:
            return self._flights.get(job.key)
        return self._started(job)

    async def wait(self, job: SummaryJob) -> Snapshot | None:
        """Wait for the conversation's other snapshots, then for this one. Returns None if it cannot be made."""
        while job.key not in self._flights and job.conversation in self._busy:
            await asyncio.wait([self._busy[job.conversation]])
        flight = self._flights.get(job.key) or self._started(job)
        return await asyncio.shield(flight) if flight else None

    async def once(self, job: SummaryJob, spent: Spent) -> Snapshot:
        """Make a snapshot for a caller who waits for it and keeps it, without record, shared flight or back-off.

        Raises Failed, UpstreamFault, Overloaded and TimeoutError. `spent` then has the cost up to that point.
        """
        async with self._places[job.tenant], asyncio.timeout(job.timeout):
            return await self._make(job, spent)

    def used(self, conversation: str) -> None:
        """Note that a later request used a snapshot of this conversation, so that the next one is worth making."""
        if health := self._health.get(conversation):
            health.unused = 0

    async def close(self, grace: float) -> None:
        """Wait at most `grace` seconds for flights to finish, then cancel the rest."""
        flights = list(self._flights.values())
        if flights:
            await asyncio.wait(flights, timeout=grace)
        for flight in flights:
            flight.cancel()

    def _started(self, job: SummaryJob) -> asyncio.Task[Snapshot | None] | None:
        health = self._health.get(job.conversation)
        if health and health.until > self._clock():
            return None
        flight = asyncio.create_task(self._fly(job))
        self._flights[job.key] = self._busy[job.conversation] = flight
        self._queues[job.tenant] += 1
        return flight

    async def _fly(self, job: SummaryJob) -> Snapshot | None:
        begun, spent, fault = self._clock(), Spent(), "the proxy ended"
        try:
            async with self._places[job.tenant]:
                stored = _decoded(await self._recall(job.key)) or await self._paid(job, spent)
            fault = ""
            return stored
        except (Failed, UpstreamFault, Overloaded, TimeoutError) as error:
            fault = str(error) or "no answer in time"
            return None
        finally:
            if fault or spent.calls:
                self._report(job, spent, fault, self._clock() - begun)
            self._landed(job, fault)

    def _landed(self, job: SummaryJob, fault: str) -> None:
        del self._flights[job.key], self._busy[job.conversation]
        health = self._health.get(job.conversation) or _Health()
        self._health.put(job.conversation, health)
        self._queues[job.tenant] -= 1
        if health.paused_by(fault, self._clock()):
            self._report(job, Spent(), UNUSED, 0.0)

    async def _paid(self, job: SummaryJob, spent: Spent) -> Snapshot:
        """Make and store the snapshot. Returns the stored one, which every request uses.

        If the store is down, returns this flight's own snapshot, which is used once.
        """
        async with asyncio.timeout(job.timeout):
            made = await self._make(job, spent)
        return _decoded(await self._keep(job.key, msgspec.json.encode(made))) or made

    async def _make(self, job: SummaryJob, spent: Spent) -> Snapshot:
        calls = Calls(job, spent)
        limit = job.group_tokens or UNKNOWN_WINDOW
        try:
            text = await self._ride(calls, job.riding) if job.riding else await self._from_originals(calls, limit)
        except TooLong as error:  # raised only by `_ride`
            text = await self._from_originals(calls, min(limit, _room(job, error.window) or limit))
        return Snapshot(
            text=text, tokens=await self._off_loop(job, lambda: self._count(text, job.model)), model=job.model
        )

    async def _ride(self, calls: Calls, riding: Callable[[str], bytes]) -> str:
        """Return the record from calls on the prefix that upstream has cached. Raises TooLong."""
        job = calls.job

        def body() -> bytes:
            return riding(summary.task(job.snapshot_tokens, job.store_dir, calls.fault))

        while True:
            if (text := await self._asked(calls, body)) is not None:
                return text

    async def _from_originals(self, calls: Calls, limit: int) -> str:
        """Record as much history per call as fits. Each call updates the record so far.

        A failed try costs a call. The remaining history is then shortened to fit into the remaining calls.
        """
        job, record = calls.job, calls.job.earlier
        count = self._counter(job.model)
        rest = await self._off_loop(job, job.history)
        while True:
            limit = max(limit, summary.LEAST_HISTORY)
            fit = partial(summary.fitted, rest, limit, calls.left(), count, job.originals)
            group, *behind = await self._off_loop(job, fit)
            try:
                made = await self._asked(calls, partial(_group_body, job, group, record, calls.fault))
            except TooLong as error:
                if limit <= summary.LEAST_HISTORY:
                    raise Failed(f"{limit} tokens of history are still too long for {job.model}") from error
                limit = _smaller(job, limit, error.window)
                continue
            if made is not None:
                record, rest = made, [turn for turns in behind for turn in turns]
                if not rest:
                    return record

    async def _asked(self, calls: Calls, body: Callable[[], bytes]) -> str | None:
        """Return the record from one call, or None if another call is needed. Raises TooLong and Failed."""
        job = calls.job
        answer = await calls.ask(await self._off_loop(job, body))
        accept = partial(
            summary.accept, answer.text, job.snapshot_tokens, job.replaced_tokens, self._counter(job.model)
        )
        try:
            text = await self._off_loop(job, accept)
        except Unusable as error:
            calls.unusable(str(error))
            return None
        calls.fault = ""
        return text

    async def _off_loop(self, job: SummaryJob, work: Callable[[], T]) -> T:
        """Run work in a thread, because its duration grows with the length of a conversation or a reply."""
        async with self._working[job.tenant]:
            return await self._threads.run(job.key.partition("/")[0] or job.tenant, work)

    def _counter(self, model: str) -> Callable[[str], int]:
        return lambda text: self._count(text, model)


def _room(job: SummaryJob, window: int | None) -> int:
    """Return the tokens of history for one call in this window; 0 if the window is unknown."""
    return summary.shares(window, job.snapshot_tokens)[0] if window else 0


def _smaller(job: SummaryJob, limit: int, window: int | None) -> int:
    """Return the next limit to try after `limit` tokens were too many.

    If upstream named a window, this is the room in it. Otherwise it is half of a computed limit, and only a quarter of
    a guessed one, because calls are few.
    """
    room = _room(job, window)
    return room if 0 < room < limit else limit // (2 if job.group_tokens else 4)


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
        model=job.model,
        status=502 if fault else 200,
        fault=Fault.UNUSED if fault == UNUSED else Fault.SUMMARY if fault else Fault.NONE,
        summary_prompt_tokens=spent.prompt_tokens,
        summary_completion_tokens=spent.completion_tokens,
        cached_tokens=spent.cached_tokens,
        seconds=seconds,
    )


class _Health:
    """The recent failures and unused snapshots of one conversation."""

    def __init__(self) -> None:
        self.failures = 0
        self.until = 0.0
        self.unused = 0
        """The number of consecutive snapshots that no later request has used."""

    def paused_by(self, fault: str, now: float) -> bool:
        """Count one more snapshot, failed if there is a `fault`. Returns whether too many in a row were unused."""
        if fault:
            self.failures += 1
            self.until = now + min(FIRST_BACKOFF * 2 ** min(self.failures - 1, 16), LONGEST_BACKOFF)
            return False
        self.failures = 0
        self.unused += 1
        if self.unused < UNUSED_LIMIT:
            return False
        self.until, self.unused = now + UNUSED_PAUSE, 0
        return True


def _group_body(job: SummaryJob, group: list[Section], earlier: str, fault: str) -> bytes:
    task = summary.task(job.snapshot_tokens, job.store_dir, fault)
    return job.alone(summary.fenced(summary.originals(group), earlier, task))
