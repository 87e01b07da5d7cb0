"""What a batch adds up is the same however its rows are divided."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest

from proxy.dashboard.batch import Batch
from proxy.dashboard.rows import HOUR, MOST, OK, Seen, together
from proxy.errors import Fault
from proxy.telemetry.outcome import Holdout, Kind, Outcome, ToolUse

USES = (ToolUse("grep", "ok", 40), ToolUse("read_file", "refused", 2, calls=7))


def outcomes() -> list[Outcome]:
    """Requests of each kind, with a reply and without one."""
    return [
        Outcome(
            request_id=f"req_{number:032}", tenant="acme", namespace=f"acme-{number % 2}", kind=kind, method="POST",
            path="/v1/chat/completions", model="größer", dialect="chat", status=status, new_event=number % 3 == 0,
            fault=Fault.NONE if status == OK else Fault.CONNECT, tool_uses=USES, tokens_before=900,
            tokens_after=700 + number, cost_before=70, cost_after=60 + number, prompt_tokens=MOST * (1 + number % 2),
            holdout=Holdout.PLANNED if number % 5 == 0 else Holdout.NONE,
        )
        for number, (kind, status) in enumerate((kind, status) for kind in Kind for status in (OK, 502))
    ]  # fmt: skip


def filled(found: list[Outcome]) -> Batch:
    batch = Batch()
    for number, one in enumerate(found):
        batch.add([HOUR * number / 3], [one], together([Seen(number % 4 if number % 7 else None, b"sent", b"detail")]))
    return batch


def added(batch: Batch) -> tuple[Any, ...]:
    """Everything that a transaction adds, with the batch's rows."""
    return (
        sorted(batch.days()),
        sorted(batch.hours()),
        sorted(batch.sessions(1, {"acme-0": 1, "acme-1": 2}.__getitem__)),
        [row[1:] for row in batch.rows()],
        batch.details,
    )


def test_a_part_of_a_batch_adds_what_its_rows_alone_would() -> None:
    found = outcomes()
    whole, count = filled(found), len(found) // 2
    first, rest = whole.split(count)
    assert added(first) == added(filled(found[:count]))
    assert [row[1:] for row in (*first.rows(), *rest.rows())] == [row[1:] for row in whole.rows()]
    kept = whole.since({"acme-0": -1.0, "acme-1": HOUR * len(found)})
    assert {row.values[2] for row in kept.rows()} == kept.namespaces() == {"acme-0"}
    assert kept.days() == [row for row in whole.days() if row[1] == "acme-0"]
    assert whole.since({"acme-0": -1.0, "acme-1": -1.0}) is whole


@pytest.mark.parametrize("count", [2, 3, 100])
def test_rows_that_are_added_together_add_what_each_alone_would(count: int) -> None:
    found, batch = outcomes(), Batch()
    rows = [(HOUR * number / 3, one, Seen(number % 4 if number % 7 else None)) for number, one in enumerate(found)]
    for at in range(0, len(rows), count):
        times, some, seen = zip(*rows[at : at + count], strict=True)
        batch.add(times, some, together(seen))
    alone = Batch()
    for time, one, seen in rows:
        alone.add([time], [one], together([seen]))
    assert added(batch) == added(alone)


def test_each_row_is_added_to_the_sums_once() -> None:
    found = outcomes()
    days = filled(found).days()
    requests = Counter[str]()
    for one in days:
        requests[str(one[5])] += int(str(one[8]))
    assert requests == Counter(str(one.kind) for one in found)


def test_a_row_that_cannot_be_encoded_adds_nothing() -> None:
    found = outcomes()
    batch = filled(found)
    before = added(filled(found))
    with pytest.raises(OverflowError):
        batch.add([0.0], [msgspec.structs.replace(found[0], tokens_before=1 << 70)], together([Seen(1)]))
    assert added(batch) == before
