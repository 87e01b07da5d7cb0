from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from proxy.stores.lru import Lru
from proxy.stores.memory import ENTRY_WEIGHT, Memory, Missing


def test_the_least_recently_used_goes_first() -> None:
    lru: Lru[int] = Lru(24)
    for number, key in enumerate("abcdefgh"):
        lru.put(key, number, 3)
    assert lru.get("a") == 0
    lru.put("i", 8, 3)
    assert [key for key in "abcdefghi" if lru.get(key) is not None] == list("acdefghi")


def test_what_is_too_heavy_is_not_kept_and_pushes_nothing_out() -> None:
    lru: Lru[str] = Lru(80)
    lru.put("light", "value", 10)
    lru.put("heavy", "value", 11)
    assert (lru.get("light"), lru.get("heavy")) == ("value", None)
    lru.put("light", "grown", 11)
    assert lru.get("light") is None
    assert (len(lru), lru.weight) == (0, 0)


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(0, 20), st.booleans())))
def test_the_weight_is_that_of_what_is_in_it(steps: list[tuple[str, int, bool]]) -> None:
    lru: Lru[int] = Lru(100)
    for key, weight, discard in steps:
        lru.discard(key) if discard else lru.put(key, weight, weight)
        kept = [value for key in "abcdefgh" if (value := lru.get(key)) is not None]
        assert lru.weight == sum(kept) <= 100
        assert len(lru) == len(kept)


def test_memory_is_bounded_in_bytes() -> None:
    memory = Memory(100_000, 60)
    for number in range(1000):
        memory.keep(f"a/b/{number}", b"x" * 1000)
    assert memory.size == (79, 79 * (1000 + ENTRY_WEIGHT))
    assert memory.recall(["a/b/999", "a/b/0"]) == {"a/b/999": b"x" * 1000}


def test_an_empty_record_is_a_record() -> None:
    memory = Memory(100_000, 60)
    memory.keep("a/b/c", b"")
    assert memory.recall(["a/b/c"]) == {"a/b/c": b""}


def test_a_put_ends_an_absence_but_no_record() -> None:
    memory = Memory(100_000, 60)
    memory.keep("a/b/absent", Missing.ABSENT)
    memory.keep("a/b/record", b"1")
    for key in ("a/b/absent", "a/b/record"):
        memory.note_put(key)
    assert memory.recall(["a/b/absent", "a/b/record"]) == {"a/b/record": b"1"}


def test_a_put_counts_for_a_while() -> None:
    now = 0.0
    memory = Memory(100_000, 60, clock=lambda: now)
    assert not memory.was_put("a/b/c")
    memory.note_put("a/b/c")
    now = 59.9
    assert memory.was_put("a/b/c")
    now = 60.0
    assert not memory.was_put("a/b/c")
