"""What a plan did, in words: a sentence for every cause, with the figures that decided."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given

from proxy.plan.plan import Cause, Item, Plan, Role, Room
from proxy.plan.planner import begun
from proxy.plan.rental import PAYBACK, SkiRental
from proxy.plan.telling import Answers, event_at, newly_used, told
from proxy.policy import Mode, Offload
from tests.plan.test_account import WORDY, paying, rules
from tests.plan.test_planner import histories, history

FIRST: dict[str, object] = {"plan": 1, "max_total_tokens": 1000}


def requests(items: list[Item], offload: Offload, room: Room) -> Iterator[tuple[list[Item], Plan]]:
    """Yield the history and the plan of each request of the client."""
    state = begun(offload, room)
    for index, one in enumerate(items):
        state.add(one)
        following = items[index + 1].role if index + 1 < len(items) else Role.ASSISTANT
        if one.role is not Role.ASSISTANT and following is Role.ASSISTANT:
            yield items[: index + 1], state.plan()


def said(text: str, offload: Offload, window: int | None = None) -> list[str]:
    """What the plan says at each request of the client."""
    room = Room(window=window)
    found = (told(past, plan, offload, window) for past, plan in requests(history(text), offload, room))
    return [words for words in found if words]


TABLE: dict[str, tuple[str, Offload, int | None, list[str]]] = {
    "seven more reads": (
        "u a t:5000 a:2900 u", rules(), None,
        ["Moved 1 result (5,000 tokens, 50 stay) because 7 more requests with it would cost as much as rewriting "
         "2,960 tokens."],
    ),
    "rent": (
        "u a t:5000 a:3100 u" + " a:10 u" * 8, rules(), None,
        ["Moved 1 result (5,000 tokens, 50 stay) because carrying it had cost as much as rewriting 3,300 tokens."],
    ),
    "rent of several": (
        "u a t:900 a:10 u a t:900 a:10 u", rules(), None,
        ["Moved 2 results (1,800 tokens, 100 stay) because carrying them had cost as much as rewriting 150 tokens."],
    ),
    "total, under plan 2": (
        "u a t:40000 a:10 u " + "a:600 u:5 " * 8, rules(mode=Mode.AUTO, max_total_tokens=1000, hard_total_tokens=10**6),
        None,
        ["Moved 1 result (40,000 tokens, 50 stay) because carrying it had cost as much as rewriting 70 tokens.",
         *(f"Summarised {count} old messages ({came} tokens as they came) because old history had grown to {old} "
           "tokens, above max_total_tokens (1,000), and the session stays no dearer than as it came; "
           f"{725 + 5 * (count - 3)} tokens are written anew."
           for count, came, old in ((5, "41,220", "1,270"), (7, "42,420", "1,200"), (9, "43,620", "1,200")))],
    ),
    "hard total": (
        WORDY, rules(mode=Mode.COMPRESS, max_total_tokens=1000, hard_total_tokens=3000), None,
        ["Summarised 6 old messages (3,600 tokens as they came) because old history had grown to 3,600 tokens, above "
         "hard_total_tokens (3,000), where an event need not pay for itself; 745 tokens are written anew."],
    ),
    "window": (
        "u a t:900 a:10 t:900", rules(), 1500,
        ["Moved 1 result (900 tokens, 50 stay) because the history, 1,830 tokens, did not fit the context window of "
         "1,500; 960 tokens are written anew."],
    ),
    "total, under plan 1": (
        "u a t:1500 a t:10 a" + " u a" * 30, rules(**FIRST), None,
        ["Moved 1 result (1,500 tokens, 50 stay) because old history had grown to 1,510 tokens, above max_total_tokens "
         "(1,000), and carrying it had cost as much as rewriting 70 tokens."],
    ),
    "a message of the user, beyond twice the total": (
        "u U:9000 a u a t:900 a u a u a u", rules(**FIRST), None,
        ["Moved 1 result (900 tokens, 50 stay) and 1 long user message (9,000 tokens, 50 stay) because old history had "
         "grown to 9,880 tokens, above twice max_total_tokens (1,000), where an event need not pay for itself; 150 "
         "tokens are written anew."],
    ),
    "first sight": (
        "u a t:9000 t:6000", rules(max_unseen_tool_tokens=5000), None,
        ["Sent only a preview of 2 new results (15,000 tokens, 1,100 stay), because each has more than "
         "max_unseen_tool_tokens (5,000)."],
    ),
    "nothing": ("u a t:9000", rules(), None, []),
}  # fmt: skip


@pytest.mark.parametrize(("text", "offload", "window", "words"), TABLE.values(), ids=TABLE.keys())
def test_every_cause_has_its_sentence(text: str, offload: Offload, window: int | None, words: list[str]) -> None:
    assert said(text, offload, window) == words


def test_an_event_that_waits_for_its_summary_says_so_and_answers_leave() -> None:
    offload = rules(mode=Mode.COMPRESS, max_total_tokens=1000, hard_total_tokens=3000)
    past, plan = next(
        (past, plan) for past, plan in requests(history(WORDY), offload, Room()) if event_at(plan, len(past))
    )
    words = told(past, plan, offload, None, waiting=True, answers=Answers(2, 3_400, 120))
    assert words.startswith("Summarised ") and words.endswith(
        "written anew. Requests are sent without this until its summary is ready. Replaced what grep and read_file "
        "answered before 2 replies (3,400 tokens, 120 stay) because the model has used it."
    )


@given(histories(), paying)
def test_figures_are_those_of_the_decision(items: list[Item], offload: Offload) -> None:
    """Every event is told, and each reply loses its hidden answers once."""
    lost: list[int] = []
    for past, plan in requests(items, offload, Room()):
        words, event = told(past, plan, offload, None), event_at(plan, len(past))
        assert ("written anew" in words or "rewriting" in words) == bool(event)
        if event:
            assert event.rewritten <= plan.live
            moved = [past[index] for index, move in plan.moves.items() if move.event == len(plan.events)]
            carried = PAYBACK * offload.cached_read * sum(item.tokens - item.preview for item in moved)
            price = round(SkiRental(offload).price(event.rewritten, None))
            assert event.cause is not Cause.RENT or max(event.paid, round(carried)) >= price
        lost += [index for index in newly_used(past, plan) if items[index].role is Role.ASSISTANT]
        assert lost == [index for index in range(plan.used) if items[index].role is Role.ASSISTANT]
