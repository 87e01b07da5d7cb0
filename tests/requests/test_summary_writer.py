"""The calls for one snapshot: how many, with what, and what is taken of the answers."""

from __future__ import annotations

import itertools
import json
import threading
from typing import Any

import pytest

from proxy.errors import OffloadError, Overloaded, UpstreamBroken
from proxy.plan.plan import Role
from proxy.plan.summary import Section, SummaryAnswer, mentions
from proxy.policies.tenants import Tenant
from proxy.policy import Compress, Offload, Policy
from proxy.requests.summary_writer import Snapshot, Spent, SummaryJob, write
from proxy.threads import WorkPool

GOOD = SummaryAnswer(200, "<state_snapshot>the record</state_snapshot>", 100, 20, 80)
TOO_LONG = SummaryAnswer(400, too_long=True)
UNUSABLE = SummaryAnswer(200, "Hello!")
REFUSED = SummaryAnswer(400, refused=True)


class World:
    """A model that gives these answers, and then good ones."""

    def __init__(self, *answers: SummaryAnswer | BaseException) -> None:
        self.answers = list(answers)
        self.asked: list[Any] = []
        self.spent = Spent()
        self.fault = ""

    async def ask(self, body: bytes) -> SummaryAnswer:
        self.asked.append(json.loads(body))
        answer = self.answers.pop(0) if self.answers else GOOD
        if isinstance(answer, BaseException):
            raise answer
        return answer

    async def made(self, group: int = 0, **changes: Any) -> Snapshot | None:
        """Return the snapshot; None if there is none for a named reason, which is `fault`."""
        compress = Compress(snapshot_tokens=100, group_token_threshold=group)
        fields: dict[str, Any] = {
            "tenant": Tenant(Policy(offload=Offload(store_dir="/s", compress=compress)), "ns"),
            "model": "m",
            "dialect": "chat",
            "replaced_tokens": 1000,
            "window": None,
            "riding": lambda task: json.dumps({"ride": task}).encode(),
            "alone": lambda text, most: json.dumps({"alone": text}).encode(),
            "history": lambda: [Section("1 user", "word " * 900)],
            "originals": "/s/compressed_group_1.txt",
            "ask": self.ask,
        }
        pool = WorkPool("reading", 2)
        self.spent = Spent()
        try:
            return await write(
                SummaryJob(**fields | changes), self.spent, lambda text, _: len(text.split()), pool
            )
        except OffloadError as error:
            self.fault = str(error)
            return None
        finally:
            pool.close()


def of(words: str) -> SummaryAnswer:
    return SummaryAnswer(200, f"<state_snapshot>{words}</state_snapshot>")


async def test_one_call_on_the_conversation_is_the_rule() -> None:
    world = World()
    assert await world.made() == Snapshot("the record", 2, "m")
    assert [set(body) for body in world.asked] == [{"ride"}]
    assert world.spent == Spent(100, 20, 80, 1)


async def test_a_record_gets_references_and_exact_details() -> None:
    world = World(of("the words, see /s/a.txt"))
    made = await world.made(
        replaced=lambda: [mentions(Section("1 tool", "the code is heliotrope-7291", Role.TOOL))],
        references=lambda: {"/s/a.txt": "result of look", "/s/b.txt": "result of read_log x"},
    )
    assert made and made.text == (
        "the words, see /s/a.txt\n"
        "<exact_details>\n- the code is heliotrope-7291\n</exact_details>\n"
        "<stored_results>\n- /s/a.txt: result of look\n- /s/b.txt: result of read_log x\n</stored_results>"
    )
    assert made.tokens == len(made.text.split())


@pytest.mark.parametrize("replaced", [12, 60, 90, 140, 400])
async def test_what_is_added_never_makes_a_snapshot_larger_than_what_it_replaces(
    replaced: int,
) -> None:
    world = World(of("word " * 10))
    made = await world.made(
        replaced_tokens=replaced,
        replaced=lambda: [
            mentions(
                Section(
                    "1 tool", "\n".join(f"name{n} is code-{n:03}" for n in range(200)), Role.TOOL
                )
            )
        ],
        references=lambda: {f"/s/{n}.txt": "result of look" for n in range(90)},
    )
    assert made and 10 <= made.tokens < replaced
    assert made.tokens < 10 + 2 * 100 + 20, (
        "references take as many tokens as the record may, details what is left"
    )


async def test_an_earlier_record_is_given_to_the_model_without_what_we_added() -> None:
    world = World()
    earlier = "the words\n<exact_details>\n- 512 MB\n</exact_details>"
    assert await world.made(riding=None, earlier=earlier)
    assert "the words" in world.asked[0]["alone"] and "512 MB" not in world.asked[0]["alone"]


