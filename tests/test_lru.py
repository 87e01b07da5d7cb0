from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from proxy.lru import Lru


def test_the_least_recently_used_goes_first() -> None:
    lru: Lru[str, int] = Lru(24)
    for number, key in enumerate("abcdefgh"):
        lru.put(key, number, 3)
    assert lru.get("a") == 0
    lru.put("i", 8, 3)
    assert [key for key in "abcdefghi" if lru.get(key) is not None] == list("acdefghi")


def test_too_heavy_items_are_not_kept_and_push_nothing_out() -> None:
    lru: Lru[str, str] = Lru(80)
    lru.put("light", "value", 10)
    lru.put("heavy", "value", 11)
    assert (lru.get("light"), lru.get("heavy")) == ("value", None)
    lru.put("light", "grown", 11)
    assert lru.get("light") is None
    assert (len(lru), lru.weight) == (0, 0)


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(0, 20), st.booleans())))
def test_the_weight_is_the_sum_of_the_items(steps: list[tuple[str, int, bool]]) -> None:
    lru: Lru[str, int] = Lru(100)
    for key, weight, discard in steps:
        lru.discard(key) if discard else lru.put(key, weight, weight)
        kept = [value for key in "abcdefgh" if (value := lru.get(key)) is not None]
        assert lru.weight == sum(kept) <= 100
        assert len(lru) == len(kept)
