"""What to try after a refusal."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.plan.turn import FORGIVING, Addition, Complaint, Form, Reason, Verdict

USAGE, PLACE, ANY = Addition.USAGE, Addition.PLACE, Addition.ANY
THINKING, LOOSE = Addition.THINKING, Addition.LOOSE
OVERFLOW, GENERATION, FINAL = Verdict.OVERFLOW, Verdict.GENERATION, Verdict.FINAL
ALL = frozenset((USAGE, PLACE, ANY))


def course(*complaints: Complaint, carried: frozenset[Addition] = ALL) -> list[str]:
    """How a request is sent, one after another, if upstream complains like this."""
    tries: Form | None = Form()
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
    assert course(*complaints)[: len(sent)] == sent


def test_what_is_not_in_the_request_is_not_left_out() -> None:
    assert course(USAGE, carried=frozenset((ANY,))) == ["any", "own"]


def test_tools_that_are_not_strict_are_made_strict_before_anything_else_is_given_up() -> None:
    carried = ALL - {PLACE} | {LOOSE}
    assert course(LOOSE, LOOSE, carried=carried) == ["any+loose+usage", "any+usage", "own"]
    assert course(LOOSE, carried=ALL - {PLACE}) == ["any+usage", "own"]


def test_overflow_of_the_clients_own_bytes_is_planned_anew_and_they_are_not_sent_again() -> None:
    tries = Form().after(OVERFLOW, frozenset())
    assert tries is not None and tries.replanned == 1
    assert tries.after(ANY, ALL - {PLACE}) is None
    assert tries.after(FINAL, ALL) is None
    without = tries.after(USAGE, ALL)
    assert without is not None and without.without == {USAGE}


@pytest.mark.parametrize("carried", [ALL, frozenset()], ids=["changed", "own"])
def test_thinking_that_no_longer_fits_is_dropped_once(carried: frozenset[Addition]) -> None:
    tries = Form().after(THINKING, carried)
    assert tries is not None and tries.without == tries.blamed == {THINKING} and not tries.reason
    again = tries.after(THINKING, carried)
    assert again is None if not carried else again is not None and again.reason is Reason.REFUSED


@pytest.mark.parametrize("complaint", [THINKING, ANY])
def test_where_dropping_thinking_is_in_vain_the_clients_own_bytes_follow_and_nothing_is_learned_of_it(
    complaint: Complaint,
) -> None:
    carried = ALL - {PLACE}
    tries = Form().after(THINKING, carried)
    assert tries is not None
    again = tries.after(complaint, carried)
    assert again is not None
    own = again.after(complaint, FORGIVING)
    assert own is not None and own.without == own.blamed == {ANY}
    assert own.after(THINKING, frozenset()) is None
    assert again.after(FINAL, FORGIVING) is None


def test_a_client_that_changes_its_history_itself_is_told() -> None:
    assert Form().after(THINKING, frozenset(), changed=False) is None


@pytest.mark.parametrize("complaint", [OVERFLOW, GENERATION])
def test_refusals_that_blame_no_addition(complaint: Complaint) -> None:
    tries: Form | None = Form()
    while tries is not None and not tries.reason:
        tries = tries.after(complaint, ALL)
    assert tries is not None and tries.reason is Reason.REFUSED and tries.blamed == frozenset()


@given(
    st.lists(st.sampled_from([*Addition, *Verdict])),
    st.sets(st.sampled_from([USAGE, PLACE, LOOSE])),
)
def test_every_course_ends_soon_and_with_the_clients_own_bytes_unless_nothing_would_help(
    complaints: list[Complaint], carried: set[Addition]
) -> None:
    tries, own = Form(), False
    for number, complaint in enumerate([*complaints, *[ANY] * 3]):
        rest = (
            tries.without & FORGIVING
            if tries.reason
            else frozenset((ANY, *carried)) - tries.without
        )
        own = own or not rest
        after = tries.after(complaint, rest)
        if after is None:
            assert own or complaint is FINAL
            return
        tries = after
        assert number < 10


def test_every_reason_is_a_sentence() -> None:
    said = {reason: reason.words() for reason in Reason if reason}
    assert len(set(said.values())) == len(said)
    assert all(words.startswith("sent as it came: ") for words in said.values())
    assert (
        Reason.FIELD.words("n", ["other"])
        == "sent as it came: the proxy's tools do not go with `n`"
    )
    assert Reason.FIELD.words("tools").endswith(
        "the client's tools have the names of the proxy's; rename one"
    )
    assert Reason.FIELD.words("new", ["new"]) == (
        "sent as it came: the proxy does not know what `new` means; where it is harmless, name it in the policy's "
        "`upstream.members`"
    )
