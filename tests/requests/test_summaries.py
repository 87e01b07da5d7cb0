"""One task for a record, few at a time, bounded; failures pause a conversation; the bytes are the
winner's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from proxy.errors import StoreFault, UpstreamBroken
from proxy.plan.summary import SummaryAnswer
from proxy.policies.tenants import Tenant
from proxy.policy import Policy, Wait
from proxy.requests import summaries
from proxy.requests.planned import Planned, Rendered
from proxy.requests.records import Records, sealed
from proxy.requests.summaries import (
    FIRST_PAUSE,
    LONGEST_PAUSE,
    LONGEST_WAIT,
    QUEUE_PER_TENANT,
    TASKS_PER_TENANT,
    UNUSED_LIMIT,
    UNUSED_PAUSE,
    Summaries,
    job_for,
)
from proxy.requests.summary_writer import Failed, Snapshot, Spent, SummaryJob
from proxy.requests.summary_writer import ask as asked_upstream
from proxy.stores.guarded import Guarded
from proxy.telemetry.outcome import Outcome
from proxy.threads import WorkPool
from proxy.upstream.client import UpstreamRequest
from proxy.upstream.headers import Headers
from tests.clock import Clock, turns, until
from tests.requests.planning import CUT, LAST, OFFLOAD, SYSTEM, USER, Json, planned, step
from tests.requests.scripted import JSON, ScriptedReply, ScriptedUpstream
from tests.requests.test_handler import MemoryStore

TENANT = Tenant(Policy(tenant="acme"), "acme-1")
GOOD = SummaryAnswer(200, "<state_snapshot>the record</state_snapshot>", 100, 20, 80)
BROKEN = UpstreamBroken("x")


def policy(wait: Wait = Wait.ALWAYS, **changes: Any) -> Policy:
    return Policy(
        offload=replace(OFFLOAD, compress=replace(OFFLOAD.compress, wait=wait, **changes))
    )


def said(text: str, beginning: Json = USER) -> list[Json]:
    """A conversation that is due for a cut at once, and in which the model said this."""
    cut = [SYSTEM, beginning, *CUT[2:]]
    return [*cut[:2], cut[2] | {"content": f"{text} {cut[2]['content']}"}, *cut[3:]]


class World:
    """Store, model and clock of one process's summaries."""

    def __init__(self, *answers: SummaryAnswer | BaseException) -> None:
        self.answers = list(answers)
        self.asked: list[Any] = []
        self.outcomes: list[Outcome] = []
        self.now = 0.0
        self.gate = asyncio.Event()
        self.gate.set()
        self.at_once = self.most_at_once = 0
        self.store = MemoryStore()
        self.guarded = Guarded(self.store, warn=lambda kind, text: None)
        self.pool = WorkPool("reading", 2)
        reader: Any = self
        self.summaries = Summaries(
            self.guarded, reader, self.pool, self.outcomes.append, lambda: self.now
        )

    # what of a reader is used here
    def count(self, text: str, model: str = "") -> int:
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)

    async def ask(self, body: bytes) -> SummaryAnswer:
        self.asked.append(json.loads(body))
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await self.gate.wait()
        finally:
            self.at_once -= 1
        answer = self.answers.pop(0) if self.answers else GOOD
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def records(self) -> Records:
        return Records(self.guarded.visit(), TENANT.namespace)

    async def request(
        self,
        messages: list[Json] = CUT,
        policy: Policy | None = None,
        window: int | None = None,
        tenant: Tenant = TENANT,
        **members: Any,
    ) -> Rendered:
        """Make one request of a conversation. By default it waits for its summary."""
        chosen = policy or globals()["policy"]()
        self.history, self._reader = await planned(messages, chosen, window, **members)
        tenant = replace(tenant, policy=replace(chosen, tenant=tenant.name))
        records = self.records()
        ready = Rendered.of(
            self.history, await self.summaries.existing(self.history, records), {}, self._reader
        )
        waits = self.summaries.waits(ready)
        return await self.summaries.complete(ready, records, tenant, self.ask, waits=waits)

    async def shows(self, *args: Any, **members: Any) -> bool:
        return (await self.request(*args, **members)).shown is not None

    async def landed(self) -> None:
        """Wait until no task is under way."""
        while tasks := list(self.summaries._tasks.values()):
            await asyncio.wait(tasks)

    @property
    def faults(self) -> list[str]:
        return [outcome.fault.value for outcome in self.outcomes]


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = World()
    yield world
    world.gate.set()
    await world.summaries.close(1)
    world.pool.close()


