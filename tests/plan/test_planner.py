"""The fold as tables, and its promises as properties. A history is written as `s u a t:900`: roles
and sizes.

`U` is a user message that is large enough to move, and `T` a result that may not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import takewhile
from typing import TypeVar

import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from proxy.plan.plan import PATIENCE, Item, Move, Plan, Role, Room, live
from proxy.plan.planner import MOST_KEPT, MOST_PREVIEWS, Fold
from proxy.policy import Compress, Mode, Offload
from tests import written
from tests.written import fold

ROLES = {
    "s": Role.SYSTEM,
    "u": Role.USER,
    "U": Role.USER,
    "a": Role.ASSISTANT,
    "t": Role.TOOL,
    "T": Role.TOOL,
}
BRIEF, GLIMPSE = 50, 550


def history(text: str) -> list[Item]:
    """`s u:100 a t:5000`: roles with their tokens (10 where not said)."""
    return [item(word) for word in text.split()]


def item(word: str) -> Item:
    role, _, size = word.partition(":")
    tokens = int(size or 10)
    preview = min(tokens, BRIEF) if role in "tU" else tokens
    return Item(ROLES[role], tokens, min(tokens, GLIMPSE) if role == "t" else tokens, preview)


def policy(mode: Mode = Mode.COMPACT, **changes: object) -> Offload:
    """Small numbers, and free reads, so that only the ceiling and the window count unless a test
    says otherwise."""
    defaults: dict[str, object] = {
        "max_total_tokens": 1000,
        "max_tool_message_tokens": 200,
        "limit": 100_000,
        "pin_user_tokens": 100,
        "cached_read": 0,
        "cache_write": 1,
        "keep_views": 1,
        "compress": Compress(snapshot_tokens=100),
    }
    return written.Limited(mode=mode, **{**defaults, **changes})


def planned(text: str, offload: Offload | None = None, room: Room | None = None) -> Plan:
    return fold(history(text), offload or policy(), room or Room())


# -- compaction ------------------------------------------------------------------------------------

TABLE = {
    "nothing to do": ("s u a t:900 a u", [], []),
    "exactly the ceiling is not above it": ("s u a t:960 a u", [], []),
    "one token more is": ("s u a t:961 a u", [3], [6]),
    "leading system messages do not count": ("s:5000 s u a t:960 a u", [], []),
    "the user's own words count": ("s u:900 a t:201 a u", [3], [6]),
    "a result that was not read yet stays": ("s u a:900 t:900", [], []),
    "the step of an unread result stays whole": ("s u a:900 t:900 t:900", [], []),
    "small results stay": ("s u a t:200 t:200 t:200 t:200 t:200 t:200 a u", [], []),
    "the oldest move until half is left": ("s u a t:900 t:201 t:200 a u", [3], [8]),
    "as many as that takes": ("s u a t:700 t:601 t:201 a u", [3, 4], [8]),
    "two events": ("s u a t:1500 a t:10 a t:1500 a u", [3, 7], [6, 10]),
    "a prefill has read nothing": ("s u a:1500 t:1500 a", [], []),
    "a prefill has its request before it": ("s u a t:1500 a t:10 a", [3], [6]),
    "two replies in a row are one request": ("s u a t:1500 a a a u", [3], [8]),
    "no history": ("", [], []),
    "only a reply": ("a", [], []),
}


@pytest.mark.parametrize(("text", "moved", "points"), TABLE.values(), ids=TABLE.keys())
def test_above_the_ceiling_the_oldest_results_move(
    text: str, moved: list[int], points: list[int]
) -> None:
    plan = planned(text)
    assert sorted(plan.moves) == moved
    assert [event.point for event in plan.events] == points
    assert plan.live == sum(
        one.preview if index in moved else one.tokens for index, one in enumerate(history(text))
    )


def test_an_event_that_frees_less_than_a_tenth_of_the_ceiling_waits() -> None:
    offload = policy(max_total_tokens=3000)
    assert planned("s u a:3000 t:340 a u", offload).events == ()
    assert sorted(planned("s u a:3000 t:350 a u", offload).moves) == [3]
    assert sorted(planned("s u a:3000 t:340 a t:340 a u", offload).moves) == [3, 5]


@pytest.mark.parametrize(
    ("window", "ceiling"), [(None, 30_000), (100_000, 30_000), (50_000, 30_000), (16_000, 9_600)]
)
def test_the_ceiling_is_at_most_a_share_of_the_window(window: int | None, ceiling: int) -> None:
    assert planned("u a t:500 a u", Offload(), Room(window)).standing.ceiling == ceiling
    for result, moved in ((5_000, 0), (5_001, 1)):
        text = f"u a:{ceiling - 5_030} t:{result} a u"
        assert len(planned(text, policy(max_total_tokens=30_000), Room(window)).moves) == moved


def test_a_huge_unseen_result_is_previewed_at_first_sight() -> None:
    """Too large to be sent even once: previewed at once, and shortened further at the next
    event."""
    offload = policy(limit=5000, max_total_tokens=550)
    assert planned("s u a t:5000", offload).moves == {}
    plan = planned("s u a t:5001", offload)
    assert plan.moves == {3: Move(first_preview=True, event=0)}
    assert (plan.first, plan.events, plan.live) == (4, (), 30 + GLIMPSE)
    later = planned("s u a t:5001 a u", offload)
    assert later.moves == {3: Move(first_preview=True, event=1)}
    assert later.before(1).moves == {3: Move(first_preview=True, event=0)}


@pytest.mark.parametrize(
    ("keep", "moved"),
    [(0, [3, 5]), (1, [3, 5]), (2, [3, 5]), (3, [3]), (4, [3]), (5, []), (99, [])],
)
def test_the_recent_window_is_widened_to_whole_steps(keep: int, moved: list[int]) -> None:
    text = "s u a t:1500 a t:1500 a u"
    assert sorted(planned(text, policy(keep_recent_count=keep)).moves) == moved


@pytest.mark.parametrize("mode", [Mode.COMPACT, Mode.COMPRESS])
def test_a_system_message_that_a_client_moves_to_the_end_of_each_request_changes_nothing_before_it(
    mode: Mode,
) -> None:
    text, offload = "s u a:900 t:1500 a:900 t:10 a u", policy(mode, keep_recent_count=2)
    plan = planned(text, offload)
    assert plan.events
    for later in (f"{text} s", f"{text} s s", f"{text} a u s"):
        moved = planned(later, offload)
        assert (moved.moves, moved.boundaries) == (plan.moves, plan.boundaries)


def test_a_result_first_sent_at_an_event_is_not_in_the_plan_before_it() -> None:
    """So the request before it had no tools of ours, and a summary call on its prefix must not have
    them either."""
    offload = policy(Mode.COMPRESS, limit=5000, max_total_tokens=2100)
    plan = planned("s u a:2000 t:10 a t:6000", offload)
    assert plan.moves == {5: Move(first_preview=True, event=0)}
    assert [boundary.end for boundary in plan.boundaries] == [4]
    assert plan.before(1).empty


@pytest.mark.parametrize(
    ("move", "tokens"),
    [(None, 900), (Move(True, 0), GLIMPSE), (Move(True, 2), BRIEF), (Move(False, 1), BRIEF)],
)
def test_live_tokens_of_a_message(move: Move | None, tokens: int) -> None:
    assert live(item("t:900"), move) == tokens


# -- compression -----------------------------------------------------------------------------------


def test_auto_summarises_only_if_compaction_frees_too_little() -> None:
    auto = policy(Mode.AUTO)
    assert planned("s u a t:2000 a u", auto).boundaries == ()
    [boundary] = planned("s u a:1900 t:190 a:500 u", auto).boundaries
    assert (boundary.end, boundary.pins) == (4, {1})


def test_a_later_summary_replaces_the_snapshot() -> None:
    plan = planned("s u " + "a:600 t:10 " * 8 + "a u", policy(Mode.COMPRESS))
    assert len(plan.boundaries) > 1
    assert [boundary.end for boundary in plan.boundaries] == sorted(
        {boundary.end for boundary in plan.boundaries}
    )
    taken = sum(
        one.tokens
        for index, one in enumerate(history("s u " + "a:600 t:10 " * 8))
        if index < plan.boundaries[-1].end
    )
    whole = 20 + 610 * 8 + 20
    assert plan.live == whole - taken + 20 + 100


PINS: dict[str, tuple[str, int | None, int, set[int]]] = {
    "the user's first message, then the newest": (
        "s u:5000 a u:60 a u:50 a u:40 a u:10 a:2000 u",
        1,
        11,
        {1, 5, 7, 9},
    ),
    "one that does not fit ends them": ("s u a u:20 a u:101 a u a:2000 t:10 a u", None, 10, {1, 7}),
    "later system messages have a budget": (
        "s u a s:60 a s:50 a u:60 a s:40 a:2000 t:10 a u",
        None,
        12,
        {1, 5, 7, 9},
    ),
}


@pytest.mark.parametrize(("text", "keep", "end", "pins"), PINS.values(), ids=PINS.keys())
def test_small_messages_of_the_user_and_the_system_stay_within_a_budget(
    text: str, keep: int | None, end: int, pins: set[int]
) -> None:
    [boundary] = planned(text, policy(Mode.COMPRESS, keep_recent_count=keep)).boundaries
    assert (boundary.end, boundary.pins) == (end, pins)


WORDY = "s u a:1900 t:190 a:600 u"
"""A cut at its fifth message, where it has its third request."""


@pytest.mark.parametrize(("more", "waits"), [(0, True), (PATIENCE - 1, True), (PATIENCE, False)])
def test_an_event_waits_for_its_snapshot_as_long_as_its_patience(more: int, waits: bool) -> None:
    plan = planned(WORDY + " a u" * more, policy(Mode.AUTO))
    assert len(plan.events) == 1
    assert plan.shown(plan.boundaries[-1]) == plan
    assert plan.shown(None).empty == waits


def test_an_event_does_not_wait_beyond_the_next_one_or_without_a_summary() -> None:
    plan = planned("s u a:1900 t:190 a:600 t:1500 a u", policy(Mode.AUTO))
    assert [boundary.event for boundary in plan.boundaries] == [1]
    assert (len(plan.events), sorted(plan.moves)) == (2, [5])
    assert plan.shown(None) == plan
    alone = planned("s u a t:2000 a u", policy(Mode.AUTO))
    assert len(alone.events) == 1 and alone.shown(None) == alone


def test_a_result_moved_at_first_sight_does_not_wait() -> None:
    offload = policy(Mode.AUTO, limit=5000)
    plan = planned("s u a:2000 t:5001 a:100 u a t:6000", offload)
    assert plan.moves == {
        3: Move(first_preview=True, event=1),
        7: Move(first_preview=True, event=0),
    }
    assert len(plan.boundaries) == 1
    assert plan.shown(None).moves == {
        3: Move(first_preview=True, event=0),
        7: Move(first_preview=True, event=0),
    }


def test_unanswered_messages_are_never_summarised() -> None:
    plan = planned("s u a:2000 t:10 a:10 u:5000 u:5000", policy(Mode.COMPRESS, keep_recent_count=0))
    assert [boundary.end for boundary in plan.boundaries] == [5]


@pytest.mark.parametrize("mode", [Mode.AUTO, Mode.COMPRESS])
def test_a_history_with_very_many_messages_that_stay_is_not_summarised_any_further(
    mode: Mode,
) -> None:
    """All boundaries name them, so that a history of many boundaries would take quadratic time and
    memory."""
    lost = Item(Role.TOOL, 3, 3, 3, stays=True)
    for room in (Room(), Room(window=3000)):
        state = Fold(policy(mode), room)
        for _ in range(60):
            for one in [*history("a:2000 a u"), *[lost] * (MOST_KEPT // 30)]:
                state.add(one)
        boundaries = state.plan().boundaries
        assert 5 < len(boundaries) <= 31
        assert max(len(boundary.pins) for boundary in boundaries) <= MOST_KEPT + 40
        assert state.pins == sum(len(boundary.pins) for boundary in boundaries)


# -- what the user says ----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [Mode.COMPACT, Mode.AUTO, Mode.COMPRESS])
def test_the_last_two_user_messages_are_never_touched(mode: Mode) -> None:
    """However large they are, and however little room there is."""
    for room in (Room(), Room(window=500)):
        plan = planned("s u a U:5000 a U:6000 " + "a t:900 " * 4 + "a", policy(mode), room)
        assert plan.events
        assert not {3, 5} & plan.moves.keys()
        assert all(boundary.pins >= {1, 3, 5} for boundary in plan.boundaries)


@pytest.mark.parametrize("mode", [Mode.COMPACT, Mode.AUTO, Mode.COMPRESS])
def test_an_older_large_user_message_leaves_a_reference(mode: Mode) -> None:
    """And it displaces no small one: the rule at 3 stays word for word."""
    plan = planned("s u a u:20 a U:5000 a u a u " + "a t:90 " * 9 + "a", policy(mode))
    assert plan.moves[5] == Move(first_preview=False, event=1)
    assert all(boundary.pins >= {1, 3, 5} for boundary in plan.boundaries)


def test_previews_of_large_user_messages_are_bounded() -> None:
    text = "s u " + "a U:900 " * (MOST_PREVIEWS + 20) + "a:2000 a u a u"
    boundary = planned(text, policy(Mode.COMPRESS)).boundaries[-1]
    assert 0 <= len(boundary.pins) - MOST_PREVIEWS <= 3


def test_a_large_user_message_moves_at_the_first_event_after_it_left_the_last_two() -> None:
    text = "s u a U:5000 a:900 t:900 a u"
    assert sorted(planned(text).moves) == [5]
    assert {index: move.event for index, move in planned(text + " a u").moves.items()} == {
        5: 1,
        3: 2,
    }


def test_a_full_window_moves_large_user_messages_that_an_earlier_event_had_to_leave() -> None:
    text = "s u a U:400 a t:400 a t:10 a:100 u a u a:400 t:10 a:10"
    plan = planned(text, policy(max_total_tokens=10_000), Room(window=1100))
    assert {index: move.event for index, move in plan.moves.items()} == {5: 1, 3: 2}


def test_leading_system_messages_change_no_decision_within_their_share_of_the_window() -> None:
    text = "u " + "a:60 t:900 " * 12 + "a u"
    for room in (Room(), Room(window=8000, aside=500)):
        for mode in (Mode.COMPACT, Mode.COMPRESS, Mode.AUTO):
            paying = policy(mode, cached_read=0.1, cache_write=1.25, max_total_tokens=3000)
            plans = [planned(f"s:{size} " + text, paying, room) for size in (5, 500, 999)]
            assert plans[0].events
            decided = [(plan.moves, plan.boundaries, plan.events) for plan in plans]
            assert decided[0] == decided[1] == decided[2]


# -- the window ------------------------------------------------------------------------------------


def test_a_full_window_moves_every_seen_result_of_any_size() -> None:
    room = Room(window=1000, aside=0)
    plan = planned("s u a t:190 t:190 t:190 a t:190 a t:190", policy(max_total_tokens=10_000), room)
    assert sorted(plan.moves) == [3, 4, 5, 7]
    assert plan.fits


def test_a_window_still_full_summarises_everything_before_the_unseen() -> None:
    room = Room(window=2000, aside=750)
    text = "s u a:400 t:10 a:400 t:10 a:10 t:300"
    assert [
        boundary.end
        for boundary in planned(text, policy(Mode.AUTO, max_total_tokens=10_000), room).boundaries
    ] == [6]
    assert planned(text, policy(Mode.COMPACT, max_total_tokens=10_000), room).boundaries == ()


def test_a_request_that_never_fits_does_not_pay_for_a_summary_at_every_turn() -> None:
    text = "s:5000 u a:90 t:10 " + "a:10 t:10 " * 50 + "a u"
    plan = planned(text, policy(Mode.AUTO, max_total_tokens=10_000), Room(window=1000))
    assert not plan.fits
    assert len(plan.boundaries) <= 4


# -- properties ------------------------------------------------------------------------------------


@st.composite
def histories(draw: st.DrawFn) -> list[Item]:
    """Valid chats: steps of an assistant message and its results, user and system messages between
    them."""
    items = history("s") if draw(st.booleans()) else []
    sizes = st.sampled_from([5, 60, 199, 200, 201, 400, 900, 1500, 6000])
    for kind in draw(st.lists(st.sampled_from("uuUasaaa"), max_size=40)):
        if kind == "U" and not any(one.role is Role.USER for one in items):
            kind = "u"
        items.append(item(f"{kind}:{draw(sizes)}"))
        if kind == "a":
            items += [item(f"t:{draw(sizes)}") for _ in range(draw(st.integers(0, 3)))]
    return items


def points(items: list[Item]) -> Iterator[int]:
    """The number of messages in each request of the client."""
    for index, one in enumerate(items):
        if one.role is Role.ASSISTANT and (
            index == 0 or items[index - 1].role is not Role.ASSISTANT
        ):
            yield index


T = TypeVar("T")


def found(strategy: st.SearchStrategy[T], condition: Callable[[T], bool]) -> T:
    """The first example with this condition. Raises `NoSuchExample`."""
    return find(strategy, condition, settings=settings(max_examples=2_000, phases=[Phase.generate]))


offloads = st.builds(
    policy,
    st.sampled_from([Mode.COMPACT, Mode.COMPRESS, Mode.AUTO]),
    max_total_tokens=st.sampled_from([0, 300, 1000, 5000]),
    limit=st.sampled_from([1000, 100_000]),
    keep_recent_count=st.sampled_from([None, 0, 1, 5]),
    cached_read=st.sampled_from([0.0, 0.1, 0.5]),
    cache_write=st.sampled_from([0.0, 1.25]),
    pin_user_tokens=st.sampled_from([0, 100, 2000]),
    keep_views=st.sampled_from([1, 2, 4]),
)
rooms = st.builds(Room, st.sampled_from([None, 500, 3000]), st.sampled_from([0, 100]))


@given(histories(), offloads, rooms)
def test_decisions_are_final(items: list[Item], offload: Offload, room: Room) -> None:
    """At every earlier request the same was decided, and nothing of it is ever taken back."""
    whole = fold(items, offload, room)
    for point in points(items):
        earlier = fold(items[:point], offload, room)
        events = len(earlier.events)
        assert whole.events[:events] == earlier.events
        assert whole.boundaries[: len(earlier.boundaries)] == earlier.boundaries
        then = whole.before(events + 1) if len(whole.events) > events else whole
        assert {index for index in then.moves if index < point} == set(earlier.moves)


def test_the_properties_are_of_plans_with_boundaries_and_pins() -> None:
    """Each would hold if nothing were ever summarised."""

    def pinned(given: tuple[list[Item], Offload, Room]) -> bool:
        return any(len(boundary.pins) > 3 for boundary in fold(*given).boundaries)

    assert found(st.tuples(histories(), offloads, rooms), pinned)


@given(histories(), offloads, rooms)
def test_summary_boundaries_fall_between_steps_and_pins_have_budgets(
    items: list[Item], offload: Offload, room: Room
) -> None:
    plan = fold(items, offload, room)
    for boundary in plan.boundaries:
        point = plan.events[boundary.event - 1].point
        assert boundary.end == len(items) or items[boundary.end].role is not Role.TOOL
        assert all(
            items[index].role in (Role.USER, Role.SYSTEM) and index < boundary.end
            for index in boundary.pins
        )
        users = [index for index in range(point) if items[index].role is Role.USER]
        kept = {index for index in (*users[:1], *users[-2:]) if index < boundary.end}
        assert boundary.pins >= kept, "the first and the last two of that time"
        for role in (Role.USER, Role.SYSTEM):
            small = [
                items[index]
                for index in boundary.pins - kept
                if items[index].preview == items[index].tokens
            ]
            counted = [one.tokens for one in small if one.role is role]
            assert sum(counted) <= offload.pin_user_tokens
    ends = [boundary.end for boundary in plan.boundaries]
    assert ends == sorted(ends)


@given(histories(), offloads, rooms)
def test_planned_live_tokens_add_up(items: list[Item], offload: Offload, room: Room) -> None:
    plan = fold(items, offload, room)
    leading = len([*takewhile(lambda one: one.role is Role.SYSTEM, items)])
    gone = set[int]()
    for boundary in plan.boundaries[-1:]:
        gone = set(range(leading, boundary.end)) - boundary.pins
    left = sum(
        live(one, plan.moves.get(index)) for index, one in enumerate(items) if index not in gone
    )
    assert plan.live == left + (offload.compress.snapshot_tokens if plan.boundaries else 0)
    assert plan.fits == room.holds(plan.live)


@given(histories(), offloads)
def test_unseen_results_are_sent_whole(items: list[Item], offload: Offload) -> None:
    plan = fold(items, offload, Room(window=500))
    for index in range(len(items) - 1, -1, -1):
        if items[index].role is Role.ASSISTANT:
            break
        if index in plan.moves:
            assert items[index].tokens > offload.unseen_limit(None)


@given(histories(), offloads, rooms, st.integers(0, 3000), st.data())
def test_asking_a_fold_for_its_plan_does_not_change_it(
    items: list[Item],
    offload: Offload,
    room: Room,
    tool_definition_tokens: int,
    data: st.DataObject,
) -> None:
    state = Fold(offload, room, tool_definition_tokens)
    for number, one in enumerate(items):
        if data.draw(st.booleans()):
            assert state.plan() == fold(items[:number], offload, room, tool_definition_tokens)
            state = data.draw(st.sampled_from([state, state.copy()]))
        state.add(one)
    assert state.plan() == state.plan() == fold(items, offload, room, tool_definition_tokens)


@given(histories(), offloads, rooms)
def test_a_message_is_moved_only_if_it_gets_smaller(
    items: list[Item], offload: Offload, room: Room
) -> None:
    for index, move in fold(items, offload, room).moves.items():
        assert items[index].role in (Role.TOOL, Role.USER)
        assert (items[index].preview if move.event else items[index].first_preview) < items[
            index
        ].tokens


def test_planning_is_linear_in_the_history() -> None:
    """Ten thousand messages, an event at nearly every turn: it may not look back over all of them
    each time."""
    items = history("s u " + "a:10 t:300 " * 5000)
    offload = policy(max_total_tokens=0)
    touched = 0

    class Counting(list[Item]):
        def __getitem__(self, index):  # type: ignore[no-untyped-def, override]
            nonlocal touched
            touched += 1
            return super().__getitem__(index)

    state = Fold(offload, Room())
    state.messages.items = Counting()
    for one in items:
        state.add(one)
    assert len(state.plan().events) > 4000
    assert touched < 20 * len(items)
