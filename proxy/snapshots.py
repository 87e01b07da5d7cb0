"""A request's snapshots: which exist, which one is to be made, and by what call."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from proxy.core import render
from proxy.core.plan import Cut, live
from proxy.core.policy import Source, Wait
from proxy.core.render import Shown
from proxy.prepare import History, Prepared, prepared, riding
from proxy.summarizer import Answer, Job, Snapshot, Summarizer

if TYPE_CHECKING:
    from proxy.reading import Reader
    from proxy.records import Records

Ask = Callable[[bytes], Awaitable[Answer]]


class Snapshots:
    """What a process knows of snapshots under way, for any request."""

    def __init__(self, summarizer: Summarizer, reader: Reader) -> None:
        self._summarizer = summarizer
        self._reader = reader

    async def existing(self, history: History, records: Records) -> Shown | None:
        """The latest cut whose record exists."""
        cuts = history.plan.cuts
        found = await records.snapshots([history.snapshot_key(cut) for cut in cuts]) if cuts else []
        for cut, snapshot in zip(reversed(cuts), reversed(found), strict=True):
            if snapshot is not None:
                self._summarizer.used(history.conversation)
                return _shown(history, cut, snapshot)
        return None

    async def complete(self, ready: Prepared, records: Records, tenant: str, ask: Ask) -> Prepared:
        """The request with the snapshot that its plan wants, made or waited for as the policy says.

        A request that is too large without it waits whatever the policy says; one whose summary fails goes on without.
        """
        history = ready.history
        cut = history.plan.cuts[-1] if history.plan.cuts else None
        if cut is None or (ready.shown and ready.shown.cut == cut):
            return ready
        flight = self._summarizer.request(self._job(ready, cut, records, tenant, ask))
        patient = history.policy.offload.compress.wait is Wait.ALWAYS or not history.room.holds(ready.tokens)
        if flight is None or not patient:
            return ready
        snapshot = await asyncio.shield(flight)
        if snapshot is None:
            return ready
        return prepared(history, _shown(history, cut, snapshot), ready.rounds, self._reader)

    def _job(self, ready: Prepared, cut: Cut, records: Records, tenant: str, ask: Ask) -> Job:
        history, shown = ready.history, ready.shown
        offload = history.policy.offload
        ride = offload.compress.source is Source.CONVERSATION and history.summary_model == history.request.model
        return Job(
            key=records.key("snapshots", history.snapshot_key(cut)),
            tenant=tenant,
            conversation=history.conversation,
            model=history.summary_model,
            snapshot_tokens=offload.compress.snapshot_tokens,
            replaced_tokens=_replaced(history, cut, shown),
            store_dir=offload.store_dir,
            timeout=offload.compress.timeout,
            group_tokens=_group_tokens(history),
            riding=riding(history, cut, shown, ready.rounds, self._reader) if ride else None,
            history=lambda: render.originals(history.transcript, cut, shown.cut if shown else None),
            earlier=shown.text if shown else "",
            ask=ask,
        )


def _replaced(history: History, cut: Cut, shown: Shown | None) -> int:
    """Tokens that the snapshot will stand for, an earlier snapshot among them."""
    before = set(render.taken(history.transcript, shown.cut)) if shown else set()
    moves = history.plan.before(cut.event).moves
    return sum(
        live(history.items[index], moves.get(index))
        for index in render.taken(history.transcript, cut)
        if index not in before
    ) + (history.policy.offload.compress.snapshot_tokens if shown else 0)


def _group_tokens(history: History) -> int:
    """Most history for one summary call; 0 where neither the policy nor upstream says."""
    compress_ = history.policy.offload.compress
    if compress_.group_token_threshold or history.room.window is None:
        return compress_.group_token_threshold
    # Besides the history, the call holds the snapshot so far, the task, and the answer with its scratchpad.
    return max(int(history.room.window * 0.8) - 4 * compress_.snapshot_tokens - 1_000, 500)


def _shown(history: History, cut: Cut, snapshot: Snapshot) -> Shown:
    return Shown(cut, snapshot.text, history.originals_path(cut))
