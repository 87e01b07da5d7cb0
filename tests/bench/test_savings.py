"""Caches and replays against sequences computed by hand, and the default policy's savings on the
recorded runs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from statistics import median

import msgspec
import pytest

from bench import profiles, savings
from bench.caches import (
    BREAKPOINTS,
    FREE_READS,
    GPT_5_6,
    MODELS,
    NO_CACHE,
    PRICED,
    THIRD_MARK,
    Prompt,
)
from bench.replay import (
    OUTPUT_PRICE,
    READ_CALL,
    SHRUNK,
    SUMMARY,
    SUMMARY_OUTPUT,
    TASK,
    Call,
    Kind,
    Proxied,
    Recorded,
    Strategy,
    breaks,
    cost,
    plainly,
)
from bench.strategies import PLACEHOLDER, window
from proxy.plan.plan import Item, Role
from proxy.policy import Compress, Inject, Mode, Offload, Wait
from proxy.requests.planned import OUR_TOOLS_TOKENS
from tests import written
from tests.transcripts import load, needed

ROLES = {"s": Role.SYSTEM, "u": Role.USER, "a": Role.ASSISTANT, "t": Role.TOOL}
BRIEF = 50


def prompt(text: str) -> Prompt:
    """`a:100 b:50*3`: segments by key, with their tokens and (one, where not said) blocks. The
    first is the head."""
    return Prompt(segment(word) for word in text.split())


def segment(word: str) -> tuple[str, int, int]:
    key, _, size = word.partition(":")
    tokens, _, blocks = size.partition("*")
    return key, int(tokens), int(blocks or 1)


def run(text: str, tools: int = 0) -> Recorded:
    """`s:10 u:10 a:10 t:900`: roles with their tokens."""
    items = [
        item(role, int(size)) for role, _, size in (word.partition(":") for word in text.split())
    ]
    points = [index for index, one in enumerate(items) if index and one.role is Role.ASSISTANT]
    return Recorded("run", "test", items, [1] * len(items), tools, [], points)


def item(role: str, tokens: int) -> Item:
    preview = min(tokens, BRIEF) if role == "t" else tokens
    return Item(ROLES[role], tokens, tokens, preview)


def sent(strategy: Strategy, recorded: Recorded) -> list[tuple[int, str]]:
    """Tokens of each call, and why it was made."""
    return [(call.prompt.tokens, call.kind.name.lower()) for call in strategy(recorded)]


def offload(mode: Mode, **changes: object) -> Offload:
    """Events as soon as there is anything to be moved."""
    defaults: dict[str, object] = {
        "max_total_tokens": 1000,
        "max_tool_message_tokens": 200,
        "cached_read": 0,
        "cache_write": 0,
        "keep_views": 1,
        "pin_user_tokens": 100,
        "compress": Compress(snapshot_tokens=100),
    }
    return written.offload(mode=mode, **{**defaults, **changes})


# -- caches ----------------------------------------------------------------------------------------

LONG = "a:1000 b:100"
SEQUENCES = {
    "128: from 1,024 tokens on, in whole units": (
        "128 x 0.5",
        [(LONG, 1100), (f"{LONG} c:300", 1400 - 1024 / 2), (f"{LONG} c:300", 1400 - 1280 / 2)],
    ),
    "128: a prefix that is too short": ("128 x 0.5", [(LONG, 1100), ("a:1000 x:500", 1500)]),
    "128: read at a quarter": ("128 x 0.25", [(LONG, 1100), (f"{LONG} c:300", 1400 - 1024 * 0.75)]),
    "128: read at a tenth": ("128 x 0.1", [(LONG, 1100), (f"{LONG} c:300", 1400 - 1024 * 0.9)]),
    "128: of any earlier prompt, not only the last": (
        "128 x 0.5",
        [("a:2048", 2048), ("b:2048", 2048), ("a:2048 c:1", 1025)],
    ),
    "64": ("64 x 0.1", [("a:63", 63), ("a:63 b:37", 100), ("a:63 b:37 c:50", 150 - 64 * 0.9)]),
    "16": ("16 x 0.1", [("a:100", 100), ("a:100 b:50", 150 - 96 * 0.9), ("x:1 a:100", 101)]),
    "16, reading free": (FREE_READS, [("a:100", 100), ("a:100 b:50", 54)]),
    "gpt-5.6: an entry is found however far back": (
        GPT_5_6,
        [
            ("s:2000 u:500", 2500 * 1.25),
            ("s:2000 u:500 t:200*30", 250 + 200 * 1.25),
            ("x:2000", 2500),
        ],
    ),
    "none": (NO_CACHE, [("a:100", 100), ("a:100", 100)]),
    "breakpoints: written, then read": (
        BREAKPOINTS,
        [("s:2000 u:500", 2500 * 1.25), ("s:2000 u:500 a:100 t:400", 250 + 500 * 1.25)],
    ),
    "breakpoints: behind a change, the head's is left": (
        BREAKPOINTS,
        [("s:2000 u:500", 2500 * 1.25), ("s:2000 x:300", 200 + 300 * 1.25)],
    ),
    "breakpoints: too little is not written": (
        BREAKPOINTS,
        [("s:500 u:500", 1000), ("s:500 u:500 a:24", 1024 * 1.25)],
    ),
    "breakpoints: nothing but breakpoints is an entry": (
        BREAKPOINTS,
        [("s:100 u:2000 a:500", 2600 * 1.25), ("s:100 u:2000 x:500", 2600 * 1.25)],
    ),
    "breakpoints: 20 blocks are looked at": (
        BREAKPOINTS,
        [("s:2000 u:500", 2500 * 1.25), ("s:2000 u:500 t:190*19", 250 + 190 * 1.25)],
    ),
    "breakpoints: and no 21st": (
        BREAKPOINTS,
        [("s:2000 u:500", 2500 * 1.25), ("s:2000 u:500 t:200*20", 200 + 700 * 1.25)],
    ),
}


@pytest.mark.parametrize(("model", "sequence"), SEQUENCES.values(), ids=SEQUENCES.keys())
def test_a_sequence_of_prompts_costs_what_was_computed_by_hand(
    model: str, sequence: Iterable[tuple[str, float]]
) -> None:
    cache = MODELS[model].cold()
    for text, expected in sequence:
        assert cache.charge(prompt(text)) == pytest.approx(expected)


def test_every_cache_model_is_tested() -> None:
    assert {model for model, _ in SEQUENCES.values()} == set(MODELS)


def test_output_counts_and_caches_are_cold_at_first() -> None:
    calls = [Call(prompt("a:100"), output=7), Call(prompt("a:100"))]
    assert (
        cost(calls, MODELS[FREE_READS])
        == cost(calls, MODELS[FREE_READS])
        == 100 + OUTPUT_PRICE * 7 + 4
    )


# -- ways to send a run ----------------------------------------------------------------------------

STEPS = "s:10 u:10 a:10 t:1500 a:10 t:30 a:10"


def test_without_a_proxy_every_request_is_sent_whole() -> None:
    assert sent(plainly, run(STEPS, tools=5)) == [
        (25, "client"),
        (1535, "client"),
        (1575, "client"),
    ]
    assert breaks(plainly(run(STEPS))) == 0


def test_compaction_adds_our_tools() -> None:
    strategy = Proxied(offload(Mode.COMPACT))
    moved = 1570 - 1500 + BRIEF + OUR_TOOLS_TOKENS
    assert sent(strategy, run(STEPS)) == [(20, "client"), (1530, "client"), (moved, "client")]
    assert breaks(strategy(run(STEPS))) == 1
    always = Proxied(offload(Mode.COMPACT), Inject.ALWAYS)
    assert sent(always, run(STEPS))[0] == (20 + OUR_TOOLS_TOKENS, "client")


WORDY = "s:10 u:10 a:2000 t:10 a:20 t:30 a:20 t:40 a:20"
SUMMARISED = (2030 + TASK, "summary")
"""The call for the cut before the second step, on what had been sent until then."""
SHOWN = 20 + SUMMARY + OUR_TOOLS_TOKENS
BEGUN = [(20, "client"), (2030, "client"), SUMMARISED]


@pytest.mark.parametrize(
    ("late", "expected", "broken"),
    [
        (0, [*BEGUN, (SHOWN + 50, "client"), (SHOWN + 110, "client")], 1),
        (1, [*BEGUN, (2080, "client"), (SHOWN + 110, "client")], 1),
        (2, [*BEGUN, (2080, "client"), (2140, "client")], 0),
    ],
)
def test_an_event_waits_for_its_snapshot(
    late: int, expected: list[tuple[int, str]], broken: int
) -> None:
    wait = Wait.NEVER if late else Wait.ALWAYS
    strategy = Proxied(
        offload(Mode.COMPRESS, compress=Compress(snapshot_tokens=100, wait=wait)), late=late
    )
    assert sent(strategy, run(WORDY)) == expected
    assert breaks(strategy(run(WORDY))) == broken
    assert [call.output for call in strategy(run(WORDY)) if call.kind is Kind.SUMMARY] == [
        SUMMARY_OUTPUT
    ]


def test_a_result_is_read_back_in_pages_that_stay_in_the_context() -> None:
    steps = "s:10 u:10 a:10 t:7000 a:10 t:30 a:10 t:30 a:10"
    strategy = Proxied(offload(Mode.COMPACT), reading=True)
    moved = 70 + BRIEF + OUR_TOOLS_TOKENS
    first, second = READ_CALL + 6000, READ_CALL + 1000
    assert sent(strategy, run(steps)) == [
        (20, "client"),
        (7030, "client"),
        (moved, "client"),
        (moved + first, "round"),
        (moved + first + second, "round"),
        (moved + first + second + 40, "client"),
    ]
    assert [call.output for call in strategy(run(steps))] == [0, 0, READ_CALL, READ_CALL, 0, 0]
    assert breaks(strategy(run(steps))) == 1


def test_a_large_answer_leaves_after_the_request_that_follows_its_reply() -> None:
    steps = "s:10 u:10 a:10 t:5000 a:10 t:30 a:10 t:30 a:10 t:30 a:10"
    strategy = Proxied(offload(Mode.COMPACT), reading=1.0)
    sizes = [tokens for tokens, kind in sent(strategy, run(steps)) if kind == "client"]
    assert sizes[3] - sizes[2] == READ_CALL + 5000 + 40
    assert sizes[4] - sizes[3] == SHRUNK - 5000 + 40
    assert breaks(strategy(run(steps))) == 2


@pytest.mark.parametrize(("chance", "least", "most"), [(0.0, 0, 0), (0.3, 15, 45), (1.0, 100, 100)])
def test_moved_results_are_read_back_at_the_given_chance(
    chance: float, least: int, most: int
) -> None:
    long = run("s:10 u:10 " + "a:10 t:1500 " * 101 + "a:10")
    calls = list(Proxied(offload(Mode.COMPACT), reading=chance)(long))
    assert least <= sum(call.kind is Kind.ROUND for call in calls) <= most


def test_our_own_breakpoints_are_before_and_behind_what_the_newest_event_moved() -> None:
    calls = list(
        Proxied(offload(Mode.COMPACT))(
            run("s:10 u:10 a:10 t:30 a:10 t:1500 a:10 t:30 a:10 t:30 a:10")
        )
    )
    marked = [
        [call.prompt.segments[place][0] for place in sorted(call.prompt.marks)] for call in calls
    ]
    assert marked == [[], [], [], [(3, None), (5, True)], [(3, None), (5, True)]]
    cache = PRICED[THIRD_MARK].cold()
    assert cache.charge(prompt("a:1500 b:1500")) == 3000 * 1.25
    segments = [segment(word) for word in ["a:1500", "b:1500", "x:10", "y:10*25"]]
    assert cache.charge(Prompt(segments, marks=[1])) == pytest.approx(300 + 20 * 1.25)


def test_a_window_of_results_slides_at_every_request() -> None:
    steps = "s:10 u:10 a:10 t:500 a:10 t:600 a:10 t:5 a:10"
    assert sent(window(1), run(steps)) == [
        (20, "client"),
        (530, "client"),
        (640 + PLACEHOLDER, "client"),
        (55 + 2 * PLACEHOLDER, "client"),
    ]
    assert breaks(window(1)(run(steps))) == 2


# -- figures ---------------------------------------------------------------------------------------


def test_expected_cost_of_reading_back_lies_between_never_and_always() -> None:
    assert savings.read_back(0.2, [0.5, 0.8], [1.0, 0.8]) == [pytest.approx(0.6), 0.8]


def test_the_sweep_covers_every_pair_and_tightening_sends_less() -> None:
    long = run("s:10 u:10 " + "a:100 t:6000 " * 30 + "a:10")
    bench = savings.Bench([long])
    sweep = savings.swept(bench)
    assert set(sweep) == {(total, keep) for total in savings.MAX_TOTAL for keep in savings.KEEP}
    by_total = [sweep[total, None][0].sent for total in savings.MAX_TOTAL]
    assert by_total == sorted(by_total) and by_total[0] < by_total[-1]
    assert len(savings.sweep_table(bench, sweep).splitlines()) == len(sweep) + 1


def test_the_table_by_length_has_a_row_for_short_and_long_runs() -> None:
    """A short run only pays for our tools. Its second request reads 4,992 tokens of the first:
    whole units of 128."""
    short = run("s:10 u:5000 a:10 t:900 a:10", tools=100)
    long = run("s:10 u:10 " + "a:100 t:6000 " * 30 + "a:10")
    title, first, last = savings.length_tables([short, long]).split("\n\n")[0].splitlines()
    assert title.startswith("balanced, by largest, all")
    plain = (5110, 6020)
    ours = [tokens + OUR_TOOLS_TOKENS for tokens in plain]
    sent = sum(ours) / sum(plain)
    cost = (sum(ours) - 5248 * 0.9) / (sum(plain) - 4992 * 0.9)
    assert first.split()[:8] == [
        "5,000",
        "to",
        "10,000",
        "1",
        f"{sent:.3f}",
        f"{cost:.3f}",
        f"({cost:.2f})",
        "100%",
    ]
    assert last.split()[:4] == ["from", "70,000", "on", "1"]
    assert float(last.split()[4]) < 0.5 and last.split()[7] == "0%"


def test_the_reported_half_has_a_table_by_length_as_well() -> None:
    one = run("s:10 u:5000 a:10 t:900 a:10")
    other = next(name for name in map(str, range(99)) if profiles.is_reported(renamed(one, name)))
    tables = savings.length_tables([one, renamed(one, other)]).split("\n\n")
    assert not profiles.is_reported(one)
    assert [table.splitlines()[0].split(",")[0] for table in tables] == ["balanced", "frugal"] * 2
    assert [table.splitlines()[1].split()[3] for table in tables] == ["2", "2", "1", "1"]


def renamed(one: Recorded, name: str) -> Recorded:
    return msgspec.structs.replace(one, id=name)


def test_missed_goals_are_named() -> None:
    bench = savings.Bench([run(STEPS)])
    rows = bench.figures(plainly, profiles.SHOWN)
    found = profiles.figures(bench, {savings.OURS: rows, "proxy: careful": rows})
    assert profiles.missed(found) == [
        f"{savings.OURS} sent 1.000, not 0.5",
        f"{savings.OURS} reads 0.1 1.000, not 0.66",
        f"{savings.OURS} {THIRD_MARK} 1.000, not 0.69",
    ]


# -- the recorded runs -----------------------------------------------------------------------------


@needed
@pytest.mark.sweep
def test_the_profiles_meet_their_goals() -> None:
    bench = savings.Bench(
        [run for run in savings.plannable(load(30_000)) if profiles.is_reported(run)]
    )
    assert len(bench.runs) >= 40
    measured = {
        name: bench.figures(profiles.PLANS[name].strategy(), profiles.SHOWN)
        for name in profiles.GOALS
    }
    assert profiles.missed(profiles.figures(bench, measured)) == []


@needed
@pytest.mark.sweep
def test_long_runs_are_reduced_by_four_fifths() -> None:
    bench = savings.Bench(list(savings.plannable(load(90_000))))
    ours = bench.figures(savings.STRATEGIES[savings.OURS])
    assert len(ours) >= 20
    assert median(bench.ratios(ours, lambda one: one.last)) <= 0.2


@needed
@pytest.mark.sweep
def test_savings_report_prints_tables_and_draws_charts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [one for _, one in zip(range(2), savings.plannable(load(30_000)), strict=False)]
    savings.report(runs, tmp_path)
    drawn = {f"savings-{name}.png" for name in ("cost", "turns", "sweep")}
    assert {path.name for path in tmp_path.iterdir()} == drawn
    printed = capsys.readouterr().out
    assert "goals on the reported half, and missed:" in printed
    assert all(row in printed for row in ("proxy: careful", "proxy: balanced", "proxy: frugal"))
