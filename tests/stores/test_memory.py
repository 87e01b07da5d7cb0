from __future__ import annotations

from proxy.stores.guarded import ENTRY_WEIGHT, PUTS_BYTES, Memory, Missing


def test_memory_is_bounded_in_bytes() -> None:
    memory = Memory(100_000, 60)
    for number in range(1000):
        memory.keep(f"a/b/{number:03}", b"x" * 1000)
    each = len("a/b/000") + 1000 + ENTRY_WEIGHT
    assert memory.size == (100_000 // each, 100_000 // each * each)
    assert memory.recall(["a/b/999", "a/b/000"]) == {"a/b/999": b"x" * 1000}


def test_the_keys_of_recent_puts_are_bounded_and_count() -> None:
    memory = Memory(100_000, 60)
    for number in range(100):
        memory.note_put(f"a/b/{number:03}")
    assert memory.size == (0, 100 * (len("a/b/000") + ENTRY_WEIGHT))
    assert memory.was_put("a/b/099")
    memory.note_put("a/b/" + "x" * PUTS_BYTES)
    assert memory.size == (0, 100 * (len("a/b/000") + ENTRY_WEIGHT))


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


def test_a_put_counts_for_less_where_records_do_not_live_long() -> None:
    now = 0.0
    memory = Memory(100_000, 60, clock=lambda: now)
    memory.note_put("short/b/c", 30.0)
    memory.note_put("long/b/c", 3600.0)
    now = 9.9
    assert memory.was_put("short/b/c")
    now = 10.0
    assert not memory.was_put("short/b/c") and memory.was_put("long/b/c")
