"""Asks a model for snapshots: one flight a record, few at a time, bounded in time and calls. It never fails a request.

A record is made once and by whoever comes first; the store's *put if absent* decides between two. What is paid for is
stored even if the request that wanted it has gone.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

import msgspec
from msgspec import Raw

from proxy.core import rawjson, summary
from proxy.core.summary import Section, Unusable
from proxy.dialects.chat import overflow
from proxy.errors import OffloadError, Overloaded, UpstreamFault
from proxy.lru import Lru
from proxy.telemetry.outcome import Outcome
from proxy.threads import WorkPool

T = TypeVar("T")

FLIGHTS_PER_TENANT, QUEUE_PER_TENANT = 4, 64
"""Calls at a time, and with those that wait for their turn: each holds its conversation in memory."""
FIRST_BACKOFF, LONGEST_BACKOFF = 60.0, 3600.0
"""Seconds that a conversation makes no summary after its first failure, doubling up to the longest."""
UNUSED_LIMIT, UNUSED_PAUSE, UNUSED = 5, 3600.0, "snapshots of this conversation are never used; none for an hour"
"""So many snapshots in a row that nobody used mean a client that rewrites its past; then none for so long (s)."""
UNKNOWN_WINDOW = 64_000
"""Tokens of history for one call where nothing is known of the summary model's window (most have 128,000)."""
CONVERSATIONS = 10_000
"""Whose health is remembered."""


class Snapshot(msgspec.Struct, frozen=True):
    """The stored record: the text between the tags, its size, and who wrote it."""

    text: str
    tokens: int
    model: str


class SummaryAnswer(msgspec.Struct, frozen=True):
    """What came back of one call: status and body; where it was 200, the text and what upstream says it cost."""

    status: int
    body: bytes
    text: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


class SummaryJob(msgspec.Struct, frozen=True):
    """Everything that one snapshot is made from. Built by the request that plans it; lives on without it."""

    key: str
    tenant: str
    conversation: str
    """Identifies the caller and where this history began: failures back off per conversation."""
    model: str
    snapshot_tokens: int
    replaced_tokens: int
    store_dir: str
    timeout: float
    group_tokens: int
    """Most history for one call in tokens; 0: nothing is known."""
    max_calls: int
    """Whatever upstream answers: tries that fail count."""
    riding: Callable[[bytes], bytes] | None
    """The task's message → the body of a call on the cached prefix; None where another model is asked. Any thread may
    call it, as it may `history`."""
    members: dict[str, Raw]
    """What a call on originals carries besides its messages: the model, who asks."""
    history: Callable[[], list[Section]]
    """What is to be recorded, from full originals."""
    earlier: str
    """The snapshot that this one replaces; empty if none."""
    originals: str
    """The path where all of the history can be read."""
    ask: Callable[[bytes], Awaitable[SummaryAnswer]]
    """Sends one body by the request's own upstream and credentials."""


class Spent(msgspec.Struct):
    """The ledger of one snapshot, over all its calls."""

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
    """No usable snapshot; the text says why."""


class TooLong(Exception):
    """Upstream has no room for a call; `window` is what it says that it has in tokens, if it says so."""

    def __init__(self, window: int | None) -> None:
        super().__init__("upstream says that it is too long")
        self.window = window


class Calls:
    """The calls for one snapshot, counted."""

    def __init__(self, job: SummaryJob, spent: Spent) -> None:
        self.job = job
        self._left = job.max_calls
        self.fault = ""
        """Why the last answer cannot be used, for the next call to name."""
        self._spent = spent

    def left(self) -> int:
        """How many more there may be. Raises Failed where that is none."""
        if not self._left:
            raise Failed(f"no usable record within {self.job.max_calls} calls (`compress.max_calls`)")
        return self._left

    async def ask(self, body: bytes) -> SummaryAnswer:
        """Raises Failed where there are none left or upstream refuses, TooLong and UpstreamFault."""
        self._left = self.left() - 1
        answer = await self.job.ask(body)
        self._spent.add(answer)
        if overflow.is_overflow(answer.status, answer.body):
            raise TooLong(overflow.window(answer.body))
        if answer.status != 200:
            raise Failed(f"upstream answered {answer.status}")
        return answer

    def unusable(self, fault: str) -> None:
        """Take note for the next call. Raises Failed where that makes two in a row, or there is no next call."""
        if self.fault or not self._left:
            raise Failed(f"the model's answer cannot be used: {fault}")
        self.fault = fault


Recall = Callable[[str], Awaitable[bytes | None]]
"""Key → the record; None where there is none."""
Keep = Callable[[str, bytes], Awaitable[bytes | None]]
"""Put if absent → the bytes that are stored now, the winner's; None where the store failed."""
Report = Callable[[SummaryJob, Spent, str, float], None]
"""Job, what was spent, empty or why it failed, seconds."""


