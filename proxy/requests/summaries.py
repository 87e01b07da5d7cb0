"""A request's snapshots: finds those that exist, and has a missing one made.

    no record ──> a task for it ──made──> stored; every later request shows it
                       └─────────failed──> its conversation pauses, and the request goes without

There is one task for a record, and one at a time for a conversation. A request waits for it only if
the policy says so or if it does not fit the window otherwise. A snapshot that was paid for is
stored even if the request that wanted it has ended. Between two processes, the store's *put if
absent* decides. Whatever fails here, the request does not.

A record is stored after upstream has answered its call, and so accepted the request's credentials.
Until upstream has accepted a request, only tasks of its own key serve it. Such a task always makes
the call.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from functools import partial

import msgspec

from proxy.dialects import render
from proxy.dialects.render import ActiveSnapshot
from proxy.errors import Overloaded, UpstreamFault
from proxy.lru import Lru
from proxy.plan.history import beginning
from proxy.plan.plan import Role, SummaryBoundary, live, moved_pieces
from proxy.plan.summary import SummaryAnswer, longest_reply
from proxy.policies.tenants import Tenant
from proxy.policy import Inject, Wait
from proxy.requests.cache import MessageCache
from proxy.requests.outcomes import of_summary
from proxy.requests.planned import Planned, Rendered, our_definitions, sent_rounds
from proxy.requests.records import KINDS, Records
from proxy.requests.summary_writer import Failed, Snapshot, Spent, SummaryJob, write
from proxy.stores.guarded import Guarded
from proxy.telemetry import logs
from proxy.telemetry.outcome import Outcome
from proxy.threads import WorkPool, nobody_waits

log = logging.getLogger(__name__)

TASKS_PER_TENANT = 4
QUEUE_PER_TENANT = 64
"""The most concurrent tasks of a tenant, and the most including those that wait. Each holds its
conversation in memory."""

FIRST_PAUSE = 60.0
LONGEST_PAUSE = 3600.0
"""Seconds without summaries after a conversation's first failure. Each further failure doubles
them."""

UNUSED_LIMIT = 20
UNUSED_PAUSE = 3600.0
"""A client that rewrites its past needs a new snapshot for every request, and never uses one twice.
After so many unused ones in a row it gets none for so many seconds."""

REMEMBERED = 10_000
"""Conversations of which it is remembered how their summaries fared. Those that begin alike count
as one."""

STORE_SECONDS = 10.0
"""Seconds that storing a snapshot may take. A model was paid for it, and no request waits for
it."""

LONGEST_WAIT = 120.0
"""Seconds that a request waits for its snapshot, and then goes without. Clients give up a request
after minutes, and a later request shows the snapshot."""

Ask = Callable[[bytes], Awaitable[SummaryAnswer]]
SnapshotTask = asyncio.Task[Snapshot | None]


class _Fared(msgspec.Struct):
    """How a conversation's summaries fared: failures, and unused ones, in a row; and until when
    none is made."""

    failures: int = 0
    unused: int = 0
    until: float = 0.0


class Summaries:
    """All snapshots that this process finds and makes. `sink` gets the outcome of each one that was
    paid for."""

    def __init__(
        self,
        store: Guarded,
        reader: MessageCache,
        threads: WorkPool,
        sink: Callable[[Outcome], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._reader = reader
        self._write = partial(write, count=reader.count, threads=threads)
        self._sink = sink
        self._clock = clock
        self._tasks: dict[tuple[str, str], SnapshotTask] = {}
        """By who asks, and the key of the record."""
        self._queued: Counter[str] = Counter()
        self._places: defaultdict[str, asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(TASKS_PER_TENANT)
        )
        self._fared: Lru[str, _Fared] = Lru(REMEMBERED)

    # -- for a request --

    async def existing(self, planned: Planned, records: Records) -> ActiveSnapshot | None:
        """Return the snapshot of the latest boundary that has a record, or None."""
        boundaries = planned.plan.boundaries
        names = [planned.snapshot_name(boundary) for boundary in boundaries]
        found = await records.read(Snapshot, names) if names else []
        for boundary, snapshot in reversed(list(zip(boundaries, found, strict=True))):
            if snapshot is not None:
                if fared := self._fared.get(_begins(planned, records.namespace)):
                    fared.unused = 0
                return _shown(planned, boundary, snapshot)
        return None

    def waits(self, rendered: Rendered) -> bool:
        """Whether the request waits for a snapshot that is missing."""
        compress = rendered.planned.policy.offload.compress
        room = rendered.planned.room
        return compress.wait is Wait.ALWAYS or not room.holds(rendered.tokens)

    async def complete(
        self, rendered: Rendered, records: Records, tenant: Tenant, ask: Ask, *, waits: bool
    ) -> Rendered:
        """Return the request with the snapshot that its plan needs, if it waits for it.

        If it waits and gets none, it shows everything that its event moves at once.
        """
        planned = rendered.planned
        boundary = planned.plan.boundaries[-1] if planned.plan.boundaries else None
        if boundary is None or (rendered.shown and rendered.shown.boundary == boundary):
            return rendered
        snapshot = None
        try:
            async with asyncio.timeout(LONGEST_WAIT):
                task = await self._task_for(rendered, boundary, records, tenant, ask, waits=waits)
                if task is not None and waits:
                    snapshot = await asyncio.shield(task)
        except (Overloaded, TimeoutError):
            pass
        except Exception:
            log.exception("A summary failed because of a fault of the proxy")
        if not waits:
            return rendered
        if snapshot is None:
            return Rendered.of(planned, rendered.shown, rendered.found, self._reader, planned.plan)
        return Rendered.of(
            planned, _shown(planned, boundary, snapshot), rendered.found, self._reader
        )

    async def once(self, job: SummaryJob, spent: Spent) -> Snapshot:
        """Make a snapshot for a caller who waits for it and keeps it, without record, shared task
        or pause.

        Raises Failed, UpstreamFault, Overloaded and TimeoutError. `spent` then has the cost up to
        that point.
        """
        async with self._places[job.tenant.name]:
            return await self._write(job, spent)

    async def close(self, grace: float) -> None:
        """Wait at most `grace` seconds for tasks to finish, then cancel the rest."""
        tasks = list(self._tasks.values())
        if tasks:
            await asyncio.wait(tasks, timeout=grace)
        for task in tasks:
            task.cancel()

    # -- tasks --

    async def _task_for(
        self,
        rendered: Rendered,
        boundary: SummaryBoundary,
        records: Records,
        tenant: Tenant,
        ask: Ask,
        *,
        waits: bool,
    ) -> SnapshotTask | None:
        """Return the task for this boundary's record, which is started if it may. If the request
        `waits`, one for an earlier boundary of the conversation is waited for first."""
        planned = rendered.planned
        caller = tenant.namespace
        *earlier, key = (
            (caller, records.key(KINDS[Snapshot], planned.snapshot_name(one)))
            for one in planned.plan.boundaries
        )
        while key not in self._tasks and (before := self._tasks.keys() & set(earlier)):
            if not waits:
                return None
            await asyncio.wait([self._tasks[one] for one in before])
        begins = _begins(planned, caller)
        fared = self._fared.get(begins) or _Fared()
        pauses = fared.until > self._clock() or self._queued[tenant.name] >= QUEUE_PER_TENANT
        if key not in self._tasks and not pauses:
            make = partial(job_for, rendered, boundary, self._reader, tenant, ask)
            job = await self._reader.pool.run(caller, make, planned.request.size)
            if key not in self._tasks:
                self._queued[tenant.name] += 1
                with nullcontext() if waits else nobody_waits():
                    self._tasks[key] = asyncio.create_task(
                        self._make(job, key, records.namespace, begins)
                    )
        return self._tasks.get(key)

    async def _make(
        self, job: SummaryJob, key: tuple[str, str], namespace: str, begins: str
    ) -> Snapshot | None:
        """Return the snapshot that exists in this namespace, or make and store it, in one of the
        tenant's places."""
        began = self._clock()
        spent = Spent()
        fault = "the proxy ended"
        try:
            async with self._places[job.tenant.name]:
                snapshot = None
                if namespace == job.tenant.namespace:
                    [snapshot] = await Records(self._store.visit(), namespace).read(
                        Snapshot, [job.name]
                    )
                if snapshot is None:
                    made = await self._write(job, spent)
                    snapshot = await Records(
                        self._store.visit(STORE_SECONDS), namespace
                    ).keep_snapshot(job.name, made)
            fault = ""
            return snapshot
        except (Failed, UpstreamFault, Overloaded, TimeoutError) as error:
            fault = str(error) or "no answer in time"
        except Exception as error:
            fault = f"a fault of the proxy: {type(error).__name__}"
            log.exception("A summary failed because of a fault of the proxy")
        finally:
            del self._tasks[key]
            self._queued[job.tenant.name] -= 1
            self._note(job, begins, fault)
            # it is billed separately from the requests that it saves tokens for
            if fault or spent.calls:
                self._sink(of_summary(job, spent, fault, self._clock() - began))
        return None

    def _note(self, job: SummaryJob, begins: str, fault: str) -> None:
        """Remember how a task fared."""
        fared = self._fared.get(begins) or _Fared()
        if fault:
            fared.failures += 1
            fared.until = self._clock() + min(
                FIRST_PAUSE * 2 ** min(fared.failures - 1, 16), LONGEST_PAUSE
            )
        else:
            fared.failures = 0
            fared.unused += 1
        if fared.unused >= UNUSED_LIMIT:
            fault = f"none of {fared.unused} snapshots of conversations that begin alike was used; none for an hour"
            fared.unused = 0
            fared.until = self._clock() + UNUSED_PAUSE
        self._fared.put(begins, fared)
        if fault:
            model = job.model[: logs.LONGEST]
            logs.event(
                log,
                "no summary",
                logging.WARNING,
                tenant=job.tenant.name,
                model=model,
                reason=fault,
            )


