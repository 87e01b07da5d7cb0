"""What refused and accepted requests teach about a window, and for whom."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.dialects.chat import CHAT
from proxy.policy import Policy, Upstream
from proxy.requests import upstream_limits
from proxy.requests.upstream_limits import LEAST, Lesson, UpstreamLimits, WindowBelief

ME, OTHER = "acme-1", "acme-2"
URL = "http://up/v1"


def policy(window: int | None = None, url: str = URL) -> Policy:
    return Policy(upstream=Upstream(base_url=url, context_window=window))


def limits(**members: Any) -> tuple[UpstreamLimits, list[tuple[str, WindowBelief, Lesson]]]:
    told: list[tuple[str, WindowBelief, Lesson]] = []
    return UpstreamLimits(lambda *told_of: told.append(told_of), **members), told


SAYS_4096 = b'{"error":{"message":"maximum context length is 4096 tokens"}}'
SAYS_300 = b'{"error":{"message":"maximum context length is 300 tokens"}}'
SAYS_NONE = b'{"error":{"message":"prompt is too long"}}'


@pytest.mark.parametrize(
    ("known", "body", "counted", "again", "window"),
    [
        (None, SAYS_4096, 9000, 4096, 4096),
        (8000, SAYS_4096, 9000, 4096, 4096),
        (None, SAYS_NONE, 9000, 7200, 7200),
        (128_000, SAYS_NONE, 9000, 7200, 7200),
        (8000, SAYS_NONE, 9000, 8000, 8000),
        (4096, SAYS_4096, 4000, 3200, 3200),
        (2000, SAYS_4096, 9000, 2000, 2000),
        (None, SAYS_300, 9000, 300, None),
        (8000, SAYS_300, 9000, 300, 8000),
        (None, SAYS_NONE, 1000, 800, None),
        (None, SAYS_NONE, 0, 1, None),
    ],
)
def test_window_of_a_refused_request(
    known: int | None, body: bytes, counted: int, again: int, window: int | None
) -> None:
    """The request is planned again for upstream's own number, or for 0.8 of what was counted where that was to fit.
    Only a plausible window is remembered, and never more than was known before."""
    one, told = limits()
    said = CHAT.window(body)
    assert one.overflowed(ME, policy(known), "m", said, counted) == again
    assert one.window(ME, policy(known), "m") == window
    learned = WindowBelief(URL, "m", again, 0 if again == said else counted)
    assert told == ([(ME, learned, Lesson.REFUSED)] if again == window != known else [])


def test_a_guess_is_remembered_only_where_everything_was_counted() -> None:
    one, told = limits()
    assert one.overflowed(ME, policy(), "m", None, 9000, measured=False) == 7200
    assert one.window(ME, policy(), "m") is None and not told
    assert one.overflowed(ME, policy(), "m", 4096, 9000, measured=False) == 4096
    assert one.window(ME, policy(), "m") == 4096, "upstream's own number says more than our count"


def test_a_number_below_an_accepted_prompt_is_not_remembered() -> None:
    one, _ = limits()
    one.accepted(ME, policy(), "m", 5000, 4000)
    assert one.overflowed(ME, policy(), "m", 4096, 9000) == 4096
    assert one.window(ME, policy(), "m") is None
    one.overflowed(ME, policy(), "m", 5000, 9000)
    assert one.window(ME, policy(), "m") == 5000


def test_a_request_no_longer_than_one_that_was_accepted_teaches_nothing() -> None:
    one, _ = limits()
    one.accepted(ME, policy(), "m", 9_500, 9_000)
    assert one.overflowed(ME, policy(), "m", None, 10_000) == 8_000
    assert one.window(ME, policy(), "m") == 8_000, "longer than what was accepted; every process guesses the same"
    one.accepted(ME, policy(), "n", 9_500, 10_500)
    assert one.overflowed(ME, policy(), "n", None, 10_000) == 8_000
    assert one.window(ME, policy(), "n") is None, "a larger one has been accepted, so its length is not the reason"


def test_a_larger_accepted_prompt_supersedes_a_window() -> None:
    one, told = limits()
    one.overflowed(ME, policy(), "m", 4096, 9000)
    one.accepted(ME, policy(), "m", 4096, 4000)
    assert one.window(ME, policy(), "m") == 4096
    one.accepted(ME, policy(), "m", 4097, 4000)
    assert one.window(ME, policy(), "m") is None
    assert told[1:] == [(ME, WindowBelief(URL, "m", 0, 0, 4097, 4000), Lesson.SUPERSEDED)]


def test_a_guess_is_compared_with_what_we_count() -> None:
    """Upstream may count a third more than we do. Otherwise the first request that fits would supersede the guess."""
    one, told = limits()
    one.overflowed(ME, policy(), "m", None, 10_000)
    one.accepted(ME, policy(), "m", 9_900, 7_500)
    assert one.window(ME, policy(), "m") == 8_000
    one.accepted(ME, policy(), "m", 9_900, 8_001)
    assert one.window(ME, policy(), "m") is None
    assert one.overflowed(ME, policy(), "m", None, 10_000) == 8_001, "so much did fit"
    there, _ = limits()
    for _, belief, _ in reversed(told):
        there.accept(ME, belief)
    assert there.window(ME, policy(), "m") == 8_001


def test_the_policys_window_is_not_superseded() -> None:
    one, told = limits()
    one.accepted(ME, policy(4096), "m", 9000, 9000)
    assert one.window(ME, policy(4096), "m") == 4096 and not told


def test_the_windows_that_upstream_lists() -> None:
    listed = {"m": 16_000, "tiny": 500}
    one, _ = limits(listed=lambda namespace, policy, model: listed.get(model))
    assert [one.window(ME, policy(), model) for model in ("m", "tiny", "unknown")] == [16_000, None, None]
    assert one.window(ME, policy(32_000), "m") == 32_000, "the policy knows better"
    one.overflowed(ME, policy(), "m", 8_000, 9000)
    assert one.window(ME, policy(), "m") == 8_000, "a refusal knows better"
    one.accepted(ME, policy(), "m", 17_000, 17_000)
    assert one.window(ME, policy(), "m") is None, "it took more than either said"


def test_a_window_is_learned_for_one_caller_upstream_and_model() -> None:
    one, _ = limits()
    one.overflowed(ME, policy(), "m", None, 10_000)
    for namespace, where, model in ((OTHER, policy(), "m"), (ME, policy(url="http://o/v1"), "m"), (ME, policy(), "n")):
        assert one.window(namespace, where, model) is None
    assert one.window(ME, policy(), "m") == 8_000


def test_oldest_model_of_a_caller_is_forgotten_above_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream_limits, "MODELS", 3)
    one, _ = limits()
    for namespace, models in ((OTHER, "abc"), (ME, "abcd")):
        for model in models:
            one.overflowed(namespace, policy(), model, 4096, 9000)
    assert [one.window(ME, policy(), model) for model in "abcd"] == [None, 4096, 4096, 4096]
    assert [one.window(OTHER, policy(), model) for model in "abc"] == [4096] * 3


# -- other processes --------------------------------------------------------------------------------------------------

BELIEFS = st.builds(
    WindowBelief,
    st.just(URL),
    st.just("m"),
    st.sampled_from((0, 300, 2000, 4096, 8000)),
    st.sampled_from((0, 5000, 20_000)),
    st.sampled_from((0, 1000, 3000, 9000)),
    st.sampled_from((0, 1000, 3000, 9000)),
)


@given(st.lists(BELIEFS, max_size=5), st.randoms(use_true_random=False))
def test_processes_that_hear_the_same_believe_the_same(heard: list[WindowBelief], random: Any) -> None:
    """Whatever the order, and however often."""
    shuffled = [*heard, *heard[:2]]
    random.shuffle(shuffled)
    windows = []
    for beliefs in (heard, shuffled):
        one, told = limits()
        for belief in beliefs:
            one.accept(ME, belief)
        assert not told, "what others learned is not told again"
        windows.append(one.window(ME, policy(), "m"))
    assert windows[0] == windows[1]
    least = min(max((getattr(belief, by) for belief in heard), default=0) for by in ("accepted", "counted"))
    assert windows[0] is None or windows[0] >= max(LEAST, least)


def test_what_is_learned_in_one_process_is_believed_in_another() -> None:
    there, answered = limits()
    here, told = limits()
    there.accepted(ME, policy(), "m", 3000, 3000)
    here.overflowed(ME, policy(), "m", 2048, 9000)
    there.accept(ME, told[0][1])
    assert there.window(ME, policy(), "m") is None, "it has taken more there"
    there.accept(ME, told[0][1])
    assert answered == [(ME, WindowBelief(URL, "m", 0, 0, 3000, 3000), Lesson.SUPERSEDED)], "which is told once"
    here.accept(ME, answered[0][1])
    assert here.window(ME, policy(), "m") is None
    here.overflowed(ME, policy(), "n", 4096, 9000)
    there.accept(ME, told[1][1])
    assert there.window(ME, policy(), "n") == 4096 and there.window(OTHER, policy(), "n") is None
    assert list(there.beliefs(ME)) == [WindowBelief(URL, "n", 4096)] and not list(there.beliefs(OTHER))


def test_windows_that_upstream_has_refuted_take_no_place_from_new_ones() -> None:
    known, _ = limits()
    for window in range(LEAST, LEAST + 2 * upstream_limits.WINDOWS):
        known.accept(ME, WindowBelief(URL, "m", window))
    known.accepted(ME, policy(), "m", 5000, 5000)
    assert known.window(ME, policy(), "m") is None
    known.overflowed(ME, policy(), "m", 8192, 9000)
    assert known.window(ME, policy(), "m") == 8192
