"""Asks a model for snapshots: one flight a record, few at a time, bounded in time. It never fails a request.

A record is made once and by whoever comes first; the store's *put if absent* decides between two. What is paid for is
stored even if the request that wanted it has gone.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable

import msgspec
from msgspec import Raw

from proxy.core import compress, rawjson
from proxy.core.compress import Turn, Unusable
from proxy.core.overflow import is_overflow
from proxy.errors import UpstreamFault
from proxy.lru import Lru
from proxy.outcome import Outcome

FLIGHTS_PER_TENANT, QUEUE_PER_TENANT = 4, 64
"""Calls at a time, and with those that wait for their turn: each holds its conversation in memory."""
FIRST_BACKOFF, LONGEST_BACKOFF = 60.0, 3600.0
"""Seconds that a conversation makes no summary after its first failure, doubling up to the longest."""
UNUSED_LIMIT, UNUSED_PAUSE, UNUSED = 5, 3600.0, "snapshots of this conversation are never used; none for an hour"
"""So many snapshots in a row that nobody used mean a client that rewrites its past; then none for so long (s)."""
UNKNOWN_WINDOW, LEAST_WINDOW = 64_000, 500
"""Tokens of history for one call where nothing is known of the summary model's window (most have 128,000), and how few
are still worth a call when that turns out to be too much."""
CONVERSATIONS = 10_000
"""Whose health is remembered."""


class Snapshot(msgspec.Struct, frozen=True):
    """The stored record: the text between the tags, its size, and who wrote it."""

    text: str
    tokens: int
    model: str


class Answer(msgspec.Struct, frozen=True):
    """What came back of one call: status and body; where it was 200, the text and what upstream says it cost."""

    status: int
    body: bytes
    text: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0


class Job(msgspec.Struct, frozen=True):
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
    riding: Callable[[bytes], bytes] | None
    """The task's message → the body of a call on the cached prefix; None where another model is asked."""
    members: dict[str, Raw]
    """What a call on originals carries besides its messages: the model, who asks."""
    history: Callable[[], list[Turn]]
    """What is to be recorded, from full originals."""
    earlier: str
    """The snapshot that this one replaces; empty if none."""
    ask: Callable[[bytes], Awaitable[Answer]]
    """Sends one body by the request's own upstream and credentials."""


class Spent(msgspec.Struct):
    """The ledger of one snapshot, over all its calls."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    calls: int = 0

    def add(self, answer: Answer) -> None:
        self.calls += 1
        self.prompt_tokens += answer.prompt_tokens
        self.completion_tokens += answer.completion_tokens
        self.cached_tokens += answer.cached_tokens


class Failed(Exception):
    """No usable snapshot; the text says why."""


Recall = Callable[[str], Awaitable[bytes | None]]
"""Key → the record; None where there is none."""
Keep = Callable[[str, bytes], Awaitable[bytes | None]]
"""Put if absent → the bytes that are stored now, the winner's; None where the store failed."""
Report = Callable[[Job, Spent, str, float], None]
"""Job, what was spent, empty or why it failed, seconds."""


