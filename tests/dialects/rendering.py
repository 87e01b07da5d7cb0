"""Histories and what goes upstream of them, without anything from outside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import Raw

from proxy.dialects import Dialect, render
from proxy.dialects.render import ActiveSnapshot
from proxy.plan import summary
from proxy.plan.history import History, Terms, Transcript
from proxy.plan.plan import Plan, Reading, Room
from proxy.policy import Offload, SnapshotRole


def history(dialect: Dialect, raws: Sequence[bytes | Raw], offload: Offload) -> History:
    read = [dialect.read(raw, Reading.of(offload), len) for raw in raws]
    return History(Terms("m", offload, Room(), 0)).extended(read)


def snapshot(
    past: History, plan: Plan, text: str = "the record", role: SnapshotRole = SnapshotRole.AUTO
) -> ActiveSnapshot | None:
    """The snapshot of the plan's last cut, if it has one."""
    if not plan.boundaries:
        return None
    last = plan.boundaries[-1]
    return ActiveSnapshot(
        last, text, f"/store/{summary.file_name(past.links[last.end])}", role=role
    )


def rendered(
    dialect: Dialect,
    transcript: Transcript,
    plan: Plan,
    offload: Offload,
    shown: ActiveSnapshot | None = None,
    **how: Any,
) -> list[bytes]:
    """What is sent, as `render` says `how`."""
    shape = Reading.of(offload).shape

    def previews(index: int, first: bool) -> bytes:
        return render.with_previews(
            dialect, transcript.raws[index], transcript.messages[index], shape, first
        )

    altered = render.altered(dialect, transcript, plan, previews, shown.boundary if shown else None)
    return [bytes(one) for one in render.render(dialect, transcript, altered, shown=shown, **how)]
