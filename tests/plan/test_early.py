"""Results that move early because that pays: the rule as a table, and its promises as
properties."""

from __future__ import annotations

from itertools import takewhile

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from proxy.plan.plan import Cause, Item, Plan, Role, Room, live
from proxy.plan.planner import PAYBACK, Fold, least_freed
from proxy.policy import Mode, Offload
from tests.plan.test_planner import found, histories, history, points, policy
from tests.written import fold


def rules(**changes: object) -> Offload:
    """Real prices, and a ceiling out of reach unless a test says otherwise."""
    defaults: dict[str, object] = {
        "cached_read": 0.1,
        "cache_write": 1.25,
        "max_total_tokens": 10**6,
    }
    return policy(**{**defaults, **changes})  # type: ignore[arg-type]


def causes(
    text: str, offload: Offload, room: Room | None = None, tools: int = 0
) -> list[tuple[int, Cause]]:
    plan = fold(history(text), offload, room or Room(), tools)
    return [(event.point, event.cause) for event in plan.events]


def segments(items: list[Item], plan: Plan) -> list[tuple[int, int]]:
    """What a request sends: each message that is left with its tokens; the snapshot counts as
    message -1."""
    boundary = plan.boundaries[-1] if plan.boundaries else None
    sent = [(-1 - boundary.end, 0)] if boundary else []
    for index, one in enumerate(items):
        if not boundary or index >= boundary.end or index in boundary.pins:
            sent.append((index, live(one, plan.moves.get(index))))
    return sent


TABLE: dict[str, tuple[str, list[int], list[int]]] = {
    "a large one leaves once little comes after it": ("u a t:5000 a:10 u", [2], [5]),
    "one whose next seven reads do not pay for the rest stays": (
        "u a t:5000 a:3100 u" + " a:10 u" * 10,
        [],
        [],
    ),
    "a small one leaves where next to nothing follows": ("u a t:900 a:10 u", [2], [5]),
    "small ones leave together": ("u a t:300 a:90 t:300 a:90 u", [2, 4], [7]),
    "old ones behind which much comes stay": ("u a t:1500 a:9000 t:5000 a:10 u", [4], [7]),
    "until the newest can take them along": (
        "u a t:1500 a:800 t:9000 a:10 u a t:20000 a u",
        [2, 4, 8],
        [7, 11],
    ),
    "what has not been answered stays": ("u a t:5000 a:10 t:1500", [2], [5]),
}


@pytest.mark.parametrize(("text", "moved", "asked"), TABLE.values(), ids=TABLE.keys())
def test_the_newest_old_results_leave_when_that_pays(
    text: str, moved: list[int], asked: list[int]
) -> None:
    assert sorted(fold(history(text), rules(), Room()).moves) == moved
    assert causes(text, rules()) == [(point, Cause.EARLY) for point in asked]


@pytest.mark.parametrize(("views", "moved_at"), [(1, 5), (2, 7), (3, 9)])
def test_a_result_stays_for_so_many_replies(views: int, moved_at: int) -> None:
    assert causes("u a t:9000 a:10 t:5 a:10 t:5 a:10 t:5", rules(keep_views=views)) == [
        (moved_at, Cause.EARLY)
    ]


FREE, COLD = rules(cached_read=0.0, cache_write=1.0), rules(cached_read=1.0, cache_write=1.0)
HEADED = "s:4000 u a t:5000 a:10 u a:10 u"
CAUSED: dict[str, tuple[str, Offload, Room, int, list[tuple[int, Cause]]]] = {
    "a finished turn counts as seen, whose steps a client may make one reply of": (
        "u a t:9000 a:10 u", rules(keep_views=9), Room(), 0, [(5, Cause.EARLY)]
    ),
    "an event without tools of ours": (HEADED, rules(), Room(), 0, [(6, Cause.EARLY)]),
    "the first one pays for our tools and all that comes after them": (HEADED, rules(), Room(), 400, []),
    "nothing pays where reads are free": ("u a t:50000 " + "a:10 u " * 30, FREE, Room(), 0, []),
    "everything pays without a cache": ("u a t:300 a:9000 u", COLD, Room(), 0, [(5, Cause.EARLY)]),
    "the ceiling does not wait for views or prices": (
        "u a t:5000 a:10 u", rules(keep_views=9, max_total_tokens=5000), Room(), 0, [(5, Cause.TOTAL)]
    ),
    "a full window need not pay": (
        "u a t:900 a:10 t:900", rules(keep_views=9), Room(3500, aside=1300), 0, [(5, Cause.WINDOW)]
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "offload", "room", "tools", "found"), CAUSED.values(), ids=CAUSED.keys()
)
def test_what_causes_an_event(
    text: str, offload: Offload, room: Room, tools: int, found: list[tuple[int, Cause]]
) -> None:
    assert causes(text, offload, room, tools) == found