class Summarizer:
    """All snapshots under way in this process."""

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
        # Requests are read by the same threads: however long the histories that are summarised, one stays free.
        self._working = asyncio.Semaphore(1)
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
        """The flight for this record, started unless one is under way; None where none may be started now.

        Do not await it unshielded: the snapshot is to be finished even if its request is cancelled.
        """
        if job.conversation in self._busy or self._queues[job.tenant] >= QUEUE_PER_TENANT:
            return self._flights.get(job.key)
        return self._started(job)

    async def wait(self, job: SummaryJob) -> Snapshot | None:
        """The snapshot, once whatever else its conversation is busy with is done; None where there will be none."""
        while job.key not in self._flights and job.conversation in self._busy:
            await asyncio.wait([self._busy[job.conversation]])
        flight = self._flights.get(job.key) or self._started(job)
        return await asyncio.shield(flight) if flight else None

    async def once(self, job: SummaryJob, spent: Spent) -> Snapshot:
        """A snapshot for a caller who waits for it and keeps it: no record, no flight, no back-off.

        Raises Failed, UpstreamFault, Overloaded and TimeoutError; `spent` is what it has cost by then.
        """
        async with self._places[job.tenant], asyncio.timeout(job.timeout):
            return await self._make(job, spent)

    def used(self, conversation: str) -> None:
        """A later request shows a snapshot of this conversation: its past stands still, so the next is worth it."""
        if health := self._health.get(conversation):
            health.unused = 0

    async def close(self, grace: float) -> None:
        """Let what is paid for be stored, for at most `grace` seconds."""
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
        """Made and stored. Everybody uses the winner's bytes; with the store down its own are used for this once."""
        async with asyncio.timeout(job.timeout):
            made = await self._make(job, spent)
        return _decoded(await self._keep(job.key, msgspec.json.encode(made))) or made

    async def _make(self, job: SummaryJob, spent: Spent) -> Snapshot:
        calls = Calls(job, spent)
        limit = job.group_tokens or UNKNOWN_WINDOW
        try:
            text = await self._ride(calls, job.riding) if job.riding else await self._from_originals(calls, limit)
        except TooLong as error:  # only of riding
            text = await self._from_originals(calls, min(limit, _room(job, error.window) or limit))
        return Snapshot(
            text=text, tokens=await self._off_loop(job, lambda: self._count(text, job.model)), model=job.model
        )

    async def _ride(self, calls: Calls, riding: Callable[[bytes], bytes]) -> str:
        """One call on the prefix that upstream has cached. Raises TooLong."""
        job = calls.job

        def body() -> bytes:
            task = summary.task(job.snapshot_tokens, job.store_dir, calls.fault)
            return riding(rawjson.encode({"role": "user", "content": task}))

        while True:
            if (text := await self._asked(calls, body)) is not None:
                return text

    async def _from_originals(self, calls: Calls, limit: int) -> str:
        """As much history at a time as fits, each call updating the record so far, in as few calls as are left.

        A try that fails is one call less: what is still to be recorded is then shortened to what the others can take.
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
        """The record of one call; None: it is to be asked for once more. Raises TooLong and Failed."""
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
        """Whatever takes longer the more a conversation or a model has said."""
        async with self._working:
            return await self._threads.run(job.key.partition("/")[0] or job.tenant, work)

    def _counter(self, model: str) -> Callable[[str], int]:
        return lambda text: self._count(text, model)


def _room(job: SummaryJob, window: int | None) -> int:
    """Tokens of history for one call in such a window; 0 where it is not known."""
    return summary.shares(window, job.snapshot_tokens)[0] if window else 0


def _smaller(job: SummaryJob, limit: int, window: int | None) -> int:
    """What to try where `limit` tokens are too much: what upstream has room for, if it says so and that is less.

    Else half of a limit that was worked out, and a quarter of one that was guessed, as there are few calls.
    """
    room = _room(job, window)
    return room if 0 < room < limit else limit // (2 if job.group_tokens else 4)


def _decoded(record: bytes | None) -> Snapshot | None:
    """None for what is absent, or damaged by whoever owns the disk."""
    try:
        return msgspec.json.decode(record or b"", type=Snapshot)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def summary_outcome(job: SummaryJob, spent: Spent, fault: str, seconds: float) -> Outcome:
    """A snapshot's entry in the ledger, whose request may be long over."""
    return Outcome(
        request_id=job.key.rpartition("/")[2],
        tenant=job.tenant,
        namespace=job.key.partition("/")[0],
        kind="summary",
        method="POST",
        path="",
        model=job.model,
        status=502 if fault else 200,
        fault="unused" if fault == UNUSED else "summary" if fault else "",
        summary_prompt_tokens=spent.prompt_tokens,
        summary_completion_tokens=spent.completion_tokens,
        cached_tokens=spent.cached_tokens,
        seconds=seconds,
    )


class _Health:
    """What one conversation's summaries came to."""

    def __init__(self) -> None:
        self.failures = 0
        self.until = 0.0
        self.unused = 0
        """Snapshots in a row that no later request has shown."""

    def paused_by(self, fault: str, now: float) -> bool:
        """Take note of one more, failed if there is a `fault`; whether it was the last for nothing for a while."""
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
    content = summary.fenced(summary.originals(group), earlier, task)
    return rawjson.encode(job.members | {"messages": [{"role": "user", "content": content}]})
