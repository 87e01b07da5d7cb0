"""What a plan did or waits for, in words: a sentence for every cause, with the figures that
decided."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given

from proxy.plan.forecast import Answers, described, event_at, newly_used, waiting
from proxy.plan.plan import Item, Plan, Role, Room
from proxy.plan.planner import Fold, least_freed
from proxy.policy import Mode, Offload
from tests.plan.test_early import paying, rooms, rules
from tests.plan.test_planner import histories, history, policy
from tests.written import fold

WORDY = "u " + "a:600 u:5 " * 8


def requests(items: list[Item], offload: Offload, room: Room) -> Iterator[tuple[list[Item], Plan]]:
    """Yield the history and the plan of each request of the client."""
    state = Fold(offload, room)
    for index, one in enumerate(items):
        state.add(one)
        following = items[index + 1].role if index + 1 < len(items) else Role.ASSISTANT
        if one.role is not Role.ASSISTANT and following is Role.ASSISTANT:
            yield items[: index + 1], state.plan()


def said(text: str, offload: Offload, window: int | None = None) -> list[str]:
    """What the plan says at each request of the client where it does something."""
    room = Room(window=window)
    found = (
        described(past, plan, offload, window)
        for past, plan in requests(history(text), offload, room)
    )
    return [words for words in found if not words.startswith("waiting: ")]


DONE: dict[str, tuple[str, Offload, int | None, list[str]]] = {
    "early": (
        "u a t:5000 a:2900 u", rules(), None,
        ["Moved 1 result (5,000 tokens, 50 stay) because 7 more requests with it would cost more than writing 2,960 "
         "tokens again."],
    ),
    "early, several": (
        "u a t:300 a:90 t:300 a:90 u", rules(), None,
        ["Moved 2 results (600 tokens, 100 stay) because 7 more requests with them would cost more than writing 290 "
         "tokens again."],
    ),
    "the ceiling": (
        "u a t:900 a t:900 a u", policy(), None,
        ["Moved 1 result (900 tokens, 50 stay) because the history had grown to 1,830 tokens, above 1,000 "
         "(max_total_tokens); 960 tokens are written again."],
    ),
    "the ceiling of a window": (
        "u a t:900 a t:2000 a", rules(keep_views=9), 4000,
        ["Moved 1 result (900 tokens, 50 stay) because the history had grown to 2,930 tokens, above 2,400 (60% of the "
         "context window); 2,060 tokens are written again."],
    ),
    "after a turn whose steps are one reply": (
        "u a t:300 t:300 a u", rules(keep_views=3), None,
        ["Moved 2 results (600 tokens, 100 stay) because 7 more requests with them would cost more than writing 120 "
         "tokens again."],
    ),
    "a summary": (
        WORDY, policy(Mode.COMPRESS, max_total_tokens=3000), None,
        ["Summarised 4 old messages (2,400 tokens as they came) because the history had grown to 3,035 tokens, above "
         "3,000 (max_total_tokens); 735 tokens are written again."],
    ),
    "a message of the user": (
        "u U:900 a u a t:900 a u a u a u", policy(), None,
        ["Moved 1 result (900 tokens, 50 stay) and 1 long user message (900 tokens, 50 stay) because the history had "
         "grown to 1,860 tokens, above 1,000 (max_total_tokens); 150 tokens are written again."],
    ),
    "first sight": (
        "u a t:9000 t:6000", rules(limit=5000), None,
        ["Sent only a preview of 2 new results (15,000 tokens, 1,100 stay), because each has more than 5,000 "
         "tokens."],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("text", "offload", "window", "words"), DONE.values(), ids=DONE.keys())
def test_every_cause_has_its_sentence(
    text: str, offload: Offload, window: int | None, words: list[str]
) -> None:
    assert said(text, offload, window) == words


def test_an_expired_cache_has_its_sentence() -> None:
    state, items = Fold(rules(), Room()), history("u a t:900 a:9000 u")
    for one in items:
        state.add(one)
    assert described(items, state.plan(720), rules(), None) == (
        "Moved 1 result (900 tokens, 50 stay) because the cache at upstream had expired after 12 minutes."
    )


def test_a_full_window_has_its_sentence() -> None:
    offload, items = rules(keep_views=9), history("u a t:900 a:10 t:900")
    plan = fold(items, offload, Room(3500, aside=1300))
    assert described(items, plan, offload, 3500) == (
        "Moved 1 result (900 tokens, 50 stay) because the request, with 1,830 tokens of history, did not fit the "
        "context window of 3,500; 960 tokens are written again."
    )


WAITING: dict[str, tuple[str, Offload, str]] = {
    "for results": ("u a u", policy(), "the history is 30 of 1,000 tokens; no result above 200 tokens is left to move"),
    "for replies": (
        "u a t:900", rules(),
        "the history is 920 of 1,000,000 tokens; 0 of 1 result is old, which takes 1 reply",
    ),
    "for more requests": (
        "u a t:900 a:600 t:300 a t:300", rules(keep_views=2),
        "the history is 2,130 of 1,000,000 tokens; 1 of 3 results are old, moving it pays after 18 more requests",
    ),
    "where reads are free": (
        "u a t:900 a u", policy(),
        "the history is 940 of 1,000 tokens; 1 result can move, and moving early saves nothing where cached input is "
        "free",
    ),
    "for nothing": (
        "u:1500 a u", policy(),
        "1,500 of 1,520 tokens are in the user's first message, which stays as it is: what a client writes into one "
        "message cannot be moved",
    ),
    "in compress": ("u a:600 u:5", policy(Mode.COMPRESS), "the history is 615 of 1,000 tokens"),
    "until an event frees enough": (
        "u a:900 t:240 a:2000 u", policy(max_total_tokens=2000),
        "the history is 3,160 tokens, above its ceiling of 2,000, but an event would free only 190; it waits until it "
        "frees 200, a tenth of the ceiling",
    ),
    "for results that are new": (
        "u a t:1500", rules(max_total_tokens=1000),
        "the history is 1,520 tokens, above its ceiling of 1,000, but nothing in it can move now; 1 new result stays "
        "for now",
    ),
    "in auto, where moving leaves no more than the ceiling": (
        "u a:1700 t:240 a:20 u", policy(Mode.AUTO, max_total_tokens=1950),
        "the history is 1,980 tokens, above its ceiling of 1,950, but an event would free only 190; it waits until it "
        "frees 195, a tenth of the ceiling",
    ),
    "for the ceiling, behind too many messages": (
        "u a t:900 a:3000 u " + "a u " * 150, rules(),
        "the history is 6,930 of 1,000,000 tokens; 1 of 1 result is old, but so much follows that moving "
        "waits for the ceiling",
    ),
    "where results may not move": (
        "u a T:900 T:900 a u", policy(max_total_tokens=3000),
        "the history is 1,840 of 3,000 tokens; 2 results above 200 tokens may not move",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("text", "offload", "words"), WAITING.values(), ids=WAITING.keys())
def test_what_it_waits_for_is_one_sentence(text: str, offload: Offload, words: str) -> None:
    items = history(text)
    plan = fold(items, offload, Room())
    assert plan.empty
    assert described(items, plan, offload, None) == waiting(plan, offload) == f"waiting: {words}"


def test_an_event_that_waits_for_its_summary_says_so_and_answers_leave() -> None:
    offload = policy(Mode.COMPRESS, max_total_tokens=3000)
    past, plan = next(
        (past, plan) for past, plan in requests(history(WORDY), offload, Room()) if event_at(plan)
    )
    words = described(past, plan, offload, None, late=True, answers=Answers(2, 3_400, 120))
    assert words.startswith(
        "Planned, and its summary is not ready yet: summarised "
    ) and words.endswith(
        "written again. Replaced what grep and read_file answered before 2 replies (3,400 tokens, 120 stay) because "
        "the model has used it."
    )
    later = [*past, *history("a u")]
    plan = fold(later, offload, Room())
    assert (
        described(later, plan, offload, None, late=True)
        == "waiting: the summary of old history is not ready yet"
    )


@given(histories(), paying, rooms)
def test_what_an_event_would_free_is_less_than_it_has_to(
    items: list[Item], offload: Offload, room: Room
) -> None:
    for _, plan in requests(items, offload, room):
        now = plan.standing
        if event_at(plan) is None and (now.full or now.total > now.ceiling):
            assert now.free < least_freed(now.ceiling, full=now.full)


def test_an_event_of_a_request_with_a_prefill_is_said() -> None:
    items = history("u a t:900 a t:900 a:5")
    assert described(items, fold(items, policy(), Room()), policy(), None).startswith(
        "Moved 1 result (900 tokens, 50 stay)"
    )


def test_a_request_that_does_not_fit_says_what_it_lacks() -> None:
    offload, items = policy(Mode.AUTO, max_total_tokens=5000), history("s:3000 u a:700 u")
    assert described(items, fold(items, offload, Room(2500)), offload, 2500) == (
        "waiting: the request does not fit the context window, but a summary of 100 tokens would free only 600 of the "
        "history's 720 tokens; it waits until it frees 750, half of the ceiling; no result above 200 tokens is left to "
        "move"
    )


@given(histories(), paying)
def test_every_request_has_a_sentence_and_each_reply_loses_its_hidden_answers_once(
    items: list[Item], offload: Offload
) -> None:
    lost: list[int] = []
    for past, plan in requests(items, offload, Room()):
        words, event = described(past, plan, offload, None), event_at(plan)
        assert ("written again" in words or "tokens again" in words) == bool(event)
        assert words
        if event:
            assert 0 <= event.rewritten <= plan.live
        lost += [index for index in newly_used(past, plan) if items[index].role is Role.ASSISTANT]
        assert lost == [index for index in range(plan.used) if items[index].role is Role.ASSISTANT]
