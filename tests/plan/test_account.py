"""Plan 2: every event pays for itself. Its rules as tables, and its promises as properties."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise, takewhile
from unittest.mock import patch

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from bench.caches import Breakpoints, Prompt
from proxy.plan import rental
from proxy.plan.breakpoints import BLOCKS, LOOKBACK
from proxy.plan.context import Gain
from proxy.plan.plan import Cause, Item, Plan, Role, Room, live
from proxy.plan.planner import begun, fold, folded, least_planned
from proxy.plan.rental import LEAST_COST, SkiRental
from proxy.policy import Mode, Offload
from tests.plan.test_planner import histories, history, offloads, policy


def rules(**changes: object) -> Offload:
    """Real prices, and total events out of reach unless a test says otherwise."""
    defaults: dict[str, object] = {
        "cached_read": 0.1,
        "cache_write": 1.25,
        "max_total_tokens": 10**6,
        "early_total_tokens": 0,
        "early_saved_tokens": 1000,
    }
    return policy(**{**defaults, **changes})  # type: ignore[arg-type]


def causes(text: str, offload: Offload, room: Room | None = None, tools: int = 0) -> list[tuple[int, Cause]]:
    plan = fold(history(text), offload, room or Room(), tools)
    return [(event.point, event.cause) for event in plan.events]


def points(items: list[Item]) -> Iterator[int]:
    """The number of messages in each request of the client."""
    for index, one in enumerate(items):
        if one.role is Role.ASSISTANT and (index == 0 or items[index - 1].role is not Role.ASSISTANT):
            yield index


def segments(items: list[Item], plan: Plan) -> list[tuple[int, int]]:
    """What a request sends: each message that is left with its tokens; the snapshot counts as message -1."""
    boundary = plan.boundaries[-1] if plan.boundaries else None
    sent = [(-1 - boundary.end, 0)] if boundary else []
    for index, one in enumerate(items):
        if not boundary or index >= boundary.end or index in boundary.pins:
            sent.append((index, live(one, plan.moves.get(index))))
    return sent


def blocks(items: Iterable[Item]) -> int:
    return sum(BLOCKS.get(one.role, 1) for one in items)


# -- the newest results -----------------------------------------------------------------------------------------------

TABLE: dict[str, tuple[str, list[int], list[int]]] = {
    "a large one leaves once little comes after it": ("u a t:5000 a:10 u", [2], [5]),
    "one whose next seven reads do not pay for the rest stays": ("u a t:5000 a:3100 u a:10 u", [], []),
    "until its rent is paid": ("u a t:5000 a:3100 u" + " a:10 u" * 10, [2], [19]),
    "freeing too little is not worth a reference": ("u a t:900 a:10 u a:10 u a:10 u", [], []),
    "small ones leave together": ("u a t:900 a:10 u a t:900 a:10 u", [2, 6], [9]),
    "old ones behind which much comes stay": ("u a t:1500 a:9000 t:5000 a:10 u", [4], [7]),
    "until the newest can take them along": ("u a t:1500 a:900 t:9000 a:10 u a t:20000 a u", [4, 8], [7, 11]),
    "what has not been answered stays": ("u a t:5000 a:10 t:1500", [2], [5]),
}


@pytest.mark.parametrize(("text", "moved", "asked"), TABLE.values(), ids=TABLE.keys())
def test_the_newest_results_leave_when_that_pays(text: str, moved: list[int], asked: list[int]) -> None:
    assert sorted(fold(history(text), rules(), Room()).moves) == moved
    assert causes(text, rules()) == [(point, Cause.RENT) for point in asked]


@pytest.mark.parametrize(("views", "moved_at"), [(1, 5), (2, 7), (3, 9)])
def test_a_result_stays_for_so_many_replies(views: int, moved_at: int) -> None:
    assert causes("u a t:9000 a:10 u a:10 u a:10 u", rules(min_views=views)) == [(moved_at, Cause.RENT)]


def test_the_first_event_pays_for_our_tools_and_all_that_comes_after_them() -> None:
    text = "s:4000 u a t:5000 a:10 u a:10 u"
    assert causes(text, rules()) == [(6, Cause.RENT)]
    assert causes(text, rules(), tools=400) == []


def test_free_reads_are_never_worth_an_event() -> None:
    assert causes("u a t:50000 " + "a:10 u " * 30, rules(cached_read=0.0, cache_write=1.0)) == []


# -- the account ------------------------------------------------------------------------------------------------------

WORDY = "u " + "a:600 u:5 " * 8


def test_a_summary_waits_until_savings_pay_for_it() -> None:
    """Nothing has been saved here, so only the hard limit summarises."""
    bound = rules(mode=Mode.COMPRESS, max_total_tokens=1000, hard_total_tokens=10**6)
    assert causes(WORDY, bound) == []
    assert causes(WORDY, rules(mode=Mode.COMPRESS, max_total_tokens=1000, hard_total_tokens=3000))[0][1] is Cause.HARD


def test_what_results_saved_pays_for_a_summary() -> None:
    saving = "u a t:40000 a:10 u " + "a:600 u:5 " * 8
    auto = rules(mode=Mode.AUTO, max_total_tokens=1000, hard_total_tokens=10**6)
    assert [cause for _, cause in causes(saving, auto)][:2] == [Cause.RENT, Cause.TOTAL]


def test_a_full_window_need_not_pay() -> None:
    assert (5, Cause.WINDOW) in causes("u a t:900 a:10 t:900", rules(), Room(window=1500))


def test_a_loss_that_the_policy_excludes_stops_results_from_moving() -> None:
    text = "s:900 u a t:5000 a:1000 u"
    assert [causes(text, rules(max_loss=loss), tools=300) for loss in (None, 0.5)] == [[(6, Cause.RENT)]] * 2
    assert causes(text, rules(max_loss=0.0), tools=300) == []


def test_an_early_loss_counts_as_if_the_conversation_had_cost_more_by_then() -> None:
    text = "s:900 u a t:5000 a:1000 u"
    assert causes(text, rules(max_loss=0.05), tools=300) == [(6, Cause.RENT)]
    with patch.object(rental, "LEAST_COST", 0):
        assert causes(text, rules(max_loss=0.05), tools=300) == []


def test_fewer_results_move_where_moving_more_would_lose_too_much() -> None:
    """Moving all saves most, but the newest alone have less to be written anew behind them."""
    results = [Gain(index=2, before=100, freed=5000, since=0), Gain(index=4, before=9000, freed=3000, since=5)]

    def newest(least: int) -> Gain | None:
        return SkiRental(rules()).worth_moving(
            results, 10, lambda freed, first: 0.0, lambda freed, first: first.before > least
        )

    found = [newest(least) for least in (0, 5000, 10_000)]
    assert [first and first.index for first in found] == [2, 4, None]


def test_old_results_that_do_not_pay_wait_for_the_hard_limit() -> None:
    """However much was saved before: what leaves at once must be a summary, which nothing else can do."""
    saved = "u a t:90000 a:10 u " + "a:100 t:900 " * 9 + "a:3000 u"
    limits = {"mode": Mode.COMPACT, "max_total_tokens": 1000, "min_saved_tokens": 100, "cached_read": 0.01}
    assert Cause.HARD not in [cause for _, cause in causes(saved, rules(**limits, hard_total_tokens=10**6))]
    assert Cause.TOTAL not in [cause for _, cause in causes(saved, rules(**limits, hard_total_tokens=10**6))]
    assert causes(saved, rules(**limits, hard_total_tokens=3000))[-1][1] is Cause.HARD


# -- properties -------------------------------------------------------------------------------------------------------

paying = st.builds(
    rules,
    mode=st.sampled_from([Mode.COMPACT, Mode.COMPRESS, Mode.AUTO]),
    max_total_tokens=st.sampled_from([0, 1000, 5000]),
    hard_total_tokens=st.sampled_from([None, 3000, 10**6]),
    max_unseen_tool_tokens=st.sampled_from([1000, 100_000]),
    min_views=st.sampled_from([1, 2, 4]),
    max_loss=st.sampled_from([None, 0.0, 0.1]),
    cached_read=st.sampled_from([0.0, 0.1, 0.5]),
    cache_write=st.sampled_from([0.5, 1.0, 1.25]),
)


@given(histories(), paying, st.sampled_from([0, 400]), st.sampled_from([0, 1000, LEAST_COST]), st.booleans())
def test_the_account_never_exceeds_its_limit(
    items: list[Item], offload: Offload, tools: int, least: int, marks: bool
) -> None:
    """After each event that must pay, our sum is within no proxy's, or within `max_loss` of it."""
    for point in points(items):
        with patch.object(rental, "LEAST_COST", least):
            state = folded(items[: point + 1], offload, Room(marks=marks), tools)
        latest = state.plan().events[-1:]
        if latest and latest[0].point == point:
            own, plain = state.account.own, state.account.plain
            if latest[0].cause is Cause.TOTAL:
                assert own <= plain + 1e-6
            elif latest[0].cause is Cause.RENT and offload.max_loss is not None:
                most = plain + (offload.max_loss and offload.max_loss * max(plain, least))
                assert own <= most + 1e-6


