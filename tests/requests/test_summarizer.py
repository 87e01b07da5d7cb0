"""One flight a record, few at a time, bounded; failures back off; the bytes are the winner's."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from proxy.errors import UpstreamBroken
from proxy.plan.plan import Role
from proxy.plan.summary import Section, SummaryAnswer
from proxy.requests import lines, summarizer
from proxy.requests.lines import FIRST_BACKOFF, LONGEST_BACKOFF, UNUSED, UNUSED_LIMIT, UNUSED_PAUSE
from proxy.requests.snapshot_writer import Failed, Snapshot, Spent, SummaryJob
from proxy.requests.summarizer import (
    FLIGHTS_PER_TENANT,
    QUEUE_PER_TENANT,
    STORE_AGAIN,
    Summarizer,
    summary_outcome,
)
from proxy.threads import WorkPool
from proxy.upstream.traffic import Traffic
from tests.requests.histories import line

GOOD = SummaryAnswer(200, "<state_snapshot>the record</state_snapshot>", 100, 20, 80)
TOO_LONG = SummaryAnswer(400, too_long=True)


class World:
    """Store, model and clock of one summarizer."""

    def __init__(self, *answers: SummaryAnswer | BaseException, pool: WorkPool | None = None) -> None:
        self.answers = list(answers)
        self.asked: list[Any] = []
        self.stored: dict[str, bytes] = {}
        self.broken = False
        self.reported: list[tuple[str, Spent, str]] = []
        self.now = 0.0
        self.gate = asyncio.Event()
        self.gate.set()
        self.at_once = self.most_at_once = 0
        self.pool = pool or WorkPool("reading", 2)
        self.summarizer = Summarizer(
            self._recall,
            self._keep,
            lambda text, _: len(text.split()),
            self._report,
            self.pool,
            lambda: self.now,
        )

    async def _recall(self, key: str) -> bytes | None:
        return None if self.broken else self.stored.get(key)

    async def _keep(self, key: str, value: bytes) -> bytes | None:
        return None if self.broken else self.stored.setdefault(key, value)

    def _report(self, job: SummaryJob, spent: Spent, fault: str, seconds: float) -> None:
        self.reported.append((job.key, spent, fault))

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

    def job(self, key: str = "a", said: str = "c", **changes: Any) -> SummaryJob:
        """Return a job for the record `key`, on a line of history in which the model said `said`."""
        fields: dict[str, Any] = {
            "key": f"ns/snapshots/{key}",
            "tenant": "t",
            "line": line(f"u go on|a {said}"),
            "model": "m",
            "dialect": "chat",
            "snapshot_tokens": 100,
            "replaced_tokens": 1000,
            "store_dir": "/s",
            "timeout": 5.0,
            "group_tokens": 0,
            "max_calls": 4,
            "riding": lambda task: json.dumps({"ride": task}).encode(),
            "alone": lambda text: json.dumps({"alone": text}).encode(),
            "history": lambda: [Section("1 user", "word " * 900)],
            "earlier": "",
            "originals": "/s/compressed_group_1.txt",
            "taken": list,
            "references": dict,
            "stored": frozenset(),
            "idle": None,
            "ask": self.ask,
        }
        return SummaryJob(**fields | changes)

    async def made(self, **changes: Any) -> Snapshot | None:
        return await self.summarizer.wait(self.job(**changes))


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not true():  # noqa: ASYNC110 - what is waited for is many things
            await asyncio.sleep(0)


async def test_it_is_made_once_stored_and_paid_for_in_the_ledger() -> None:
    world = World()
    made = await world.made()
    assert made == Snapshot("the record", 2, "m")
    assert await world.made() == made
    assert len(world.asked) == 1
    assert world.reported == [("ns/snapshots/a", Spent(100, 20, 80, 1), "")]
    outcome = summary_outcome(world.job(), world.reported[0][1], "", 1.0)
    assert (outcome.kind, outcome.status, outcome.summary_prompt_tokens, outcome.cached_tokens) == (
        "summary",
        200,
        100,
        80,
    )


def of(words: str) -> SummaryAnswer:
    return SummaryAnswer(200, f"<state_snapshot>{words}</state_snapshot>")


async def test_a_record_gets_references_and_exact_details() -> None:
    world = World(of("the words, see /s/none.txt and /s/a.txt"))
    made = await world.made(
        taken=lambda: [Section("1 tool", "the code is heliotrope-7291", Role.TOOL)],
        references=lambda: {"/s/a.txt": "result of look", "/s/b.txt": "result of read_log x"},
        stored={"/s/a.txt", "/s/b.txt"},
    )
    assert made and made.text == (
        "the words, see  and /s/a.txt\n"
        "<exact_details>\n- the code is heliotrope-7291\n</exact_details>\n"
        "<stored_results>\n- /s/a.txt: result of look\n- /s/b.txt: result of read_log x\n</stored_results>"
    )
    assert made.tokens == len(made.text.split())


@pytest.mark.parametrize("replaced", [12, 60, 90, 140, 400])
async def test_what_is_added_never_makes_a_snapshot_larger_than_what_it_replaces(replaced: int) -> None:
    world = World(of("word " * 10))
    made = await world.made(
        replaced_tokens=replaced,
        taken=lambda: [Section("1 tool", "\n".join(f"name{n} is code-{n:03}" for n in range(200)), Role.TOOL)],
        references=lambda: {f"/s/{n}.txt": "result of look" for n in range(90)},
    )
    assert made and 10 <= made.tokens < replaced
    assert made.tokens < 10 + 2 * 100 + 20, "references take as many tokens as the record may, details what is left"


async def test_an_earlier_record_is_given_to_the_model_without_what_we_added() -> None:
    world = World()
    earlier = "the words\n<exact_details>\n- 512 MB\n</exact_details>"
    assert await world.made(riding=None, earlier=earlier)
    assert "the words" in world.asked[0]["alone"] and "512 MB" not in world.asked[0]["alone"]


async def test_single_flight() -> None:
    world = World()
    world.gate.clear()
    flights = {world.summarizer.request(world.job()) for _ in range(3)}
    waiting = asyncio.create_task(world.made())
    await until(lambda: bool(world.asked))
    world.gate.set()
    assert await waiting
    assert len(flights) == len(world.asked) == 1


async def test_one_at_a_time_for_a_line_and_who_must_wait_waits() -> None:
    world = World()
    world.gate.clear()
    assert world.summarizer.request(world.job("a"))
    assert world.summarizer.request(world.job("b")) is None
    patient = asyncio.create_task(world.made(key="b"))
    await until(lambda: bool(world.asked))
    world.gate.set()
    assert await patient
    assert (world.most_at_once, len(world.stored)) == (1, 2)


async def test_few_at_a_time_for_a_tenant_and_not_too_many_behind_them() -> None:
    world = World()
    world.gate.clear()
    flights = [world.summarizer.request(world.job(str(number), str(number))) for number in range(QUEUE_PER_TENANT + 1)]
    assert flights[-1] is None and None not in flights[:-1]
    assert world.summarizer.request(world.job("x", "x", tenant="other"))
    await until(lambda: world.at_once == FLIGHTS_PER_TENANT + 1)
    world.gate.set()
    await until(lambda: len(world.stored) == QUEUE_PER_TENANT + 1)
    assert world.most_at_once == FLIGHTS_PER_TENANT + 1


async def test_the_winners_bytes_are_used() -> None:
    world = World()
    world.gate.clear()
    waiting = asyncio.create_task(world.made())
    await until(lambda: bool(world.asked))
    winner = Snapshot("another process was first", 4, "m")
    world.stored["ns/snapshots/a"] = msgspec.json.encode(winner)
    world.gate.set()
    assert await waiting == winner


@pytest.mark.parametrize("stored", [None, b"{", b'{"text":1}'])
async def test_without_a_store_or_with_a_damaged_record_its_own_is_used(stored: bytes | None) -> None:
    world = World()
    world.broken = stored is None
    if stored is not None:
        world.stored["ns/snapshots/a"] = stored
    made = await world.made()
    assert made and made.text == "the record"


async def test_a_snapshot_that_the_store_did_not_take_is_kept_and_stored_later() -> None:
    world = World()
    world.broken = True
    made = await world.made()
    key = world.job().key
    assert made and world.summarizer.unstored(key) == made
    assert await world.made() == made, "a flight finds it too"
    world.now += STORE_AGAIN
    assert world.summarizer.unstored(key) == made
    await asyncio.sleep(0)
    world.broken = False
    assert world.summarizer.unstored(key) == made
    await asyncio.sleep(0)
    assert not world.stored, "not tried again at once"
    world.now += STORE_AGAIN
    assert world.summarizer.unstored(key) == made
    await until(lambda: key in world.stored)
    await until(lambda: world.summarizer.unstored(key) is None)
    assert len(world.asked) == 1


async def test_conversations_that_begin_alike_do_not_wait_for_each_other() -> None:
    world = World()
    world.gate.clear()
    many = [asyncio.create_task(world.made(key=str(number), said=str(number))) for number in range(FLIGHTS_PER_TENANT)]
    await until(lambda: world.at_once == FLIGHTS_PER_TENANT)
    world.gate.set()
    assert all(await asyncio.gather(*many))


async def test_failures_back_off_longer_each_time() -> None:
    world = World(*[UpstreamBroken("x")] * 20)
    pause = FIRST_BACKOFF
    for number in range(1, 12):
        assert await world.made() is None
        assert len(world.asked) == number
        world.now += pause - 1
        assert await world.made() is None
        assert len(world.asked) == number, "not yet"
        world.now += 1
        pause = min(pause * 2, LONGEST_BACKOFF)
    assert await world.made(said="another") is None
    assert len(world.asked) == 12, "another line is not held up"
    assert all(fault == "x" for _, _, fault in world.reported)


async def test_a_success_ends_the_backoff() -> None:
    world = World(SummaryAnswer(500), GOOD, SummaryAnswer(500))
    for key in "abc":
        await world.made(key=key)
        world.now += FIRST_BACKOFF
    assert await world.made(key="d"), "one minute after the first failure in a row"


async def test_what_nobody_uses_is_not_made_for_ever() -> None:
    world = World()
    for number in range(UNUSED_LIMIT + 3):
        await world.made(key=str(number))
    assert len(world.asked) == UNUSED_LIMIT
    assert [fault for _, _, fault in world.reported if fault] == [UNUSED]
    assert summary_outcome(world.job(), Spent(), UNUSED, 0.0).fault == "unused"
    world.now += UNUSED_PAUSE
    assert await world.made(key="later")


async def test_what_is_used_is() -> None:
    world = World()
    for number in range(3 * UNUSED_LIMIT):
        assert await world.made(key=str(number))
        world.summarizer.used(line("u go on|a c" if number % 3 == 0 else "u go on|a another"))


async def test_a_summary_that_was_late_gets_twice_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "FIRST_BACKOFF", 0.0)
    world = World()
    world.gate.clear()
    given = []
    for number in range(5):
        given.append(world.summarizer.speeds.timeout(("ns", "m"), 100, 0.01))
        assert await world.made(key=str(number), timeout=0.01) is None
    assert given == pytest.approx([0.01, 0.02, 0.04, 0.05, 0.05])
    assert world.summarizer.speeds.timeout(("ns", "another"), 100, 0.01) == 0.01


async def test_a_slow_upstream_gives_its_summaries_more_time() -> None:
    world = World()
    outcome = summary_outcome(world.job(), Spent(), "", 50.0)
    world.summarizer.answered(replace(outcome, completion_tokens=40))
    assert world.summarizer.speeds.timeout(("ns", "m"), 1_500, 120) == 120, "too short to tell"
    world.summarizer.answered(replace(outcome, completion_tokens=1_000, added_seconds=10.0))
    assert world.summarizer.speeds.timeout(("ns", "m"), 1_500, 120) == pytest.approx(360)


class TestIdle:
    """A summary that waits until upstream is idle."""

    @pytest.fixture(autouse=True)
    def quick(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(summarizer, "QUIET", 0.01)
        self.traffic = Traffic()
        self.idle = self.traffic.idle("http://u")

    async def test_it_begins_when_no_request_is_under_way(self) -> None:
        world = World()
        self.traffic.began("http://u")
        flight = world.summarizer.request(world.job(idle=self.idle))
        assert flight
        await asyncio.sleep(0.05)
        assert not world.asked
        self.traffic.ended("http://u")
        assert await flight
        assert len(world.asked) == 1 and not self.traffic.under_way("http://u")

    async def test_it_gives_way_to_a_request_and_begins_again(self) -> None:
        world = World()
        world.gate.clear()
        flight = world.summarizer.request(world.job(idle=self.idle))
        await until(lambda: world.at_once == 1)
        self.traffic.began("http://u")
        await until(lambda: world.at_once == 0)
        world.gate.set()
        await asyncio.sleep(0.05)
        assert len(world.asked) == 1
        self.traffic.ended("http://u")
        assert flight and await flight
        assert (len(world.asked), world.reported[0][2]) == (2, "")

    async def test_it_waits_no_longer_once_a_request_needs_it(self) -> None:
        world = World()
        self.traffic.began("http://u")
        assert world.summarizer.request(world.job(idle=self.idle))
        await asyncio.sleep(0.02)
        assert await world.made(idle=self.idle)
        assert len(world.asked) == 1

    async def test_two_of_them_never_run_at_once(self) -> None:
        world = World()
        flights = [world.summarizer.request(world.job(str(n), str(n), idle=self.idle)) for n in range(3)]
        assert all(await asyncio.gather(*(flight for flight in flights if flight)))
        assert (world.most_at_once, len(world.asked)) == (1, 3)

    async def test_what_is_paid_for_is_kept_when_a_request_comes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        world = World()
        storing, go_on, keep = asyncio.Event(), asyncio.Event(), world.summarizer._keep

        async def slowly(key: str, value: bytes) -> bytes | None:
            storing.set()
            await go_on.wait()
            return await keep(key, value)

        monkeypatch.setattr(world.summarizer, "_keep", slowly)
        flight = world.summarizer.request(world.job(idle=self.idle))
        await storing.wait()
        self.traffic.began("http://u")
        await asyncio.sleep(0.05)
        self.traffic.ended("http://u")
        go_on.set()
        assert flight and await flight
        assert len(world.asked) == 1

    async def test_it_gives_up_if_upstream_is_never_idle(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(summarizer, "LONGEST_QUEUE", 0.01)
        world = World()
        self.traffic.began("http://u")
        flight = world.summarizer.request(world.job(idle=self.idle))
        await asyncio.sleep(0.02)
        world.now = 1.0
        assert flight and await flight is None
        assert "never idle" in world.reported[0][2]


async def test_bounded_in_time() -> None:
    world = World()
    world.gate.clear()
    assert await world.made(timeout=0.01) is None
    assert world.reported[0][2] == "no answer in time"


async def test_once_is_for_its_caller_alone() -> None:
    world, spent = World(SummaryAnswer(500)), Spent()
    job = world.job(key="", riding=None)
    with pytest.raises(Failed, match="upstream answered 500"):
        await world.summarizer.once(job, spent)
    made = [await world.summarizer.once(job, spent) for _ in range(2)]
    assert made == [Snapshot("the record", 2, "m")] * 2, "no back-off, and nothing is remembered"
    assert spent == Spent(200, 40, 160, 3)
    assert (world.stored, world.reported) == ({}, [])


async def test_once_is_bounded_in_time() -> None:
    world = World()
    world.gate.clear()
    with pytest.raises(TimeoutError):
        await world.summarizer.once(world.job(timeout=0.01), Spent())


async def test_a_request_that_goes_away_does_not_take_its_summary_along() -> None:
    world = World()
    world.gate.clear()
    waiting = asyncio.create_task(world.made())
    await until(lambda: bool(world.asked))
    waiting.cancel()
    world.gate.set()
    await until(lambda: bool(world.stored))


async def test_closing_waits_for_what_is_paid_for_and_no_longer() -> None:
    world = World()
    world.gate.clear()
    world.summarizer.request(world.job())
    await until(lambda: bool(world.asked))
    asyncio.get_running_loop().call_later(0.05, world.gate.set)
    await world.summarizer.close(5)
    assert world.stored
    world.gate.clear()
    flight = world.summarizer.request(world.job("b"))
    await until(lambda: len(world.asked) == 2)
    await world.summarizer.close(0.01)
    assert flight
    with pytest.raises(asyncio.CancelledError):
        await flight
    assert world.reported[-1][2] == "the proxy ended"


async def test_too_long_to_ride_is_made_from_originals() -> None:
    world = World(TOO_LONG)
    assert await world.made()
    assert [set(body) for body in world.asked] == [{"ride"}, {"alone"}]


async def test_too_long_is_halved_until_it_fits_each_call_updating_the_last() -> None:
    answers = [TOO_LONG, *(SummaryAnswer(200, f"<state_snapshot>part {n}</state_snapshot>") for n in range(9))]
    world = World(*answers)
    history = [Section(f"{number} user", f"word{number} " * 1000) for number in range(4)]
    made = await world.made(
        riding=None, group_tokens=2500, history=lambda: history, earlier="the one before", max_calls=9
    )
    contents = [body["alone"] for body in world.asked]
    assert made and made.text == f"part {len(contents) - 2}"
    assert "the one before" in contents[0] and "the one before" in contents[1]
    assert all(f"part {number}" in content for number, content in enumerate(contents[2:]))
    assert [sum(content.count(f"word{number} ") for content in contents[1:]) for number in range(4)] == [1000] * 4


async def test_what_is_too_long_whatever_we_do_fails() -> None:
    world = World(*[TOO_LONG] * 20)
    assert await world.made(group_tokens=2000) is None
    assert len(world.asked) < 6
    assert "too long" in world.reported[0][2]


UNUSABLE = SummaryAnswer(200, "Hello!")


@pytest.mark.parametrize("max_calls", [1, 2, 3, pytest.param(4, marks=pytest.mark.sweep), 7])
@pytest.mark.parametrize("rides", [True, False])
async def test_a_snapshot_costs_at_most_so_many_calls_whatever_upstream_answers(max_calls: int, rides: bool) -> None:
    history = [Section(f"{number} tool", f"word{number} " * 1000, Role.TOOL) for number in range(20)]
    changes: dict[str, Any] = {"group_tokens": 1500, "history": lambda: history, "max_calls": max_calls}
    changes |= {} if rides else {"riding": None}
    for answers in itertools.product([GOOD, UNUSABLE, TOO_LONG], repeat=min(max_calls, 4)):
        world = World(*answers)
        made = await world.made(**changes)
        assert 1 <= len(world.asked) <= max_calls
        assert made or world.reported[-1][2]
        assert not made or len(world.asked) > len(answers) or GOOD in answers


async def test_what_is_left_is_shortened_to_the_calls_that_are_left() -> None:
    """A try that fails costs a call; the last call covers all that no other has."""
    history = [Section(f"{number} tool", f"word{number} " * 1000, Role.TOOL) for number in range(5)]
    world = World(GOOD, UNUSABLE)
    assert await world.made(riding=None, group_tokens=1500, history=lambda: history)
    contents = [body["alone"] for body in world.asked]
    assert len(contents) == 4
    assert all(f"word{number} " in "".join([contents[0], *contents[2:]]) for number in range(5))
    assert all(len(content.split()) < 1500 + 600 for content in contents)
    assert "/s/compressed_group_1.txt" in contents[-1]
    assert "no closed" in contents[2] and "no closed" not in contents[3]


async def test_the_window_that_upstream_names_counts() -> None:
    history = [Section(f"{number} tool", f"word{number} " * 1000, Role.TOOL) for number in range(30)]
    world = World(SummaryAnswer(400, too_long=True, window=9000))
    assert await world.made(riding=None, history=lambda: history)
    assert 1 < len(world.asked) <= 4
    assert all(len(body["alone"].split()) < 8100 for body in world.asked[1:])


async def test_reading_and_rendering_leave_the_loop_and_one_thread() -> None:
    busy: list[str] = []
    most: list[int] = []

    def history() -> list[Section]:
        busy.append(threading.current_thread().name)
        most.append(len(busy))
        time.sleep(0.01)
        busy.pop()
        return [Section("1 user", "word " * 900)]

    world = World()
    made = await asyncio.gather(*(world.made(key=str(n), said=str(n), riding=None, history=history) for n in range(4)))
    assert all(made) and len(most) == 4
    assert max(most) == 1, "one at a time"


async def test_too_much_waiting_is_a_summary_that_failed() -> None:
    world = World(pool=WorkPool("reading", 1, waiting=0))
    held = threading.Event()
    busy = asyncio.create_task(world.pool.run("another", held.wait))
    await asyncio.sleep(0)
    assert await world.made() is None
    assert "pieces of work" in world.reported[0][2]
    held.set()
    await busy


async def test_a_fault_of_ours_is_no_summary_and_no_error() -> None:
    world = World(RuntimeError("a bug"))
    assert await world.made() is None
    assert [fault for _, _, fault in world.reported] == ["a fault of the proxy: RuntimeError"]
