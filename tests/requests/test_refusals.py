"""What to try after a refusal, what refusals teach, for whom and for how long. No upstream, no clock."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.plan.reasons import Reason
from proxy.plan.refusals import Addition, Complaint, Verdict
from proxy.requests import refusals
from proxy.requests.refusals import FIRST_SPAN, FORGIVING, LONGEST_SPAN, Belief, RefusalMemory, Subject, Tries

TOOLS, USAGE, PLACE, ANY = Addition.TOOLS, Addition.USAGE, Addition.PLACE, Addition.ANY
THINKING = Addition.THINKING
OVERFLOW, GENERATION, FINAL = Verdict.OVERFLOW, Verdict.GENERATION, Verdict.FINAL
ALL = frozenset((TOOLS, USAGE, PLACE, ANY))

# -- what comes next --------------------------------------------------------------------------------------------------


def course(*complaints: Complaint, carried: frozenset[Addition] = ALL) -> list[str]:
    """How a request is sent, one after another, if upstream complains like this."""
    tries: Tries | None = Tries()
    sent = []
    for complaint in complaints:
        assert tries is not None
        rest = frozenset() if tries.reason else carried - tries.without
        sent.append("+".join(sorted(rest)) or "own")
        tries = tries.after(complaint, rest)
    rest = frozenset() if tries is None or tries.reason else carried - tries.without
    return [*sent, "end" if tries is None else "+".join(sorted(rest)) or "own"]


@pytest.mark.parametrize(
    ("complaints", "sent"),
    [
        ([TOOLS], ["any+place+tools+usage", "own"]),
        ([ANY, ANY], ["any+place+tools+usage", "own", "end"]),
        ([USAGE, ANY, TOOLS], ["any+place+tools+usage", "any+place+tools", "own", "end"]),
        ([USAGE, USAGE], ["any+place+tools+usage", "any+place+tools", "own"]),
        ([PLACE, USAGE, TOOLS], ["any+place+tools+usage", "any+tools+usage", "any+tools", "own"]),
        ([FINAL], ["any+place+tools+usage", "end"]),
        ([GENERATION, GENERATION, GENERATION], ["any+place+tools+usage"] * 2 + ["own", "end"]),
        ([OVERFLOW, OVERFLOW, OVERFLOW, OVERFLOW], ["any+place+tools+usage"] * 3 + ["own", "end"]),
        ([OVERFLOW, FINAL], ["any+place+tools+usage"] * 2 + ["end"]),
    ],
)
def test_what_follows_a_refusal(complaints: list[Complaint], sent: list[str]) -> None:
    assert course(*complaints)[: len(sent)] == sent


def test_what_is_not_in_the_request_is_not_left_out() -> None:
    assert course(USAGE, carried=frozenset((ANY, TOOLS))) == ["any+tools", "own"]


def test_overflow_of_the_clients_own_bytes_is_planned_anew_and_they_are_not_sent_again() -> None:
    tries = Tries().after(OVERFLOW, frozenset())
    assert tries is not None and tries.replanned == 1
    assert tries.after(TOOLS, ALL) is None
    assert tries.after(FINAL, ALL) is None
    without = tries.after(USAGE, ALL)
    assert without is not None and without.without == {USAGE}


@pytest.mark.parametrize("carried", [ALL, frozenset()], ids=["changed", "own"])
def test_thinking_that_no_longer_fits_is_dropped_once(carried: frozenset[Addition]) -> None:
    tries = Tries().after(THINKING, carried)
    assert tries is not None and tries.without == tries.blamed == {THINKING} and not tries.reason
    again = tries.after(THINKING, carried)
    assert again is None if not carried else again is not None and again.reason is Reason.REFUSED


@pytest.mark.parametrize("complaint", [THINKING, ANY])
def test_where_dropping_thinking_is_in_vain_the_clients_own_bytes_follow_and_nothing_is_learned_of_it(
    complaint: Complaint,
) -> None:
    tries = Tries().after(THINKING, ALL)
    assert tries is not None
    again = tries.after(complaint, ALL)
    assert again is not None
    own = again.after(complaint, FORGIVING)
    assert own is not None and own.without == own.blamed == {ANY}
    assert own.after(THINKING, frozenset()) is None
    assert again.after(FINAL, FORGIVING) is None


def test_a_client_that_changes_its_history_itself_is_told() -> None:
    assert Tries().after(THINKING, frozenset(), concerned=False) is None


@pytest.mark.parametrize("complaint", [OVERFLOW, GENERATION])
def test_refusals_that_blame_no_addition(complaint: Complaint) -> None:
    tries: Tries | None = Tries()
    while tries is not None and not tries.reason:
        tries = tries.after(complaint, ALL)
    assert tries is not None and tries.reason is Reason.REFUSED and tries.blamed == frozenset()


@given(st.lists(st.sampled_from([*ALL, THINKING, *Verdict])), st.sets(st.sampled_from([TOOLS, USAGE, PLACE])))
def test_every_course_ends_soon_and_with_the_clients_own_bytes_unless_nothing_would_help(
    complaints: list[Complaint], carried: set[Addition]
) -> None:
    tries, own = Tries(), False
    for number, complaint in enumerate([*complaints, *[ANY] * 3]):
        rest = tries.without & FORGIVING if tries.reason else frozenset((ANY, *carried)) - tries.without
        own = own or not rest
        after = tries.after(complaint, rest)
        if after is None:
            assert own or complaint is FINAL
            return
        tries = after
        assert number < 10


# -- what is believed -------------------------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def told() -> list[Belief]:
    return []


@pytest.fixture
def memory(clock: Clock, told: list[Belief]) -> RefusalMemory:
    return RefusalMemory(told.append, clock)


ONE = Subject("acme-1", "http://up/v1", "m", TOOLS, "json_object stream")


def refuse(memory: RefusalMemory, subject: Subject = ONE, times: int = 2) -> None:
    for _ in range(times):
        memory.refused(subject)


def test_one_refusal_is_not_believed_and_two_are(memory: RefusalMemory, told: list[Belief]) -> None:
    refuse(memory, times=1)
    assert not memory.holds(ONE) and told == []
    refuse(memory, times=1)
    assert memory.holds(ONE)
    assert told == [Belief(ONE, 1_000_000 + FIRST_SPAN, FIRST_SPAN)]


@pytest.mark.parametrize(
    "other",
    [
        {"namespace": "acme-2"},
        {"upstream": "http://other/v1"},
        {"model": "n"},
        {"addition": USAGE},
        {"shape": "stream"},
    ],
)
def test_belief_is_about_nothing_else(memory: RefusalMemory, other: dict[str, str]) -> None:
    refuse(memory)
    assert not memory.holds(msgspec.structs.replace(ONE, **other))


def test_request_that_is_accepted_with_the_addition_refutes_everything(memory: RefusalMemory) -> None:
    refuse(memory, times=1)
    memory.accepted(ONE)
    refuse(memory, times=1)
    assert not memory.holds(ONE)
    refuse(memory, times=1)
    memory.accepted(ONE)
    assert not memory.holds(ONE)


def test_expired_belief_is_tried_again_by_one_request_and_renewed_for_twice_as_long(
    memory: RefusalMemory, clock: Clock, told: list[Belief]
) -> None:
    refuse(memory)
    spans = []
    for _ in range(10):
        clock.now = told[-1].until - 1
        assert memory.holds(ONE)
        clock.now += 1
        assert [memory.holds(ONE) for _ in range(3)] == [False, True, True], "one request tries again"
        memory.refused(ONE)
        spans.append(told[-1].span)
    assert spans == [min(FIRST_SPAN * 2**number, LONGEST_SPAN) for number in range(1, 11)]


def test_try_that_comes_to_nothing_leaves_the_belief_as_it_was(memory: RefusalMemory, clock: Clock) -> None:
    refuse(memory)
    clock.now += FIRST_SPAN
    assert not memory.holds(ONE)
    clock.now += FIRST_SPAN - 1
    assert memory.holds(ONE)
    clock.now += 1
    assert not memory.holds(ONE)


def test_requests_that_were_under_way_renew_nothing(memory: RefusalMemory, told: list[Belief]) -> None:
    refuse(memory, times=20)
    assert [belief.span for belief in told] == [FIRST_SPAN]


def test_beliefs_of_other_processes_are_taken_over(memory: RefusalMemory, clock: Clock, told: list[Belief]) -> None:
    memory.accept(Belief(ONE, clock.now + 50, 1_200))
    assert memory.holds(ONE) and told == []
    memory.accept(Belief(ONE, clock.now + 20, 600))
    clock.now += 50
    assert not memory.holds(ONE), "the later end counts"
    memory.refused(ONE)
    assert told == [Belief(ONE, clock.now + 2_400, 2_400)]


def test_expired_beliefs_of_others_are_not_taken_over(memory: RefusalMemory, clock: Clock) -> None:
    memory.accept(Belief(ONE, clock.now, 600))
    assert not memory.knows("acme-1")


@pytest.mark.parametrize("ahead", [2 * LONGEST_SPAN, 1e12, 1e308])
def test_beliefs_of_a_process_whose_clock_is_wrong_expire_within_a_day(
    memory: RefusalMemory, clock: Clock, ahead: float
) -> None:
    memory.accept(Belief(ONE, clock() + ahead, ahead))
    assert memory.holds(ONE)
    clock.now += LONGEST_SPAN + 1
    assert not memory.holds(ONE)


def test_clock_that_is_set_back_makes_no_belief_last_longer(memory: RefusalMemory, clock: Clock) -> None:
    refuse(memory)
    assert memory.holds(ONE)
    clock.now -= 5 * LONGEST_SPAN
    assert not memory.holds(ONE), "one request tries again"
    assert memory.holds(ONE)
    clock.now += FIRST_SPAN
    assert not memory.holds(ONE)


@pytest.mark.parametrize("ahead", [3_600.0, LONGEST_SPAN])
def test_belief_of_a_process_whose_clock_is_ahead_lasts_as_long_as_it_would_there(
    memory: RefusalMemory, clock: Clock, ahead: float
) -> None:
    memory.accept(Belief(ONE, clock() + ahead + FIRST_SPAN, FIRST_SPAN))
    assert memory.holds(ONE)
    clock.now += FIRST_SPAN
    assert not memory.holds(ONE)


def test_beliefs_survive_being_written_down() -> None:
    belief = Belief(ONE, 1.5, 600)
    assert msgspec.json.decode(msgspec.json.encode(belief), type=Belief) == belief


def test_no_namespace_pushes_out_the_beliefs_of_another(memory: RefusalMemory) -> None:
    refuse(memory)
    for number in range(2 * refusals.SUBJECTS):
        refuse(memory, Subject("mallory", "http://up/v1", f"m{number}", TOOLS, ""))
    assert memory.holds(ONE)
    assert not memory.holds(Subject("mallory", "http://up/v1", "m0", TOOLS, ""))


def test_number_of_namespaces_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "NAMESPACES", 8)
    memory = RefusalMemory()
    for number in range(9):
        refuse(memory, Subject(f"n{number}", "http://up/v1", "m", TOOLS, ""))
    assert not memory.knows("n0") and memory.knows("n8")