@given(histories(), paying, st.sampled_from([None, 500, 3000]))
def test_the_account_is_what_a_cache_of_prefixes_charges(
    items: list[Item], offload: Offload, window: int | None
) -> None:
    """Without summaries, whose calls cost extra."""
    room = Room(window)
    offload = rules(mode=Mode.COMPACT, min_views=offload.min_views, max_total_tokens=offload.max_total_tokens)
    leads = next((index for index, one in enumerate(items) if one.role is not Role.SYSTEM), len(items))
    own = plain = 0.0
    earlier: list[tuple[int, int]] = []
    for point in points(items):
        before = items[:point]
        sent = segments(before, fold(before, offload, room))[leads:]
        same = next(
            (at for at, pair in enumerate(zip(sent, earlier, strict=False)) if pair[0] != pair[1]), len(earlier)
        )
        kept, known = sum(size for _, size in sent[:same]), sum(items[index].tokens for index, _ in earlier)
        own += 0.1 * kept + 1.25 * (sum(size for _, size in sent) - kept)
        plain += 0.1 * known + 1.25 * (sum(one.tokens for one in before[leads:]) - known)
        earlier = sent
    state = folded(items, offload, room)
    assert state.account.own == pytest.approx(own)
    assert state.account.plain == pytest.approx(plain)