# -- the job ---------------------------------------------------------------------------------------


def job_for(
    rendered: Rendered, boundary: SummaryBoundary, reader: MessageCache, tenant: Tenant, ask: Ask
) -> SummaryJob:
    """Build the job, for which the whole history is looked at."""
    planned = rendered.planned
    shown = rendered.shown
    dialect = planned.dialect
    transcript = planned.transcript
    offload = planned.policy.offload
    before, replaced = _measured(planned, boundary, shown)
    size = offload.compress.snapshot_tokens
    left = planned.reply_left(before)
    last = transcript.messages[boundary.end - 1]
    paused = last.role is Role.ASSISTANT and last.sealed  # upstream's own tool may still run in it
    same = planned.summary_model == planned.request.model
    rides = same and not paused and (left is None or left >= 2 * size)
    most = longest_reply(size) if left is None else min(left, longest_reply(size))
    riding = partial(summary_on_prefix, rendered, boundary, reader, most)
    several = len(planned.plan.boundaries) > 1
    store_dir = offload.store_dir

    def references() -> dict[str, str]:
        """Return what each moved result is that the snapshot replaces, by path, the newest
        first."""
        moves = planned.plan.moves
        return {
            f"{store_dir}/{piece.name}": piece.label.about
            for index in reversed(render.replaced(transcript, boundary))
            if index in moves
            for piece in moved_pieces(transcript.messages[index], moves[index].event == 0)
        }

    return SummaryJob(
        tenant=tenant,
        name=planned.snapshot_name(boundary),
        model=planned.summary_model,
        dialect=dialect.name,
        replaced_tokens=replaced,
        window=planned.room.window,
        riding=riding if rides else None,
        alone=partial(
            dialect.summary_request, model=planned.summary_model, request=planned.request
        ),
        history=lambda: render.originals(
            dialect, transcript, boundary, shown.boundary if shown else None
        ),
        earlier=shown.text if shown else "",
        originals=f"{store_dir}/" if several else planned.originals_path(boundary),
        replaced=lambda: reader.mentions(
            dialect, transcript, render.replaced(transcript, boundary), tenant.namespace
        ),
        references=references,
        ask=ask,
    )


