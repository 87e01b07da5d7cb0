"""How our counts follow upstream's, where its vocabulary is another."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.plan.plan import WINDOW_MARGIN, Room
from proxy.requests.calibration import CALLERS, FALLS_AFTER, MODELS, MOST, Calibration, FactorBelief

WINDOW = 8_192
KEY = ("tenant", "http://up", "qwen")


def seen(*ratios: float, ours: int = 4_000, window: int | None = WINDOW) -> Calibration:
    made = Calibration()
    for ratio in ratios:
        made.observe(*KEY, ours, round(ours * ratio), window)
    return made


@pytest.mark.parametrize("ratio", [0.7, 0.96, 1.0, 1.02, 1.05])
def test_a_vocabulary_that_we_count_exactly_has_factor_1(ratio: float) -> None:
    assert seen(*[ratio] * 20).factor(*KEY) == 1


@pytest.mark.parametrize(
    ("ratio", "factor"), [(1.06, 1.1), (1.35, 1.3), (1.43, 1.4), (1.56, 1.5), (2.3, 2.2), (9.0, MOST)]
)
def test_the_factor_is_what_the_margin_does_not_cover(ratio: float, factor: float) -> None:
    assert seen(ratio).factor(*KEY) == pytest.approx(factor)


@given(ratio=st.floats(0.5, MOST), ours=st.integers(3_000, 100_000))
def test_a_prompt_that_fits_the_smaller_window_fits_upstreams(ratio: float, ours: int) -> None:
    window = int(ours * ratio * 2)
    factor = seen(ratio, ours=ours, window=window).factor(*KEY)
    most = Room(int(window / factor)).left(0)
    assert most * ratio <= window + ratio, "to one of our tokens: upstream's count was rounded"
    assert factor == 1 or most * ratio > window * (1 - WINDOW_MARGIN) * 0.8, "and no more is lost than a step"


def test_a_factor_rises_at_once_and_falls_after_many() -> None:
    assert seen(1.2, 1.4).factor(*KEY) == pytest.approx(1.4)
    assert seen(1.4, *[1.0] * (FALLS_AFTER - 1)).factor(*KEY) == pytest.approx(1.4)
    assert seen(1.4, *[1.0] * FALLS_AFTER).factor(*KEY) == 1
    assert seen(1.4, *[1.0] * (FALLS_AFTER - 1), 1.2).factor(*KEY) == pytest.approx(1.2), "to what all of them allow"
    assert seen(1.4, *[1.0] * (FALLS_AFTER - 1), 1.4, 1.0).factor(*KEY) == pytest.approx(1.4), "many in a row"


def test_small_prompts_and_unknown_windows_teach_nothing() -> None:
    assert seen(2.0, ours=900).factor(*KEY) == 1
    assert seen(2.0, window=None).factor(*KEY) == 1
    assert seen(2.0, ours=0).factor(*KEY) == 1


def test_callers_upstreams_and_models_learn_by_themselves() -> None:
    made = seen(2.0)
    for other in (("other", *KEY[1:]), (KEY[0], "http://else", KEY[2]), (*KEY[:2], "gpt-4o")):
        assert made.factor(*other) == 1


def test_what_is_remembered_is_bounded() -> None:
    made = Calibration()
    for number in range(MODELS + 1):
        made.observe("t", "u", f"m{number}", 4_000, 8_000, WINDOW)
    assert made.factor("t", "u", "m0") == 1 < made.factor("t", "u", f"m{MODELS}")
    for number in range(CALLERS + 1):
        made.observe(f"t{number}", "u", "m", 4_000, 8_000, WINDOW)
    assert made.factor("t0", "u", "m") == 1 < made.factor(f"t{CALLERS}", "u", "m")


@given(
    st.lists(st.builds(FactorBelief, st.just(KEY[1]), st.just(KEY[2]), st.floats(-1, 9), st.integers(0, 3))),
    st.randoms(),
)
def test_processes_that_hear_the_same_count_with_the_same_factor(heard: list[FactorBelief], random: Any) -> None:
    one, other = Calibration(), Calibration()
    for belief in heard:
        one.accept(KEY[0], belief)
    random.shuffle(heard)
    for belief in [*heard, *heard]:
        other.accept(KEY[0], belief)
    assert one.factor(*KEY) == other.factor(*KEY) and 1 <= one.factor(*KEY) <= MOST
