"""What follows a refusal, and what is remembered of it. No upstream, no clock."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from proxy.dialects.chat import CHAT
from proxy.plan.turn import Addition, Complaint, Verdict
from proxy.requests import windows
from proxy.requests.planned import Planned
from proxy.requests.versions import FORGIVING, FORGOTTEN_AFTER, Refusal, Refusals, Versions
from proxy.upstream.headers import Headers
from tests.requests.planning import MOVING, SHORT, planned

USAGE, PLACE, ANY = Addition.USAGE, Addition.PLACE, Addition.ANY
THINKING, LOOSE = Addition.THINKING, Addition.LOOSE
OVERFLOW, GENERATION, FINAL = Verdict.OVERFLOW, Verdict.GENERATION, Verdict.FINAL
REFUSED = Refusal(400, Headers(), b"")
ALL = frozenset((USAGE, PLACE, ANY))


def versions() -> Versions:
    nothing: Any = None
    return Versions(nothing, Refusals(), CHAT, nothing)


def left(tries: Versions, carried: frozenset[Addition]) -> frozenset[Addition]:
    """What is changed in the next version, of what could be."""
    if ANY in tries.without:
        return tries.without & FORGIVING
    return carried - tries.without


def course(*complaints: Complaint, carried: frozenset[Addition] = ALL) -> list[str]:
    """How a request is sent, one after another, if upstream complains like this."""
    tries = versions()
    sent = []
    for complaint in complaints:
        rest = left(tries, carried)
        sent.append("+".join(sorted(rest)) or "own")
        if not tries.strike(REFUSED, complaint, rest):
            return [*sent, "end"]
    return [*sent, "+".join(sorted(left(tries, carried))) or "own"]


@pytest.mark.parametrize(
    ("complaints", "sent"),
    [
        ([ANY, ANY, ANY], ["any+place+usage", "any+usage", "own", "end"]),
        ([USAGE, ANY, ANY, ANY], ["any+place+usage", "any+place", "any", "own", "end"]),
        ([USAGE, USAGE], ["any+place+usage", "any+place", "own"]),
        ([ANY, USAGE, ANY], ["any+place+usage", "any+usage", "any", "own"]),
        ([FINAL], ["any+place+usage", "end"]),
        ([GENERATION, GENERATION, GENERATION], ["any+place+usage"] * 2 + ["own", "end"]),
        ([OVERFLOW, OVERFLOW, OVERFLOW, OVERFLOW], ["any+place+usage"] * 3 + ["own", "end"]),
        ([OVERFLOW, FINAL], ["any+place+usage"] * 2 + ["end"]),
    ],
)
def test_what_follows_a_refusal(complaints: list[Complaint], sent: list[str]) -> None:
    assert course(*complaints) == sent


def test_what_is_not_in_the_request_is_not_left_out() -> None:
    assert course(USAGE, carried=frozenset((ANY,))) == ["any", "own"]


def test_tools_that_are_not_strict_are_made_strict_before_anything_else_is_given_up() -> None:
    carried = ALL - {PLACE} | {LOOSE}
    assert course(LOOSE, LOOSE, carried=carried) == ["any+loose+usage", "any+usage", "own"]
    assert course(LOOSE, carried=ALL - {PLACE}) == ["any+usage", "own"]


def test_overflow_of_the_clients_own_bytes_is_planned_anew_and_they_are_not_sent_again() -> None:
    for complaint, carried in ((ANY, ALL - {PLACE}), (FINAL, ALL)):
        tries = versions()
        assert tries.strike(REFUSED, OVERFLOW, frozenset())
        assert not tries.strike(REFUSED, complaint, carried)
    tries = versions()
    assert tries.strike(REFUSED, OVERFLOW, frozenset()) and not tries.without
    assert tries.strike(REFUSED, USAGE, ALL) and tries.without == {USAGE}


@pytest.mark.parametrize("carried", [ALL, frozenset()], ids=["changed", "own"])
def test_thinking_that_no_longer_fits_is_dropped_once(carried: frozenset[Addition]) -> None:
    tries = versions()
    assert tries.strike(REFUSED, THINKING, carried) and tries.without == {THINKING}
    again = tries.strike(REFUSED, THINKING, carried)
    assert again is bool(carried) and (not again or ANY in tries.without)


@pytest.mark.parametrize("complaint", [THINKING, ANY])
def test_where_dropping_thinking_is_in_vain_the_clients_own_bytes_follow(
    complaint: Complaint,
) -> None:
    carried = ALL - {PLACE}
    tries = versions()
    assert tries.strike(REFUSED, THINKING, carried) and tries.strike(REFUSED, complaint, carried)
    assert tries.without == {THINKING, ANY}
    assert tries.strike(REFUSED, complaint, FORGIVING) and tries.without == {ANY}
    assert not tries.strike(REFUSED, THINKING, frozenset())
    tries = versions()
    assert tries.strike(REFUSED, THINKING, carried) and tries.strike(REFUSED, complaint, carried)
    assert not tries.strike(REFUSED, FINAL, FORGIVING)


def test_a_client_that_changes_its_history_itself_is_told() -> None:
    assert not versions().strike(REFUSED, THINKING, frozenset(), changed=False)


@given(
    st.lists(st.sampled_from([*Addition, *Verdict])),
    st.sets(st.sampled_from([USAGE, PLACE, LOOSE])),
)
def test_every_course_ends_soon_and_with_the_clients_own_bytes_unless_nothing_would_help(
    complaints: list[Complaint], carried: set[Addition]
) -> None:
    tries = versions()
    own = False
    for number, complaint in enumerate([*complaints, *[ANY] * 10]):
        rest = left(tries, frozenset((ANY, *carried)))
        own = own or not rest
        if not tries.strike(REFUSED, complaint, rest):
            assert own or complaint is FINAL
            return
        assert number < 10
    raise AssertionError("it never ends")


# -- what is remembered ----------------------------------------------------------------------------

ME, OTHER = "acme-1", "acme-2"


class Time:
    now = 1_000.0

    def __call__(self) -> float:
        return self.now


async def one(messages: Any = SHORT, **members: Any) -> Planned:
    made, _ = await planned(messages, **members)
    return made


async def test_two_refusals_are_believed_for_ten_minutes_unless_the_addition_is_taken() -> None:
    time, asked = Time(), await one()
    known = Refusals(time)

    def believed() -> bool:
        return PLACE in known.refused(ME, asked)

    known.note(ME, asked, [PLACE], [])
    assert not believed()
    known.note(ME, asked, [], [PLACE])
    known.note(ME, asked, [PLACE], [])
    assert not believed()
    known.note(ME, asked, [PLACE], [])
    time.now += FORGOTTEN_AFTER - 1
    assert believed()
    time.now += 1
    assert not believed()
    known.note(ME, asked, [PLACE], [])
    assert believed(), "one refusal is enough this time"
    known.note(ME, asked, [], [PLACE])
    assert not believed()


async def test_nothing_else_is_left_out() -> None:
    known, asked = Refusals(), await one()
    for _ in range(2):
        known.note(ME, asked, [PLACE], [])
    assert known.refused(ME, asked) == {PLACE}
    assert not known.refused(OTHER, asked)
    assert not known.refused(ME, await one(model="n"))
    assert not known.refused(ME, await one(response_format={"type": "json_object"}))
    elsewhere = replace(asked.policy.upstream, base_url="http://o/v1")
    assert not known.refused(ME, replace(asked, policy=replace(asked.policy, upstream=elsewhere)))
    assert known.refused(ME, await one(MOVING)) == {PLACE}, "another conversation"


async def test_a_refusal_that_names_no_addition_is_about_its_conversation() -> None:
    known, asked = Refusals(), await one(MOVING)
    for _ in range(2):
        known.note(ME, asked, [ANY], [])
    longer = [*MOVING, {"role": "assistant", "content": "So."}, {"role": "user", "content": "And?"}]
    assert known.refused(ME, await one(longer)) == {ANY}
    other = json.loads(json.dumps(MOVING).replace("rules", "others"))
    assert not known.refused(ME, await one(other))


async def test_no_namespace_pushes_out_what_another_has_learned() -> None:
    known, asked = Refusals(), await one()
    for _ in range(2):
        known.note(ME, asked, [PLACE], [])
    for number in range(2 * windows.LEARNED):
        another = replace(asked, request=replace(asked.request, model=f"m{number}"))
        for _ in range(2):
            known.note("mallory", another, [PLACE], [])
        if not number:
            first = another
    assert known.refused(ME, asked) == {PLACE}
    assert not known.refused("mallory", first)


async def test_who_has_learned_nothing_takes_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "NAMESPACES", 10)
    known, asked = Refusals(), await one()
    for _ in range(2):
        known.note(ME, asked, [PLACE], [])
    for number in range(20):
        assert not known.refused(f"made-up-{number}", asked)
        known.note(f"made-up-{number}", asked, [], [PLACE])
    assert known.refused(ME, asked) == {PLACE}