@pytest.mark.parametrize("answer", [TOO_LONG, REFUSED], ids=["too long", "refused"])
async def test_what_cannot_ride_is_made_from_originals_at_once(answer: SummaryAnswer) -> None:
    world = World(answer)
    assert await world.made()
    assert [set(body) for body in world.asked] == [{"ride"}, {"alone"}]


@pytest.mark.parametrize(
    ("answers", "fault"),
    [
        ([REFUSED, REFUSED], "upstream answered 400"),
        ([SummaryAnswer(500)], "upstream answered 500"),
        ([UpstreamBroken("x")], "x"),
    ],
)
async def test_a_fault_of_upstream_is_not_tried_again(answers: list[Any], fault: str) -> None:
    world = World(*answers)
    assert await world.made() is None
    assert len(world.asked) == len(answers) and world.fault == fault


async def test_too_long_is_halved_until_it_fits_each_call_updating_the_last() -> None:
    world = World(TOO_LONG, *(of(f"part {number}") for number in range(3)))
    history = [Section(f"{number} user", f"word{number} " * 1000) for number in range(3)]
    made = await world.made(
        riding=None, group=2500, history=lambda: history, earlier="the one before"
    )
    contents = [body["alone"] for body in world.asked]
    assert made and made.text == f"part {len(contents) - 2}"
    assert "the one before" in contents[0] and "the one before" in contents[1]
    assert all(f"part {number}" in content for number, content in enumerate(contents[2:]))
    assert [
        sum(content.count(f"word{number} ") for content in contents[1:]) for number in range(3)
    ] == [1000] * 3


async def test_what_is_too_long_whatever_we_do_fails() -> None:
    world = World(*[TOO_LONG] * 20)
    assert await world.made(group=2000) is None
    assert len(world.asked) < 6
    assert "too long" in world.fault


@pytest.mark.parametrize("rides", [True, False])
async def test_a_snapshot_costs_at_most_four_calls_whatever_upstream_answers(rides: bool) -> None:
    history = [Section(f"{number} tool", f"word{number} " * 400, Role.TOOL) for number in range(8)]
    changes: dict[str, Any] = {"group": 600, "history": lambda: history}
    changes |= {} if rides else {"riding": None}
    for answers in itertools.product([GOOD, UNUSABLE, TOO_LONG], repeat=Compress.max_calls):
        world = World(*answers)
        made = await world.made(**changes)
        assert 1 <= len(world.asked) <= Compress.max_calls
        assert made or world.fault
        assert not made or len(world.asked) > len(answers) or GOOD in answers


async def test_what_is_left_is_shortened_to_the_calls_that_are_left() -> None:
    """A try that fails costs a call; the last call covers all that no other has."""
    history = [Section(f"{number} tool", f"word{number} " * 1000, Role.TOOL) for number in range(5)]
    world = World(GOOD, UNUSABLE)
    assert await world.made(riding=None, group=1500, history=lambda: history)
    contents = [body["alone"] for body in world.asked]
    assert len(contents) == 4
    assert all(f"word{number} " in "".join([contents[0], *contents[2:]]) for number in range(5))
    assert all(len(content.split()) < 1500 + 600 for content in contents)
    assert "/s/compressed_group_1.txt" in contents[-1]
    assert "no closed" in contents[2] and "no closed" not in contents[3]


async def test_the_window_that_upstream_names_counts() -> None:
    history = [
        Section(f"{number} tool", f"word{number} " * 1000, Role.TOOL) for number in range(30)
    ]
    world = World(SummaryAnswer(400, too_long=True, window=9000))
    assert await world.made(riding=None, history=lambda: history)
    assert 1 < len(world.asked) <= 4
    assert all(len(body["alone"].split()) < 8100 for body in world.asked[1:])


async def test_reading_and_rendering_leave_the_loop() -> None:
    threads: list[str] = []

    def history() -> list[Section]:
        threads.append(threading.current_thread().name)
        return [Section("1 user", "word " * 900)]

    assert await World().made(riding=None, history=history)
    assert threads and threads[0] != threading.main_thread().name


async def test_too_much_waiting_is_a_summary_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def full(pool: WorkPool, caller: str, work: Any) -> Any:
        raise Overloaded("More than 1,000 pieces of work wait", retry_after=1)

    world = World()
    monkeypatch.setattr(WorkPool, "run", full)
    assert await world.made() is None
    assert "pieces of work" in world.fault and not world.asked
