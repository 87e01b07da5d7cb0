"""Which snapshot a request gets, and the job for a missing one."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from msgspec.structs import replace

from proxy.plan.summary import SummaryAnswer
from proxy.policy import Compress, Limits, Policy, Source, Wait
from proxy.requests.lines import Line
from proxy.requests.prepare import PlannedRequest, rendered
from proxy.requests.snapshot_writer import Snapshot, SummaryJob
from proxy.requests.snapshots import Snapshots, group_limits
from proxy.upstream.traffic import Idle, Traffic
from tests.requests.planning import CUT, LAST, OFFLOAD, POLICY, SYSTEM, USER, knowing, planned, step

RECORD = Snapshot("the record", 10, "m")


class Scripted:
    """Summarizer and records in one: what exists, and which jobs came."""

    def __init__(self, made: Snapshot | None = None, **existing: Snapshot) -> None:
        self.made = made
        self.existing = existing
        self.requested: list[SummaryJob] = []
        self.waited: list[SummaryJob] = []
        self.noted: list[Line] = []
        self.kept: dict[str, Snapshot] = {}

    def request(self, job: SummaryJob) -> asyncio.Task[Snapshot | None] | None:
        self.requested.append(job)
        return None

    async def wait(self, job: SummaryJob) -> Snapshot | None:
        self.waited.append(job)
        return self.made

    def used(self, line: Line) -> None:
        self.noted.append(line)

    def unstored(self, key: str) -> Snapshot | None:
        return self.kept.get(key)

    def key(self, kind: str, name: str) -> str:
        return f"ns/{kind}/{name}"

    async def snapshots(self, names: list[str]) -> list[Snapshot | None]:
        return [self.existing.get(name) for name in names]


async def ask(body: bytes) -> SummaryAnswer:
    return SummaryAnswer(200)


def idle() -> Idle:
    return Traffic().idle("http://upstream")


def policy(**changes: Any) -> Policy:
    return Policy(offload=replace(OFFLOAD, compress=replace(OFFLOAD.compress, **changes)))


async def completed(world: Scripted, policy: Policy = POLICY, window: int | None = None) -> tuple[PlannedRequest, Any]:
    history, reader = await planned(CUT, policy, window)
    ready = rendered(history, None, {}, reader)
    snapshots: Any = Snapshots(world, reader, knowing())  # type: ignore[arg-type]
    return history, await snapshots.complete(ready, world, "tenant", ask, idle)


async def test_the_latest_existing_snapshot_is_found_and_noted_as_used() -> None:
    history, reader = await planned(CUT)
    [boundary] = history.plan.boundaries
    world = Scripted(**{history.snapshot_name(boundary): RECORD})
    snapshots: Any = Snapshots(world, reader, knowing())  # type: ignore[arg-type]
    shown = await snapshots.existing(history, world)
    assert (shown.boundary, shown.text, shown.path) == (boundary, "the record", history.originals_path(boundary))
    assert [(line.scope, line.end) for line in world.noted] == [("ns/snapshots/m", boundary.end)]
    assert await snapshots.existing(history, Scripted()) is None
    unstored = Scripted()
    unstored.kept[f"ns/snapshots/{history.snapshot_name(boundary)}"] = RECORD
    assert await Snapshots(unstored, reader, knowing()).existing(history, unstored) == shown  # type: ignore[arg-type]


async def test_a_snapshot_of_an_earlier_version_is_used_until_there_is_a_newer_one() -> None:
    history, reader = await planned(CUT, policy(wait=Wait.ALWAYS))
    [boundary] = history.plan.boundaries
    earlier = Scripted(**{history.snapshot_name(boundary, "1"): RECORD})
    snapshots: Any = Snapshots(earlier, reader, knowing())  # type: ignore[arg-type]
    shown = await snapshots.existing(history, earlier)
    assert shown.text == "the record"
    ready = rendered(history, shown, {}, reader)
    assert await snapshots.complete(ready, earlier, "tenant", ask, idle) is ready
    assert not earlier.waited, "an upgrade pays for no summary"
    both = {history.snapshot_name(boundary): Snapshot("newer", 10, "m"), history.snapshot_name(boundary, "1"): RECORD}
    snapshots = Snapshots(Scripted(**both), reader, knowing())  # type: ignore[arg-type]
    assert (await snapshots.existing(history, Scripted(**both))).text == "newer"


async def test_without_waiting_the_snapshot_is_requested_and_the_request_goes_as_it_is() -> None:
    world = Scripted()
    history, ready = await completed(world, policy(wait=Wait.NEVER))
    assert ready.shown is None and ready.entries == list(history.transcript.raws)
    assert len(world.requested) == 1 and not world.waited


@pytest.mark.parametrize("changes", [{"wait": Wait.ALWAYS}, {"wait": Wait.NEVER}])
async def test_a_request_that_is_too_large_waits_whatever_the_policy_says(changes: dict[str, Any]) -> None:
    world = Scripted(RECORD)
    _, ready = await completed(world, policy(**changes), window=1_000)
    assert ready.shown.text == "the record" and ready.compressed() > 0
    assert len(world.waited) == 1 and not world.requested


@pytest.mark.parametrize(
    ("wait", "slots", "waits"),
    [
        (Wait.IDLE, None, True),
        (Wait.NEVER, 1, True),
        (Wait.NEVER, 2, False),
        (Wait.NEVER, None, False),
        (Wait.ALWAYS, 1, False),
    ],
)
async def test_a_summary_may_wait_for_an_idle_upstream(wait: Wait, slots: int | None, waits: bool) -> None:
    world = Scripted(RECORD)
    _, ready = await completed(world, replace(policy(wait=wait), limits=Limits(upstream_concurrency=slots)))
    [job] = world.requested + world.waited
    assert (job.idle is not None) == waits
    assert (ready.shown is None) == (wait is not Wait.ALWAYS)


async def test_if_the_summary_fails_the_event_is_shown_without_it() -> None:
    history, ready = await completed(Scripted(None), policy(wait=Wait.ALWAYS))
    assert ready.shown is None and ready.plan == history.plan


async def test_a_shown_snapshot_needs_no_job() -> None:
    world = Scripted(RECORD)
    history, reader = await planned(CUT, policy(wait=Wait.ALWAYS))
    snapshots: Any = Snapshots(world, reader, knowing())  # type: ignore[arg-type]
    ready = await snapshots.complete(rendered(history, None, {}, reader), world, "tenant", ask, idle)
    assert await snapshots.complete(ready, world, "tenant", ask, idle) is ready
    assert len(world.waited) == 1


async def job(**changes: Any) -> SummaryJob:
    world = Scripted(RECORD)
    await completed(world, policy(wait=Wait.ALWAYS, **changes))
    return world.waited[0]


async def test_a_job_rides_on_the_conversation_by_default() -> None:
    made = await job()
    assert made.key.startswith("ns/snapshots/") and made.tenant == "tenant"
    assert made.riding is not None
    assert json.loads(made.riding("the task"))["messages"] == [*CUT[:6], {"role": "user", "content": "the task"}]
    assert next(section.title for section in made.history()) == "3 assistant"
    assert json.loads(made.alone("all of it"))["messages"] == [{"role": "user", "content": "all of it"}]
    assert made.replaced_tokens > made.snapshot_tokens


async def test_a_job_knows_the_stored_results_that_its_snapshot_replaces() -> None:
    results = [SYSTEM, USER, *step(1, 2500, 4000, 50), *step(2, 2500, 3000), *step(3, 9, 20), *step(4, 9, 20), LAST]
    world = Scripted(RECORD)
    offload = replace(policy(wait=Wait.ALWAYS).offload, compact_ratio_threshold=0.0)
    history, reader = await planned(results, Policy(offload=offload))
    snapshots: Any = Snapshots(world, reader, knowing())  # type: ignore[arg-type]
    await snapshots.complete(rendered(history, None, {}, reader), world, "tenant", ask, idle)
    [made] = world.waited
    moved = [history.transcript.messages[index].pieces[0].name for index in sorted(history.plan.moves)]
    assert len(moved) == 2
    assert list(made.references()) == [f"/store/{name}" for name in reversed(moved)]
    assert all("look" in about for about in made.references().values())
    assert made.stored == {*made.references(), *map(history.originals_path, history.plan.boundaries)}
    assert [section.title for section in made.taken()] == [section.title for section in made.history()]


@pytest.mark.parametrize("changes", [{"source": Source.ORIGINALS}, {"model": "another"}])
async def test_another_model_or_source_is_given_the_originals(changes: dict[str, Any]) -> None:
    made = await job(**changes)
    assert made.riding is None
    assert json.loads(made.alone("x"))["model"] == changes.get("model", "m")


def test_limits_of_a_group() -> None:
    assert group_limits(Compress(group_token_threshold=0), None, 900) == (0, 900)
    assert group_limits(Compress(group_token_threshold=5_000), None, 900) == (5_000, 900)
    history, reply = group_limits(Compress(group_token_threshold=0), 32_000)
    assert 0 < reply < history < 32_000
    assert group_limits(Compress(group_token_threshold=5_000), 32_000) == (5_000, reply)
