from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from proxy.lru import FairLru, Lru


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


def test_the_owner_that_holds_most_loses_its_oldest() -> None:
    dropped: list[tuple[int, str]] = []
    shares = FairLru[int, str](10, share=2, dropped=lambda key, value: dropped.append((key, value)))
    shares.put("a", 1, "one", 2)
    for key in range(2, 6):
        shares.put("b", key, "more", 2)
    assert shares.get("b", 2) == "more"  # now its newest
    shares.put("b", 6, "most", 2)
    assert dropped == [(3, "more")]
    assert (shares.get("a", 1), len(shares), shares.weight) == ("one", 5, 10)
    shares.put("a", 7, "too large", 6)
    shares.discard("a", 1)
    shares.discard("a", 1)
    shares.put("b", 2, "other", 1)
    assert dropped[1:] == [(7, "too large"), (1, "one"), (2, "more")]
    assert (shares.get("a", 1), shares.get("b", 2), shares.weight) == (None, "other", 7)
