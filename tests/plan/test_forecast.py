"""What a plan would have cost, beside the bench's model of a cache that has seen every request of
the session."""

from __future__ import annotations

import msgspec
import pytest

from bench.caches import Prefix
from bench.replay import Proxied, Recorded, cost, plainly
from proxy.plan.forecast import Billed, Forecast, forecast, summary_cost
from proxy.plan.forecast import cost as billed_cost
from proxy.plan.plan import Item, Plan, Role, Room
from proxy.policies import defaults
from proxy.policy import Compress, Inject, Mode, Offload, Policy, Tools, Wait
from proxy.requests.planned import OUR_TOOLS_TOKENS
from tests import written
from tests.written import fold

HEAD, OURS = 700, OUR_TOOLS_TOKENS
COMPACT = written.offload(mode=Mode.COMPACT, max_total_tokens=4_000, cache_write=1.0)
COMPRESS = written.offload(
    mode=Mode.COMPRESS,
    max_total_tokens=20_000,
    pin_user_tokens=100,
    cache_write=1.0,
    compress=Compress(snapshot_tokens=300),
)


def item(role: Role, tokens: int, preview: int | None = None) -> Item:
    shown = tokens if preview is None else preview
    return Item(role, tokens, shown, shown)


SESSION = [item(Role.SYSTEM, 200), item(Role.USER, 100)]
for number in range(30):
    SESSION += [item(Role.ASSISTANT, 80), item(Role.TOOL, 2_500 if number % 3 else 150, 40)]
POINTS = [index for index, one in enumerate(SESSION) if index and one.role is Role.ASSISTANT]
RUN = Recorded("run", "made up", SESSION, [1] * len(SESSION), HEAD, [{} for _ in SESSION], POINTS)


def at(point: int, policy: Policy, billed: Billed | None = None) -> tuple[Plan, Forecast]:
    items, policy = SESSION[:point], policy.for_request(has_tools=False)
    defined = OURS if policy.tools.inject is Inject.WHEN_OFFLOADING else 0
    plan = fold(items, policy.offload, Room(), defined)
    return plan, forecast(items, plan, policy, HEAD, OURS, billed)


def totals(policy: Policy) -> tuple[int, int]:
    forecasts = [at(point, policy)[1] for point in POINTS]
    return sum(one.before for one in forecasts), sum(one.after for one in forecasts)


@pytest.mark.parametrize("inject", [Inject.WHEN_OFFLOADING, Inject.ALWAYS])
@pytest.mark.parametrize("read", [0.0, 0.1, 0.5])
def test_a_session_costs_what_a_cache_of_prefixes_charges(read: float, inject: Inject) -> None:
    offload = msgspec.structs.replace(COMPACT, cached_read=read)
    before, after = totals(Policy(offload=offload, tools=Tools(inject=inject)))
    cache = Prefix(1, 1, read)
    assert before == pytest.approx(cost(plainly(RUN), cache), abs=len(POINTS))
    assert after == pytest.approx(cost(Proxied(offload, inject)(RUN), cache), abs=len(POINTS))
    assert (after < before) == (read > 0), (
        "with free reads, moving can only cost: a loss is shown as one"
    )


def test_writing_to_the_cache_costs_its_price() -> None:
    dear = msgspec.structs.replace(COMPACT, cache_write=2.0, cached_read=0.0)
    _, first = at(POINTS[0], Policy(offload=dear))
    assert first.before == first.after == 2 * (HEAD + 300)


def test_without_anything_to_move_both_costs_are_the_same_whatever_was_billed() -> None:
    quiet = Policy(offload=written.offload(max_total_tokens=10**9, keep_views=1_000))
    for billed in (
        None,
        Billed(50_000, 0),
        Billed(50_000, 49_999),
        Billed(50_000, 100),
        Billed(1, 1),
    ):
        plan, seen = at(POINTS[-1], quiet, billed)
        assert (
            plan.empty
            and seen.before == seen.after
            and seen.tokens == sum(one.tokens for one in SESSION[:-2])
        )
        assert (seen.compacted, seen.compressed) == (0, 0)


def test_an_event_costs_more_and_what_follows_costs_less() -> None:
    policy = Policy(offload=msgspec.structs.replace(COMPACT, cache_write=1.25))
    found = [at(point, policy) for point in POINTS]
    place = next(place for place, (plan, _) in enumerate(found) if plan.events)
    assert found[place][1].after > found[place][1].before
    assert found[place + 1][1].after < found[place + 1][1].before