@given(histories(), paying)
def test_without_room_for_marks_it_is_what_a_cache_with_breakpoints_charges(
    items: list[Item], offload: Offload
) -> None:
    """The client's breakpoints are behind the system prompt and at the end, and no step has too many blocks."""
    asked = list(points(items))
    assume(all(blocks(items[before:point]) < LOOKBACK for before, point in pairwise([0, *asked])))
    offload = rules(mode=Mode.COMPACT, min_views=offload.min_views, max_total_tokens=offload.max_total_tokens)
    leads = next((index for index, one in enumerate(items) if one.role is not Role.SYSTEM), len(items))
    cache, own = Breakpoints(0.1, 1.25, LOOKBACK, least=0).cold(), 0.0
    for point in asked:
        sent = segments(items[:point], fold(items[:point], offload, Room(marks=False)))[leads:]
        counted = [((index, size), size, blocks([items[index]])) for index, size in sent]
        own += cache.charge(Prompt([("system", 0, 1), *counted]))
    assert folded(items, offload, Room(marks=False)).account.own == pytest.approx(own)


@pytest.mark.parametrize(("views", "kept", "kept_without"), [(2, 20_010, 20_000), (12, 20_010, None)])
def test_without_room_for_marks_upstream_finds_only_what_ended_a_little_earlier(
    views: int, kept: int, kept_without: int | None
) -> None:
    """The request before the result's own ended in front of its call. After a few replies it is too far back."""
    items, offload = history("u:20000 a t:5000 a:10" + " u:5 a:10" * 12), rules(max_loss=None, min_views=views)
    for marks, expected in ((True, kept), (False, kept_without)):
        events = fold(items, offload, Room(marks=marks)).events
        sent = [folded(items[: event.point], offload, Room()).plan().live for event in events]
        assert [live - event.rewritten for live, event in zip(sent, events, strict=True)] == [expected] * (
            expected is not None
        )


@given(histories(), paying, st.booleans())
def test_requests_only_grow_between_two_events(items: list[Item], offload: Offload, marks: bool) -> None:
    """O4, in sizes."""
    earlier, events = [], 0
    for point in points(items):
        plan = fold(items[:point], offload, Room(marks=marks))
        sent = segments(items[:point], plan)
        if len(plan.events) == events:
            assert sent[: len(earlier)] == earlier
        earlier, events = sent, len(plan.events)


@given(histories(), paying, st.sampled_from([0, 400]))
def test_an_edited_system_prompt_changes_no_decision(items: list[Item], offload: Offload, tools: int) -> None:
    """At any size if requests have our tools from the start, and within a power of two if the first event adds them."""
    leading = sum(one.tokens for one in takewhile(lambda one: one.role is Role.SYSTEM, items))
    assume(leading)
    size = 50_000 if not tools else 1 << (leading - 1).bit_length()
    edited = [msgspec.structs.replace(items[0], tokens=items[0].tokens + size - leading), *items[1:]]
    plans = [fold(past, offload, Room(), tools) for past in (items, edited)]
    assert len({(str(plan.moves), plan.boundaries, plan.events) for plan in plans}) == 1


@given(histories(), paying)
def test_results_stay_until_they_were_answered_often_enough(items: list[Item], offload: Offload) -> None:
    asked = list(points(items))
    plan = fold(items, offload, Room())
    for index, move in plan.moves.items():
        if move.event and items[index].role is Role.TOOL:
            replies = [point for point in asked if index < point < plan.events[move.event - 1].point]
            assert len(replies) >= offload.min_views


@given(histories(), offloads)
def test_small_histories_need_no_plan(items: list[Item], offload: Offload) -> None:
    if sum(one.tokens for one in items) <= min(least_planned(offload), offload.max_unseen_tool_tokens):
        assert fold(items, offload, Room()).empty


def test_the_newest_reply_keeps_its_answers_and_older_ones_shrink() -> None:
    items = history("u a t:10 a t:10 a a t:10")
    used = [fold(items[:size], rules(), Room()).used for size in range(len(items) + 1)]
    assert used == [0, 0, 0, 1, 1, 3, 3, 3, 5], "a prefill has not been answered yet"
    assert fold(items, policy(plan=1), Room()).used == 0, "under plan 1 they stay"


@given(histories(), paying, st.booleans())
def test_folding_on_from_a_copy_changes_nothing(items: list[Item], offload: Offload, marks: bool) -> None:
    state = begun(offload, Room(marks=marks))
    for one in items:
        state.plan()
        state = state.copy()
        state.add(one)
    whole = folded(items, offload, Room(marks=marks))
    assert (state.plan(), state.account.own, state.account.plain) == (
        whole.plan(),
        whole.account.own,
        whole.account.plain,
    )