def summary_on_prefix(
    rendered: Rendered, boundary: SummaryBoundary, reader: MessageCache, most: int, task: str
) -> bytes:
    """Return the body of a summary call on the prefix that upstream has cached, with `most` tokens
    for the reply.

    The prefix is the conversation up to the boundary, byte for byte as it was sent before the
    boundary's event, and the task follows it.
    """
    planned = rendered.planned
    before = planned.plan.before(boundary.event)
    dialect = planned.dialect
    transcript = planned.transcript
    shown = rendered.shown
    previews = reader.previews(dialect, transcript, planned.reading.shape)
    altered = render.altered(
        dialect, transcript, before, previews, shown.boundary if shown else None
    )
    sent = sent_rounds(planned, before, rendered.found)
    entries = render.render(
        dialect, transcript, altered, shown=shown, rounds=sent, end=boundary.end
    )
    offered = not before.empty or planned.policy.tools.inject is Inject.ALWAYS
    definitions = our_definitions(planned) if offered else []
    return dialect.summary_on_prefix(
        task, planned.request, entries, definitions, most, boundary.end
    )


def _measured(
    planned: Planned, boundary: SummaryBoundary, shown: ActiveSnapshot | None
) -> tuple[int, int]:
    """Return the tokens of the history up to the boundary as it was sent before the boundary's
    event, and the tokens that the snapshot replaces. All of this history has to be looked at.

    Of the messages that an earlier snapshot replaces, the first one counts as the snapshot and the
    others as 0.
    """
    moves = planned.plan.before(boundary.event).moves
    sizes = {
        index: live(item, moves.get(index))
        for index, item in enumerate(planned.history.items[: boundary.end])
    }
    before = render.replaced(planned.transcript, shown.boundary) if shown else []
    sizes |= dict.fromkeys(before, 0)
    sizes |= dict.fromkeys(before[:1], planned.policy.offload.compress.snapshot_tokens)
    replaced = sum(sizes.get(index, 0) for index in render.replaced(planned.transcript, boundary))
    return sum(sizes.values()), replaced


def _begins(planned: Planned, namespace: str) -> str:
    """Identifies the conversation. Those that begin with the same words of the user count as
    one."""
    return f"{namespace}/{planned.summary_model}/{beginning(planned.history.messages).hex()}"


def _shown(planned: Planned, boundary: SummaryBoundary, snapshot: Snapshot) -> ActiveSnapshot:
    before = [one for one in planned.plan.boundaries if one.end < boundary.end]
    earlier = tuple(planned.originals_path(one) for one in before)
    return ActiveSnapshot(
        boundary,
        snapshot.text,
        planned.originals_path(boundary),
        before[-1] if before else None,
        earlier,
        planned.role,
    )