class Summarizer:
    """All snapshots under way in this process."""

    def __init__(
        self,
        recall: Recall,
        keep: Keep,
        count: Callable[[str, str], int],
        report: Report,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._recall = recall
        self._keep = keep
        self._count = count
        self._report = report
        self._clock = clock
        self._flights: dict[str, asyncio.Task[Snapshot | None]] = {}
        self._busy: dict[str, asyncio.Task[Snapshot | None]] = {}
        self._queues: Counter[str] = Counter()
        self._places: defaultdict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(FLIGHTS_PER_TENANT))
        self._health: Lru[str, _Health] = Lru(CONVERSATIONS)

    @property
    def under_way(self) -> int:
        return len(self._flights)

    def request(self, job: Job) -> asyncio.Task[Snapshot | None] | None:
        """The flight for this record, started unless one is under way; None where none may be started now.

        Do not await it unshielded: the snapshot is to be finished even if its request is cancelled.
        """
        if job.conversation in self._busy or self._queues[job.tenant] >= QUEUE_PER_TENANT:
            return self._flights.get(job.key)
        return self._started(job)

    async def wait(self, job: Job) -> Snapshot | None:
        """The snapshot, once whatever else its conversation is busy with is done; None where there will be none."""
        while job.key not in self._flights and job.conversation in self._busy:
            await asyncio.wait([self._busy[job.conversation]])
        flight = self._flights.get(job.key) or self._started(job)
        return await asyncio.shield(flight) if flight else None

    async def once(self, job: Job, spent: Spent) -> Snapshot:
        """A snapshot for a caller who waits for it and keeps it: no record, no flight, no back-off.

        Raises Failed, UpstreamFault and TimeoutError; `spent` is what it has cost by then.
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

    def _started(self, job: Job) -> asyncio.Task[Snapshot | None] | None:
        health = self._health.get(job.conversation)
        if health and health.until > self._clock():
            return None
        flight = asyncio.create_task(self._fly(job))
        self._flights[job.key] = self._busy[job.conversation] = flight
        self._queues[job.tenant] += 1
        return flight

    async def _fly(self, job: Job) -> Snapshot | None:
        begun, spent, fault = self._clock(), Spent(), "the proxy ended"
        try:
            async with self._places[job.tenant]:
                stored = _decoded(await self._recall(job.key)) or await self._paid(job, spent)
            fault = ""
            return stored
        except (Failed, UpstreamFault, TimeoutError) as error:
            fault = str(error) or "no answer in time"
            return None
        finally:
            if fault or spent.calls:
                self._report(job, spent, fault, self._clock() - begun)
            self._landed(job, fault)

    def _landed(self, job: Job, fault: str) -> None:
        del self._flights[job.key], self._busy[job.conversation]
        health = self._health.get(job.conversation) or _Health()
        self._health.put(job.conversation, health)
        self._queues[job.tenant] -= 1
        if health.paused_by(fault, self._clock()):
            self._report(job, Spent(), UNUSED, 0.0)

    async def _paid(self, job: Job, spent: Spent) -> Snapshot:
        """Made and stored. Everybody uses the winner's bytes; with the store down its own are used for this once."""
        async with asyncio.timeout(job.timeout):
            made = await self._make(job, spent)
        return _decoded(await self._keep(job.key, msgspec.json.encode(made))) or made

    async def _make(self, job: Job, spent: Spent) -> Snapshot:
        text = await self._ride(job, spent) if job.riding else None
        if text is None:
            text = await self._from_originals(job, spent)
        return Snapshot(text=text, tokens=self._count(text, job.model), model=job.model)

    async def _ride(self, job: Job, spent: Spent) -> str | None:
        """One call on the prefix that upstream has cached. None: that is too long for the model's window."""
        riding = job.riding
        assert riding is not None

        def body(fault: str) -> bytes:
            task = compress.task(job.snapshot_tokens, job.store_dir, fault)
            return riding(rawjson.encode({"role": "user", "content": task}))

        return await self._asked(job, spent, body)

    async def _from_originals(self, job: Job, spent: Spent) -> str:
        """As much history at a time as fits, each call updating the snapshot so far. What does not fit is halved."""
        limit, text = job.group_tokens or UNKNOWN_WINDOW, job.earlier
        groups = deque([await asyncio.to_thread(job.history)])
        while groups:
            group, *behind = await asyncio.to_thread(compress.chunks, groups.popleft(), limit, self._counter(job.model))
            groups.extendleft(reversed(behind))
            made = await self._asked(job, spent, _group_body(job, group, text))
            if made is not None:
                text = made
                continue
            limit //= 2
            if limit < LEAST_WINDOW:
                raise Failed(f"{limit} tokens of history are still too long for {job.model}")
            groups.appendleft(group)
        return text

    async def _asked(self, job: Job, spent: Spent, body: Callable[[str], bytes]) -> str | None:
        """Ask, and once more with the fault named. None: upstream says that it is too long."""
        fault = ""
        for _ in range(2):
            answer = await job.ask(body(fault))
            spent.add(answer)
            if is_overflow(answer.status, answer.body):
                return None
            if answer.status != 200:
                raise Failed(f"upstream answered {answer.status}")
            try:
                return compress.accept(answer.text, job.snapshot_tokens, job.replaced_tokens, self._counter(job.model))
            except Unusable as error:
                fault = str(error)
        raise Failed(f"the model's answer cannot be used: {fault}")

    def _counter(self, model: str) -> Callable[[str], int]:
        return lambda text: self._count(text, model)


def _decoded(record: bytes | None) -> Snapshot | None:
    """None for what is absent, or damaged by whoever owns the disk."""
    try:
        return msgspec.json.decode(record or b"", type=Snapshot)
    except msgspec.MsgspecError:
        return None


def summary_outcome(job: Job, spent: Spent, fault: str, seconds: float) -> Outcome:
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


def _group_body(job: Job, group: list[Turn], earlier: str) -> Callable[[str], bytes]:
    history = compress.originals(group)

    def body(fault: str) -> bytes:
        content = compress.fenced(history, earlier, compress.task(job.snapshot_tokens, job.store_dir, fault))
        return rawjson.encode(job.members | {"messages": [{"role": "user", "content": content}]})

    return body