async def test_it_is_made_once_stored_and_accounted_for(world: World) -> None:
    ready = await world.request()
    assert ready.shown and ready.shown.text.startswith("the record\n") and ready.compressed() > 0
    assert await world.shows() and len(world.asked) == 1
    [outcome] = world.outcomes
    assert (outcome.kind, outcome.status, outcome.fault) == ("summary", 200, "")
    assert (
        outcome.summary_prompt_tokens,
        outcome.summary_completion_tokens,
        outcome.cached_tokens,
    ) == (100, 20, 80)
    assert (outcome.tenant, outcome.namespace) == ("acme", "acme-1")
    assert list(world.store.records) == [f"acme-1/snapshots/{outcome.request_id}"]


async def test_without_waiting_the_request_goes_as_it_is_and_a_later_one_shows_it(
    world: World,
) -> None:
    ready = await world.request(policy=policy(Wait.NEVER))
    assert ready.shown is None and ready.entries == list(world.history.transcript.raws)
    await world.landed()
    assert await world.shows(policy=policy(Wait.NEVER)) and len(world.asked) == 1


@pytest.mark.parametrize("wait", list(Wait))
async def test_a_request_that_does_not_fit_the_window_waits_whatever_the_policy_says(
    world: World, wait: Wait
) -> None:
    assert await world.shows(policy=policy(wait), window=1_000)


async def test_if_the_summary_fails_the_event_is_shown_without_it(world: World) -> None:
    world.answers = [BROKEN]
    ready = await world.request()
    assert ready.shown is None and ready.plan == world.history.plan
    assert world.faults == ["summary"]