def test_a_request_that_upstream_had_not_cached_saves_all_that_moved() -> None:
    policy = Policy(offload=COMPACT)
    plan, cold = at(POINTS[-1], policy, Billed(200_000, 0))
    assert plan.events
    sent = HEAD + sum(one.tokens for one in SESSION[: POINTS[-1]])
    assert cold.before == 200_000
    assert cold.after == pytest.approx(200_000 / sent * (HEAD + OURS + cold.tokens), abs=1)


def test_more_cached_never_costs_more() -> None:
    for point in POINTS:
        costs = [
            at(point, Policy(offload=COMPACT), Billed(100_000, cached))[1]
            for cached in range(0, 100_001, 5_000)
        ]
        assert [one.before for one in costs] == sorted((one.before for one in costs), reverse=True)
        assert [one.after for one in costs] == sorted((one.after for one in costs), reverse=True)


def test_a_snapshot_is_shown_from_the_next_request_on_and_its_call_is_paid_once() -> None:
    policy = Policy(offload=COMPRESS)
    found = [at(point, policy) for point in POINTS]
    place = next(place for place, (plan, _) in enumerate(found) if plan.boundaries)
    (_, wanted), (_, shown), (_, later) = found[place : place + 3]
    assert wanted.compressed == 0 and wanted.tokens == sum(
        one.tokens for one in SESSION[: POINTS[place]]
    )
    price = summary_cost(COMPRESS, wanted.tokens)
    assert wanted.after == pytest.approx(wanted.before + price, abs=1)
    assert shown.compressed > 0 and shown.tokens < wanted.tokens - 2_000
    assert shown.after > shown.before, "the prefix is written anew"
    assert later.after < later.before


def test_who_waits_for_a_snapshot_has_it_at_once() -> None:
    waiting = msgspec.structs.replace(
        COMPRESS, compress=Compress(snapshot_tokens=300, wait=Wait.ALWAYS)
    )
    found = [at(point, Policy(offload=waiting)) for point in POINTS]
    place = next(place for place, (plan, _) in enumerate(found) if plan.boundaries)
    assert found[place][1].compressed > 0
    assert found[place][1].tokens == found[place][0].live
    assert found[place][1].after - summary_cost(waiting, found[place][1].tokens) == pytest.approx(
        HEAD * 0.1 + OURS + found[place][1].tokens, abs=1
    )


def test_a_result_that_nobody_has_seen_counts_as_its_preview() -> None:
    unseen = Policy(
        offload=written.offload(
            mode=Mode.COMPACT, max_total_tokens=4_000, cache_write=1.0, unseen_limit=2_000
        )
    )
    plan, seen = at(POINTS[2], unseen)
    assert plan.moves and not plan.events
    assert seen.tokens == plan.live and seen.compacted == len(plan.moves)


def test_a_prefill_belongs_to_its_request() -> None:
    items = SESSION[: POINTS[4]]
    policy = Policy(offload=written.offload(max_total_tokens=10**9))
    plain = forecast(items, fold(items, policy.offload, Room()), policy, HEAD, OURS)
    begun = [*items, item(Role.ASSISTANT, 10)]
    prefilled = forecast(begun, fold(begun, policy.offload, Room()), policy, HEAD, OURS)
    assert prefilled.before == pytest.approx(plain.before + 10 * policy.offload.cache_write, abs=1)


def test_an_empty_history_costs_its_head() -> None:
    policy = Policy(offload=Offload())
    empty = forecast([], fold([], policy.offload, Room()), policy, 0, OURS)
    assert (empty.tokens, empty.before, empty.after) == (0, 0, 0)
    assert (
        forecast([], fold([], policy.offload, Room()), policy, 0, OURS, Billed(10, 5)).tokens == 0
    )


def test_a_long_request_costs_twice_as_much_where_the_list_says_so() -> None:
    listed = defaults().for_model("gpt-5.5").offload
    usual = billed_cost(listed, 272_000, 200_000)
    assert usual == 92_000
    assert billed_cost(listed, 272_001, 200_000) == 2 * (usual + 1)
    assert billed_cost(listed, 400_000, 0, largest=200_000) == 400_000, "of several rounds"
    assert billed_cost(defaults().for_model("gpt-5.4-mini").offload, 400_000, 0) == 400_000
