"""A request's snapshots: which exist, which one is to be made, and by what call."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from proxy.core.plan import SummaryBoundary, live
from proxy.core.policy import Compress, Source, Wait
from proxy.core.summary import shares
from proxy.dialects.chat import render
from proxy.dialects.chat.render import ActiveSnapshot
from proxy.requests.prepare import PlannedRequest, RenderedRequest, rendered, riding, summary_members
from proxy.requests.summarizer import Snapshot, Summarizer, SummaryAnswer, SummaryJob

if TYPE_CHECKING:
    from proxy.requests.message_cache import MessageCache
    from proxy.requests.records import Records

Ask = Callable[[bytes], Awaitable[SummaryAnswer]]


class Snapshots:
    """What a process knows of snapshots under way, for any request."""

    def __init__(self, summarizer: Summarizer, reader: MessageCache) -> None:
        self._summarizer = summarizer
        self._reader = reader

    async def existing(self, history: PlannedRequest, records: Records) -> ActiveSnapshot | None:
        """The latest cut whose record exists."""
        boundaries = history.plan.boundaries
        found = (
            await records.snapshots([history.snapshot_name(boundary) for boundary in boundaries]) if boundaries else []
        )
        for boundary, snapshot in zip(reversed(boundaries), reversed(found), strict=True):
            if snapshot is not None:
                self._summarizer.used(records.key("snapshots", history.conversation))
                return _shown(history, boundary, snapshot)
        return None

    async def complete(self, ready: RenderedRequest, records: Records, tenant: str, ask: Ask) -> RenderedRequest:
        """The request with the snapshot that its plan wants, made or waited for as the policy says.

        A request that is too large without it waits whatever the policy says; one whose summary fails goes on without,
        and shows at once what its event moves.
        """
        history = ready.history
        boundary = history.plan.boundaries[-1] if history.plan.boundaries else None
        if boundary is None or (ready.shown and ready.shown.boundary == boundary):
            return ready
        job = self._job(ready, boundary, records, tenant, ask)
        if history.policy.offload.compress.wait is Wait.NEVER and history.room.holds(ready.tokens):
            self._summarizer.request(job)
            return ready
        snapshot = await self._summarizer.wait(job)
        if snapshot is None:
            return rendered(history, ready.shown, ready.rounds, self._reader, history.plan)
        return rendered(history, _shown(history, boundary, snapshot), ready.rounds, self._reader)

    def _job(
        self, ready: RenderedRequest, boundary: SummaryBoundary, records: Records, tenant: str, ask: Ask
    ) -> SummaryJob:
        history, shown = ready.history, ready.shown
        offload = history.policy.offload
        snapshot_tokens = offload.compress.snapshot_tokens
        sizes = _sizes(history, boundary, shown)
        replaced = sum(sizes.get(index, 0) for index in render.taken(history.transcript, boundary))
        window, left = history.room.window, history.summary_limit
        limit, reply = group_limits(offload.compress, window, left)
        if window:
            left = history.room.left(sum(sizes.values()))
        rides = offload.compress.source is Source.CONVERSATION and history.summary_model == history.request.model
        return SummaryJob(
            key=records.key("snapshots", history.snapshot_name(boundary)),
            tenant=tenant,
            conversation=records.key("snapshots", history.conversation),
            model=history.summary_model,
            snapshot_tokens=snapshot_tokens,
            replaced_tokens=replaced,
            store_dir=offload.store_dir,
            timeout=offload.compress.timeout,
            group_tokens=limit,
            max_calls=offload.compress.max_calls,
            riding=(lambda task: riding(history, boundary, shown, ready.rounds, left)(task))
            if rides and left >= 2 * snapshot_tokens
            else None,
            members=summary_members(history, reply),
            history=lambda: render.originals(history.transcript, boundary, shown.boundary if shown else None),
            earlier=shown.text if shown else "",
            originals=history.originals_path(boundary),
            ask=ask,
        )


def _sizes(history: PlannedRequest, boundary: SummaryBoundary, shown: ActiveSnapshot | None) -> dict[int, int]:
    """Tokens of each message up to the cut as it was sent before the cut's event; those that a snapshot stood for count
    as that snapshot, at its first message."""
    moves = history.plan.before(boundary.event).moves
    sizes = {index: live(item, moves.get(index)) for index, item in enumerate(history.past.items[: boundary.end])}
    before = render.taken(history.transcript, shown.boundary) if shown else []
    sizes |= dict.fromkeys(before, 0)
    return sizes | dict.fromkeys(before[:1], history.policy.offload.compress.snapshot_tokens)


def group_limits(compress: Compress, window: int | None, reply: int = 0) -> tuple[int, int]:
    """Most tokens of history for one summary call, 0 where neither the policy nor upstream says; and most of its reply,
    which is `reply` where nothing is known of the window."""
    if window is None:
        return compress.group_token_threshold, reply
    history, reply = shares(window, compress.snapshot_tokens)
    return compress.group_token_threshold or history, reply


def _shown(history: PlannedRequest, boundary: SummaryBoundary, snapshot: Snapshot) -> ActiveSnapshot:
    return ActiveSnapshot(boundary, snapshot.text, history.originals_path(boundary))