async def test_a_fault_of_ours_is_no_summary_and_no_error(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.answers = [RuntimeError("a bug")]
    assert not await world.shows()
    assert world.faults == ["summary"]

    def broken(*_: Any) -> None:
        raise RuntimeError("another bug")

    monkeypatch.setattr(summaries, "job_for", broken)
    world.now += FIRST_PAUSE
    assert not await world.shows(said("another"))
    assert not world.summaries._tasks


# -- tasks -----------------------------------------------------------------------------------------


async def test_one_task_for_a_record(world: World) -> None:
    world.gate.clear()
    waiting = [asyncio.create_task(world.shows()) for _ in range(3)]
    await world.request(policy=policy(Wait.NEVER))
    await until(lambda: bool(world.asked))
    world.gate.set()
    assert all(await asyncio.gather(*waiting)) and len(world.asked) == 1


LONGER = [
    *CUT,
    *step(5, 2500),
    {"role": "user", "content": "on"},
    *step(6, 2500),
    *step(7, 9),
    LAST,
]
"""It has a boundary of its own after the one of `CUT`."""


async def test_one_at_a_time_for_a_conversation_and_who_must_wait_waits(world: World) -> None:
    history, _ = await planned(LONGER, policy())
    assert len(history.plan.boundaries) == 2
    world.gate.clear()
    await world.request(policy=policy(Wait.NEVER))
    await until(lambda: bool(world.asked))
    await world.request(LONGER, policy(Wait.NEVER))
    assert len(world.asked) == 1, "one that need not wait has it made later"
    patient = asyncio.create_task(world.shows(LONGER))
    await turns()
    assert len(world.asked) == 1
    world.gate.set()
    assert await patient
    assert (world.most_at_once, len(world.store.records)) == (1, 2)


async def test_few_at_a_time_for_a_tenant_and_not_too_many_behind_them(world: World) -> None:
    world.gate.clear()
    for number in range(QUEUE_PER_TENANT + 1):
        await world.request(said(str(number)), policy(Wait.NEVER))
    assert len(world.summaries._tasks) == QUEUE_PER_TENANT
    await world.request(
        said("x"), policy(Wait.NEVER), tenant=Tenant(Policy(tenant="other"), "other-1")
    )
    await until(lambda: world.at_once == TASKS_PER_TENANT + 1)
    world.gate.set()
    await world.landed()
    assert world.most_at_once == TASKS_PER_TENANT + 1
    assert len(world.store.records) == QUEUE_PER_TENANT + 1


async def test_a_request_that_goes_away_does_not_take_its_summary_along(world: World) -> None:
    world.gate.clear()
    waiting = asyncio.create_task(world.shows())
    await until(lambda: bool(world.asked))
    waiting.cancel()
    world.gate.set()
    await world.landed()
    assert world.store.records


async def test_a_request_that_has_waited_for_long_goes_without_and_the_next_one_shows_it(
    world: World, clock: Clock
) -> None:
    world.gate.clear()
    waiting = asyncio.create_task(world.shows())
    await until(lambda: world.asked)
    clock.move(LONGEST_WAIT)
    assert not await waiting
    world.gate.set()
    await world.landed()
    assert await world.shows() and len(world.asked) == 1


async def test_closing_waits_for_what_is_paid_for_and_no_longer(world: World, clock: Clock) -> None:
    world.gate.clear()
    await world.request(policy=policy(Wait.NEVER))
    await until(lambda: bool(world.asked))
    closing = asyncio.create_task(world.summaries.close(5))
    await turns()
    world.gate.set()
    await closing
    assert world.store.records
    world.gate.clear()
    await world.request(said("another"), policy(Wait.NEVER))
    await until(lambda: len(world.asked) == 2)
    closing = asyncio.create_task(world.summaries.close(5))
    await turns()
    clock.move(5)
    await closing
    await world.landed()
    assert world.faults[-1] == "summary"


# -- the store -------------------------------------------------------------------------------------


async def test_the_winners_bytes_are_used(world: World) -> None:
    world.gate.clear()
    waiting = asyncio.create_task(world.request())
    await until(lambda: bool(world.asked))
    [(_, key)] = world.summaries._tasks
    winner = Snapshot("another process was first", 4, "m")
    world.store.records[key] = sealed(key, msgspec.json.encode(winner))
    world.gate.set()
    ready = await waiting
    assert ready.shown and ready.shown.text == winner.text


@pytest.mark.parametrize("stored", [b"{", b'{"text":1}'])
async def test_a_damaged_record_is_made_again(world: World, stored: bytes) -> None:
    await world.request()
    [key] = world.store.records
    other = World()
    other.store.records[key] = stored
    assert await other.shows() and other.store.records[key] != stored
    other.pool.close()


async def test_a_snapshot_that_the_store_did_not_take_is_not_paid_for_again(world: World) -> None:
    world.store._fault = StoreFault("the disk is full")
    assert await world.shows()
    assert await world.shows(policy=policy(Wait.NEVER)), "it is in memory"
    assert len(world.asked) == 1 and world.faults == [""]


# -- pauses ----------------------------------------------------------------------------------------


async def test_failures_pause_a_conversation_longer_each_time(world: World) -> None:
    world.answers = [BROKEN] * 20
    pause = FIRST_PAUSE
    for number in range(1, 9):
        assert not await world.shows()
        assert len(world.asked) == number
        world.now += pause - 1
        assert not await world.shows()
        assert len(world.asked) == number, "not yet"
        world.now += 1
        pause = min(pause * 2, LONGEST_PAUSE)
    assert not await world.shows(said("another", {"role": "user", "content": "other rules"}))
    assert len(world.asked) == 9, "another conversation is not held up"


async def test_a_conversation_that_goes_on_inherits_the_pause(world: World) -> None:
    world.answers = [BROKEN]
    await world.request()
    assert not await world.shows(LONGER)
    assert not await world.shows([*CUT[:-1], {"role": "user", "content": "a fork"}])
    assert len(world.asked) == 1
    world.now += FIRST_PAUSE
    assert await world.shows(LONGER)


async def test_a_success_ends_the_pause(world: World) -> None:
    world.answers = [SummaryAnswer(500), GOOD, SummaryAnswer(500)]
    assert not await world.shows()
    world.now += FIRST_PAUSE
    assert await world.shows()
    assert (await world.request(LONGER)).plan == world.history.plan and len(world.asked) == 3
    world.now += FIRST_PAUSE
    await world.request(LONGER)
    assert len(world.asked) == 4, "one minute after the first failure in a row"


async def test_what_nobody_uses_is_not_made_for_ever(world: World) -> None:
    for number in range(UNUSED_LIMIT + 3):
        await world.request(said(str(number)))
    assert len(world.asked) == UNUSED_LIMIT
    other = said("another beginning", {"role": "user", "content": "other rules"})
    assert await world.shows(other), "conversations that begin otherwise get theirs"
    world.now += UNUSED_PAUSE
    assert await world.shows(said("later"))


# -- the job ---------------------------------------------------------------------------------------


async def job(
    world: World, messages: list[Json] = CUT, chosen: Policy | None = None
) -> tuple[Planned, SummaryJob]:
    """The job for a conversation's snapshot."""
    chosen = replace(chosen or policy(), tenant="acme")
    history, reader = await planned(messages, chosen)
    boundary, rendered = history.plan.boundaries[-1], Rendered.of(history, None, {}, reader)
    return history, job_for(rendered, boundary, reader, Tenant(chosen, TENANT.namespace), world.ask)


async def test_a_job_rides_on_the_conversation(world: World) -> None:
    _, made = await job(world)
    assert (made.tenant.namespace, made.tenant.name) == ("acme-1", "acme")
    assert made.riding is not None
    assert json.loads(made.riding("the task"))["messages"] == [
        *CUT[:6],
        {"role": "user", "content": "the task"},
    ]
    assert next(section.title for section in made.history()) == "3 assistant"
    assert json.loads(made.alone("all of it", most=9))["messages"] == [
        {"role": "user", "content": "all of it"}
    ]
    assert made.replaced_tokens > made.snapshot_tokens


@pytest.mark.parametrize(
    ("size", "window", "rides"),
    [(500, 400_000, True), (9_000, 400_000, True), (9_000, 20_000, False)],
)
async def test_a_job_rides_where_the_window_has_room_for_its_record(
    world: World, size: int, window: int, rides: bool
) -> None:
    chosen = policy()
    upstream = replace(chosen.upstream, context_window=window)
    compress = replace(chosen.offload.compress, snapshot_tokens=size)
    chosen = replace(chosen, upstream=upstream, offload=replace(chosen.offload, compress=compress))
    history, reader = await planned(CUT, chosen, window=window)
    made = job_for(
        Rendered.of(history.cut(), None, {}, reader),
        history.cut().plan.boundaries[-1],
        reader,
        TENANT,
        world.ask,
    )
    assert (made.riding is not None) is rides


async def test_a_job_does_not_speak_behind_a_reply_that_may_go_on(world: World) -> None:
    """Of Messages with the reason `pause_turn`: upstream refuses what the user says behind it."""
    said = [SYSTEM, USER, *step(1, 680), *step(4, 300), *step(5, 200, 200)]
    reply = {"role": "assistant", "content": "I search."}
    for paused in (False, True):
        history, made = await job(
            world,
            [
                *said,
                reply | ({"goes_on": True} if paused else {}),
                *step(2, 680, 200),
                *step(3, 100),
                LAST,
            ],
        )
        assert history.plan.boundaries[-1].end == len(said) + 1
        assert (made.riding is None) is paused


async def test_a_job_knows_the_stored_results_that_its_snapshot_replaces(world: World) -> None:
    results = [
        SYSTEM,
        USER,
        *step(1, 2500, 4000, 50),
        *step(2, 2500, 3000),
        *step(3, 9, 20),
        *step(4, 9, 20),
        LAST,
    ]
    always = policy()
    history, made = await job(
        world,
        results,
        replace(always, offload=replace(always.offload, compact_ratio_threshold=0.0)),
    )
    moved = [
        history.transcript.messages[index].pieces[0].name for index in sorted(history.plan.moves)
    ]
    assert len(moved) == 2
    assert list(made.references()) == [f"/store/{name}" for name in reversed(moved)]
    assert all("look" in about for about in made.references().values())
    assert [one.chars for one in made.replaced()] == [len(one.text) for one in made.history()]


async def test_another_model_is_given_the_originals(world: World) -> None:
    _, made = await job(world, chosen=policy(model="another"))
    assert made.riding is None
    assert json.loads(made.alone("x", most=9))["model"] == "another"


# -- for the operations, and the calls -------------------------------------------------------------


async def test_once_is_for_its_caller_alone(world: World, clock: Clock) -> None:
    _, made = await job(world)
    world.answers, spent = [SummaryAnswer(500)], Spent()
    stored, outcomes = dict(world.store.records), list(world.outcomes)
    with pytest.raises(Failed, match="upstream answered 500"):
        await world.summaries.once(made, spent)
    texts = [(await world.summaries.once(made, spent)).text for _ in range(2)]
    assert all(text.startswith("the record") for text in texts), (
        "no pause, and nothing is remembered"
    )
    assert spent == Spent(200, 40, 160, 3)
    assert (world.store.records, world.outcomes) == (stored, outcomes)
    world.gate.clear()
    asking = asyncio.create_task(world.summaries.once(made, Spent()))
    await turns()
    clock.move(made.tenant.policy.upstream.idle_timeout)
    with pytest.raises(TimeoutError):
        await asking


ORDER = {"object": "error", "message": "Unexpected role 'user' after role 'tool'", "code": "3230"}


@pytest.mark.parametrize(
    ("status", "body", "refused"),
    [
        (400, ORDER, True),
        (
            404,
            {"error": {"message": "No endpoints found that support tool use", "code": 404}},
            True,
        ),
        (200, {"error": {"message": "no tools here", "code": 400}}, True),
        (429, {"error": {"message": "slow down"}}, False),
        (400, {"error": {"message": "filtered", "code": "content_filter"}}, False),
        (400, {"error": {"message": "prompt is too long"}}, False),
        (200, {"choices": [{"message": {"content": "hi"}}]}, False),
        (200, {"choices": []}, False),
    ],
)
async def test_which_answers_are_refusals_of_the_form(
    status: int, body: object, refused: bool
) -> None:
    history, _ = await planned(CUT)
    upstream = ScriptedUpstream(
        ScriptedReply(json.dumps(body).encode(), status=status, headers=[JSON])
    )
    times = dict.fromkeys(("connect_timeout", "first_byte_timeout", "idle_timeout"), 1.0)
    request = UpstreamRequest(
        method="POST", url="http://up", headers=Headers(), content=b"", **times
    )
    answer = await asked_upstream(upstream, request, history.dialect)  # type: ignore[arg-type]
    assert answer.refused is refused