def test_a_result_that_is_still_new_stays_behind_an_old_one_that_moves() -> None:
    text = "u a t:9000 a:10 t:300 a:10 t:300 a:10 t:10"
    plan = fold(history(text), rules(keep_views=3), Room())
    assert {index: plan.events[move.event - 1].point for index, move in plan.moves.items()} == {
        2: 9
    }


def test_a_plan_says_how_far_the_next_event_is() -> None:
    items = history("u a t:900 a:600 t:100 a:10 t:300 a:10 t:10")
    now = fold(items, rules(keep_views=2), Room()).standing
    assert (now.total, now.ceiling, now.results, now.old) == (1950, 10**6, 2, 1)
    behind = 50 + 600 + 100 + 10 + 300 + 10 + 10
    assert now.pays_after == -(-1.15 * behind // (0.1 * 850)) > PAYBACK


# -- an expired cache ------------------------------------------------------------------------------


def paused(text: str, offload: Offload, at: dict[int, int], tools: int = 0) -> Plan:
    """The plan of a history in which upstream's cache had expired at these points, after so many
    seconds."""
    items, state = history(text), Fold(offload, Room(), tools)
    for index, one in enumerate(items):
        state.add(one, at.get(index, 0))
    return state.plan(at.get(len(items), 0))


EXPIRED: dict[str, tuple[str, Offload, int, list[int]]] = {
    "an old result leaves however much comes after it": ("u a t:900 a:9000 u", rules(), 0, [2]),
    "all of them leave together": ("u a t:900 a:9000 t:300 a:9000 u", rules(), 0, [2, 4]),
    "what has not been answered stays": ("u a t:900 a:9000 t:900", rules(), 0, [2]),
    "what was answered too rarely stays": (
        "u a t:900 a:9000 t:10 a t:10",
        rules(keep_views=3),
        0,
        [],
    ),
    "the newest messages stay": ("u a t:900 a:9000 u", rules(keep_recent_count=3), 0, []),
    "small results stay": ("u a t:200 a:9000 u", rules(), 0, []),
    "nothing leaves where reads are free": ("u a t:900 a:9000 u", rules(cached_read=0.0), 0, []),
    "what would not pay for our tools stays": ("u a t:300 a:9000 u", rules(), 400, []),
    "what pays for them leaves": ("u a t:900 a:9000 u", rules(), 400, [2]),
}


@pytest.mark.parametrize(
    ("text", "offload", "tools", "moved"), EXPIRED.values(), ids=EXPIRED.keys()
)
def test_old_results_leave_where_the_cache_has_expired(
    text: str, offload: Offload, tools: int, moved: list[int]
) -> None:
    end = len(history(text))
    plan = paused(text, offload, {end: 720}, tools)
    assert sorted(plan.moves) == moved
    assert [(event.cause, event.pause) for event in plan.events] == [(Cause.EXPIRED, 720)] * bool(
        moved
    )
    assert paused(text, offload, {}, tools).moves == {}


def test_what_moved_after_a_pause_stays_moved() -> None:
    text = "u a t:900 a:9000 u a t:300 a:9000 u a u"
    at = {5: 720}
    assert [
        sorted(paused(" ".join(text.split()[:end]), rules(), at).moves) for end in (5, 7, 9, 11)
    ] == [[2]] * 4


# -- properties ------------------------------------------------------------------------------------

paying = st.builds(
    rules,
    mode=st.sampled_from([Mode.COMPACT, Mode.COMPRESS, Mode.AUTO]),
    max_total_tokens=st.sampled_from([0, 1000, 5000, 10**6]),
    limit=st.sampled_from([1000, 100_000]),
    keep_views=st.sampled_from([1, 2, 4]),
    cached_read=st.sampled_from([0.0, 0.1, 0.5]),
    cache_write=st.sampled_from([0.5, 1.0, 1.25]),
)
rooms = st.builds(Room, st.sampled_from([None, 500, 3000]))


@pytest.mark.parametrize("cause", [Cause.EARLY, Cause.TOTAL, Cause.WINDOW])
def test_the_properties_are_of_plans_with_events(cause: Cause) -> None:
    """Each would hold if nothing ever moved."""

    def caused(given: tuple[list[Item], Offload, Room]) -> bool:
        return any(event.cause is cause for event in fold(*given).events)

    assert found(st.tuples(histories(), paying, rooms), caused)


@given(histories(), paying, rooms)
def test_an_event_at_the_ceiling_frees_a_tenth_of_it_and_not_more_than_needed(
    items: list[Item], offload: Offload, room: Room
) -> None:
    plan = fold(items, offload, room)
    for number, event in enumerate(plan.events, 1):
        if event.cause is not Cause.TOTAL or any(
            boundary.event == number for boundary in plan.boundaries
        ):
            continue
        ceiling, total = plan.standing.ceiling, event.total
        freed = {index: items[index].tokens - items[index].preview for index, move in plan.moves.items()
                 if move.event == number and not move.first_preview}  # fmt: skip
        first_seen = any(
            move.event == number and move.first_preview for move in plan.moves.values()
        )
        assert total > ceiling
        assert first_seen or sum(freed.values()) >= least_freed(ceiling)
        if freed and not first_seen:
            assert total - (sum(freed.values()) - freed[max(freed)]) > ceiling // 2


@given(histories(), paying, rooms)
def test_early_moves_pay_within_seven_requests(
    items: list[Item], offload: Offload, room: Room
) -> None:
    for point in points(items):
        plan = fold(items[:point], offload, room)
        if (
            not plan.events
            or plan.events[-1].point != point
            or plan.events[-1].cause is not Cause.EARLY
        ):
            continue
        moved = [index for index, move in plan.moves.items() if move.event == len(plan.events)]
        assert min(moved) > max((b.end for b in plan.boundaries), default=0) - 1
        sent = dict(segments(items[:point], plan))
        again = sum(size for index, size in sent.items() if index >= min(moved))
        freed = plan.events[-1].total - plan.standing.total
        assert (
            PAYBACK * offload.cached_read * freed
            >= (offload.cache_write - offload.cached_read) * again - 1e-6
        )


@given(histories(), paying, st.sets(st.integers(0, 40)))
def test_requests_only_grow_between_two_events(
    items: list[Item], offload: Offload, expired: set[int]
) -> None:
    """In sizes; also where the cache had expired at some points."""
    earlier: list[tuple[int, int]] = []
    events, state = 0, Fold(offload, Room())
    asked = set(points(items))
    for point, one in enumerate(items):
        pause = int(point in expired)
        plan = state.plan(pause)
        state.add(one, pause)
        if point not in asked:
            continue
        sent = segments(items[:point], plan)
        if len(plan.events) == events:
            assert sent[: len(earlier)] == earlier
        earlier, events = sent, len(plan.events)


@given(histories(), paying, st.sampled_from([0, 400]))
def test_an_edited_system_prompt_changes_no_decision(
    items: list[Item], offload: Offload, tools: int
) -> None:
    """At any size if requests have our tools from the start, and within a power of two if the first
    event adds them."""
    leading = sum(one.tokens for one in takewhile(lambda one: one.role is Role.SYSTEM, items))
    assume(leading)
    size = 50_000 if not tools else 1 << (leading - 1).bit_length()
    edited = [
        msgspec.structs.replace(items[0], tokens=items[0].tokens + size - leading),
        *items[1:],
    ]
    plans = [fold(past, offload, Room(), tools) for past in (items, edited)]
    assert len({(str(plan.moves), plan.boundaries, plan.events) for plan in plans}) == 1


@given(histories(), paying)
def test_early_results_were_answered_often_enough(items: list[Item], offload: Offload) -> None:
    asked = list(points(items))
    plan = fold(items, offload, Room())
    for index, move in plan.moves.items():
        if move.event and items[index].role is Role.TOOL:
            event = plan.events[move.event - 1]
            replies = [point for point in asked if index < point < event.point]
            over = any(one.role is Role.USER for one in items[index : event.point])
            assert over or len(replies) >= (offload.keep_views if event.cause is Cause.EARLY else 1)


def test_the_newest_reply_keeps_its_answers_and_older_ones_shrink() -> None:
    items = history("u a t:10 a t:10 a a t:10")
    used = [fold(items[:size], rules(), Room()).used for size in range(len(items) + 1)]
    assert used == [0, 0, 0, 1, 1, 3, 3, 3, 5], "a prefill has not been answered yet"
