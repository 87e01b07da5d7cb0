"""Calls and results pair within their step; what fits into no pair stays where it is, with its
step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.plan.history import Pairing, Place
from proxy.plan.plan import Item, Role, Room
from proxy.policy import Compress, Mode
from tests import written
from tests.written import fold

# A history in words: u user, s system, ? an entry of we do not know whom, "a:x,y" an assistant with
# these calls, "r:x" the result of x, "a?:x" and "r?:x" with something in them that we do not know.


def walked(history: str, pairing: Pairing | None = None) -> list[Place]:
    pairing = pairing or Pairing()
    return [pairing.add(*parsed(word)) for word in history.split()]


def parsed(word: str) -> tuple[Role, tuple[tuple[str, str], ...], str, bool]:
    kind, _, ids = word.partition(":")
    sealed = kind.endswith("?")
    role = {"u": Role.USER, "s": Role.SYSTEM, "a": Role.ASSISTANT, "?": Role.SEALED}.get(
        kind[:1], Role.TOOL
    )
    if role is Role.ASSISTANT:
        calls = (
            tuple((one.rstrip("~"), f"tool_{one}") for one in ids.split(",")) if ":" in word else ()
        )
        return role, calls, "", sealed
    return role, (), ids, sealed


def staying(history: str) -> str:
    """The history with a mark at each message that a cut leaves where it is."""
    stays = set[int]()
    for index, place in enumerate(walked(history)):
        stays.update(range(index - place.stays_before, index + place.stays))
    return "".join("!" if index in stays else "." for index in range(len(history.split())))


@pytest.mark.parametrize(
    ("history", "stays", "irregular"),
    [
        ("s u a u a:x,y r:y r:x a:z r:z", ".........", {}),
        ("u a:x,x r:x r:x a u", "......", {}),
        ("u a:, r: r: a u", "......", {}),
        ("u a:x u a u", ".!!..", {"no_result": 1}),
        ("u a:x,y r:x a:z r:z a", ".!!...", {"no_result": 1}),
        ("u a:x a:z r:z a", ".!...", {"no_result": 1}),
        ("u a:x u r:x a u", ".!!!..", {"no_result": 1, "no_call": 1}),
        ("u a:x u a r:x a u", ".!!!!..", {"no_result": 1, "no_call": 1}),
        ("u a:x s r:x a u", ".!!!..", {"no_result": 1, "no_call": 1}),
        ("u a:x r:x r:x u a u", ".!!!!..", {"no_call": 1}),
        ("u a:x,x r:x a u", ".!!..", {"no_result": 1}),
        ("u r:x a:x u a", "!!!!.", {"no_call": 1, "no_result": 1}),
        ("u a:x a:y r:x r:y a", ".!!!!.", {"no_result": 1, "no_call": 1}),
        ("u a:x r:w r:x a:y r:y", ".!!!..", {"no_call": 1}),
        ("u a: r:x a u", ".!!..", {"no_result": 1, "no_call": 1}),
        ("u a ? u a:x r:x", ".!!!..", {"sealed": 1}),
        ("u a ? a:x r:x a u", ".!!!!..", {"sealed": 1}),
        ("u a:x ? r:x a u", ".!!!..", {"sealed": 1}),
        ("? a:x r:x a u", "!!!..", {"sealed": 1}),
        ("u a? u a u", ".!!..", {"sealed": 1}),
        ("u a u? u a u", ".!!!..", {"sealed": 1}),
        ("u a? r:x a:x r:x", ".!!..", {"sealed": 1, "no_call": 1}),
        ("u a:x r?:x a:y r:y u a", ".!!....", {"sealed": 1}),
        ("u a:x,y r:y r?:x u a u", ".!!!!..", {"sealed": 1}),
        ("u a?:x r:x a u", ".!!..", {"sealed": 1}),
    ],
)
def test_what_fits_into_no_pair_stays_with_its_step(
    history: str, stays: str, irregular: dict[str, int]
) -> None:
    pairing = Pairing()
    walked(history, pairing)
    assert (staying(history), pairing.irregular, pairing.open) == (stays, irregular, {})


def test_results_find_their_tools_and_equal_ids_in_order() -> None:
    assert [place.tool for place in walked("u a:x,y r:y r:x r:z")] == [
        "",
        "",
        "tool_y",
        "tool_x",
        "",
    ]
    assert [place.tool for place in walked("a:x,x~ r:x r:x")] == ["", "tool_x", "tool_x~"]
    assert [place.fits for place in walked("a:x r:x r:x ? u a? u?")] == [
        True,
        True,
        False,
        False,
        True,
        False,
        False,
    ]


def test_a_call_at_the_end_may_still_be_answered() -> None:
    pairing = Pairing()
    assert staying("u a:x,y r:x") == "..."
    walked("u a:x,y r:x", pairing)
    assert pairing.open and not pairing.irregular


WORDS = st.lists(
    st.sampled_from(["u", "s", "a", "a:x", "a:x,y", "a:x,x", "r:x", "r:y", "?", "a?", "u?"]),
    max_size=30,
)


@given(WORDS, st.integers(0, 30))
def test_a_copy_goes_on_where_the_first_part_ended(words: list[str], cut: int) -> None:
    first = Pairing()
    before = walked(" ".join(words[:cut]), first)
    state = vars(first.copy())
    second = first.copy()
    assert before + walked(" ".join(words[cut:]), second) == walked(" ".join(words))
    assert vars(first) == state


# -- in the plan -----------------------------------------------------------------------------------

OFFLOAD = written.offload(
    mode=Mode.COMPRESS,
    max_total_tokens=1_000,
    keep_views=1,
    pin_user_tokens=20,
    compress=Compress(snapshot_tokens=100),
)


def cut(history: str) -> str:
    """What the last cut leaves: of the messages before it, those that it keeps; `|`; everything
    after it."""
    words = history.split()
    items = [
        Item(
            parsed(word)[0],
            10 if word[0] in "us" else 600,
            *(600, 600),
            0,
            place.stays,
            place.stays_before,
        )
        for word, place in zip(words, walked(history), strict=True)
    ]
    [*_, boundary] = fold(items, OFFLOAD, Room()).boundaries
    kept = [
        word
        for index, word in enumerate(words[: boundary.end])
        if index in boundary.pins or word == "s"
    ]
    return " ".join([*kept, "|", *words[boundary.end :]])


@pytest.mark.parametrize(
    ("history", "left"),
    [
        ("s u a:x r:x a:y r:y a:z r:z", "s u | a:z r:z"),
        ("s u a:x r:x a:w a:y r:y a:z r:z", "s u a:w | a:z r:z"),
        ("s u a:x r:x a:w u a u a:y r:y a:z r:z", "s u a:w u u | a:z r:z"),
        ("s u a:x r:x a:w,v r:w a:y r:y a:z r:z", "s u a:w,v r:w | a:z r:z"),
        ("s u a:x r:x a:w u r:w a:y r:y a:z r:z", "s u a:w u r:w | a:z r:z"),
        ("s u a:v r:v a:x r:x ? a:y r:y a:w r:w a:z r:z", "s u a:x r:x ? a:y r:y | a:z r:z"),
        ("s u a:w u a:x r:x a:y r:y a u", "s u a:w u | a u"),
        ("s u a:x r:x a:w r?:w a:y r:y a:z r:z", "s u a:w r?:w | a:z r:z"),
    ],
)
def test_a_cut_leaves_irregular_steps_in_their_places(history: str, left: str) -> None:
    assert cut(history) == left


def test_a_cut_puts_no_user_message_directly_after_results_that_stay() -> None:
    """The reply before the user message stays too, unless the client itself had none there."""
    assert cut("s u a:x r:x r:q a:y r:y a u a:y r:y a:z r:z") == "s u a:x r:x r:q a u | a:z r:z"
    assert cut("s u a:x r:x r:q a:y r:y u a:y r:y a:z r:z") == "s u a:x r:x r:q u | a:z r:z"
    assert cut("s u a:x r:x r:q a:y r:y a:z r:z a u") == "s u a:x r:x r:q | a u"
    assert (
        cut("s u a:x r:x r:q a:y r:y a s u u a:z r:z a:y r:y")
        == "s u a:x r:x r:q a s u u | a:y r:y"
    )
