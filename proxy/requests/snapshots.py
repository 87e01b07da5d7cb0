"""A request's snapshots: finds the existing ones, and prepares the call that makes a missing one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from proxy.dialects import render
from proxy.dialects.render import ActiveSnapshot
from proxy.plan import summary
from proxy.plan.history import moved_pieces
from proxy.plan.plan import SummaryBoundary, live
from proxy.plan.refusals import Addition
from proxy.plan.summary import SummaryAnswer, shares
from proxy.policy import Compress, Source, Wait
from proxy.requests.lines import Line
from proxy.requests.prepare import PlannedRequest, RenderedRequest, rendered, summary_on_prefix
from proxy.requests.snapshot_writer import Snapshot, SummaryJob

if TYPE_CHECKING:
    from proxy.requests.message_cache import MessageCache
    from proxy.requests.records import Records
    from proxy.requests.summarizer import Summarizer
    from proxy.requests.windows import Known
    from proxy.upstream.traffic import Idle

Ask = Callable[[bytes], Awaitable[SummaryAnswer]]


class Snapshots:
    """Finds snapshots for every request of the process, and has missing ones made."""

    def __init__(self, summarizer: Summarizer, reader: MessageCache, known: Known) -> None:
        self._summarizer = summarizer
        self._reader = reader
        self._known = known

    def seen(self, history: PlannedRequest, records: Records) -> None:
        """Note that the history was sent, whether or not it needs a snapshot now. Small ones are far from it."""
        if history.past.fold is not None:
            self._summarizer.seen(_scope(history, records), history.chain[-1])

    async def existing(self, history: PlannedRequest, records: Records) -> ActiveSnapshot | None:
        """Return the snapshot of the latest boundary that has a record, or None.

        What an earlier version of the task made is used where this one has made nothing newer.
        """
        shown: ActiveSnapshot | None = None
        for version in (summary.PROMPT_VERSION, *summary.EARLIER_VERSIONS):
            newer = [one for one in history.plan.boundaries if shown is None or one.end > shown.boundary.end]
            names = [history.snapshot_name(boundary, version) for boundary in newer]
            found = await records.snapshots(names) if names else []
            for boundary, name, stored in reversed(list(zip(newer, names, found, strict=True))):
                snapshot = stored or self._summarizer.unstored(records.key("snapshots", name))
                if snapshot is not None:
                    shown = _shown(history, boundary, snapshot)
                    break
        if shown is not None:
            self._summarizer.used(_line(history, shown.boundary, records))
        return shown

    async def complete(
        self, ready: RenderedRequest, records: Records, tenant: str, ask: Ask, idle: Callable[[], Idle]
    ) -> RenderedRequest:
        """Return the request with the snapshot that its plan needs. The policy says whether to wait for it.

        A request that is too large without the snapshot always waits. If the summary fails, the request is sent
        without it, and shows everything that its event moves at once.
        """
        history = ready.history
        boundary = history.plan.boundaries[-1] if history.plan.boundaries else None
        if boundary is None or (ready.shown and ready.shown.boundary == boundary):
            return ready
        measure = partial(_measured, history, boundary, ready.shown)
        measured = await self._reader.run(measure, history.request.large, tenant)
        job = self._job(ready, boundary, measured, records, tenant, ask, idle)
        if history.policy.wait is not Wait.ALWAYS and history.room.holds(ready.tokens):
            self._summarizer.request(job)
            return ready
        snapshot = await self._summarizer.wait(job)
        if snapshot is None:
            return rendered(history, ready.shown, ready.found, self._reader, history.plan)
        return rendered(history, _shown(history, boundary, snapshot), ready.found, self._reader)

    def _job(
        self,
        ready: RenderedRequest,
        boundary: SummaryBoundary,
        measured: _Measured,
        records: Records,
        tenant: str,
        ask: Ask,
        idle: Callable[[], Idle],
    ) -> SummaryJob:
        history, shown = ready.history, ready.shown
        offload = history.policy.offload
        snapshot_tokens = offload.compress.snapshot_tokens
        window, left = history.room.window, history.summary_limit
        limit, reply = group_limits(offload.compress, window, left)
        if window:
            left = history.room.left(measured.tokens) + history.room.reply
        key = records.key("snapshots", history.snapshot_name(boundary))
        refusable = history.refusable(key.partition("/")[0], Addition.SUMMARY)
        rides = offload.compress.source is Source.CONVERSATION and history.summary_model == history.request.model
        rides = rides and not self._known.refuses(refusable)
        riding = partial(summary_on_prefix, history, boundary, shown, ready.found, min(left, history.summary_limit))
        model, asked, most = history.summary_model, history.request, min(reply, history.summary_limit)
        return SummaryJob(
            key=key,
            tenant=tenant,
            line=_line(history, boundary, records),
            model=history.summary_model,
            dialect=history.dialect.name,
            snapshot_tokens=snapshot_tokens,
            replaced_tokens=measured.replaced,
            store_dir=offload.store_dir,
            timeout=offload.compress.timeout,
            group_tokens=limit,
            max_calls=offload.compress.max_calls,
            riding=riding if rides and left >= 2 * snapshot_tokens else None,
            alone=lambda text: history.dialect.summary_request(text, model, asked, most),
            history=lambda: render.originals(
                history.dialect, history.transcript, boundary, shown.boundary if shown else None
            ),
            earlier=shown.text if shown else "",
            originals=f"{offload.store_dir}/" if len(history.plan.boundaries) > 1 else history.originals_path(boundary),
            taken=lambda: render.originals(history.dialect, history.transcript, boundary),
            references=lambda: _references(history, boundary),
            stored=measured.stored,
            idle=idle() if history.policy.wait is Wait.IDLE else None,
            ask=ask,
            prices=offload,
            rode=lambda taken: (self._known.accepted if taken else self._known.refused)(refusable),
        )


class _Measured(NamedTuple):
    """What a summary call says of the history before its boundary, for which all of it has to be looked at."""

    tokens: int
    """As it was sent before the boundary's event."""
    replaced: int
    """The tokens that the snapshot replaces."""
    stored: frozenset[str]
    """The paths of all files that exist at the boundary."""


def _measured(history: PlannedRequest, boundary: SummaryBoundary, shown: ActiveSnapshot | None) -> _Measured:
    sizes = _sizes(history, boundary, shown)
    replaced = sum(sizes.get(index, 0) for index in render.taken(history.transcript, boundary))
    return _Measured(sum(sizes.values()), replaced, _stored(history, boundary))


def _references(history: PlannedRequest, boundary: SummaryBoundary) -> dict[str, str]:
    """Return what each moved result is that the boundary's snapshot replaces, by path, the newest first."""
    transcript, store_dir = history.transcript, history.policy.offload.store_dir
    moved = [index for index in render.taken(transcript, boundary) if index in history.plan.moves]
    return {
        f"{store_dir}/{piece.name}": piece.label.about
        for index in reversed(moved)
        for piece in moved_pieces(transcript.messages[index], history.plan.moves[index].event == 0)
    }


def _stored(history: PlannedRequest, boundary: SummaryBoundary) -> frozenset[str]:
    """Return the paths of all files that exist at the boundary."""
    pieces = {
        f"{history.policy.offload.store_dir}/{piece.name}"
        for index, move in history.plan.moves.items()
        if index < boundary.end
        for piece in moved_pieces(history.transcript.messages[index], move.event == 0)
    }
    groups = {history.originals_path(one) for one in history.plan.boundaries if one.end <= boundary.end}
    return frozenset(pieces | groups)


def _sizes(history: PlannedRequest, boundary: SummaryBoundary, shown: ActiveSnapshot | None) -> dict[int, int]:
    """Return the tokens of each message up to the boundary, as it was sent before the boundary's event.

    For messages that an earlier snapshot replaces, the first one counts as the snapshot and the others as 0.
    """
    moves = history.plan.before(boundary.event).moves
    sizes = {index: live(item, moves.get(index)) for index, item in enumerate(history.past.items[: boundary.end])}
    before = render.taken(history.transcript, shown.boundary) if shown else []
    sizes |= dict.fromkeys(before, 0)
    return sizes | dict.fromkeys(before[:1], history.policy.offload.compress.snapshot_tokens)


def group_limits(compress: Compress, window: int | None, reply: int = 0) -> tuple[int, int]:
    """Return the most tokens of history for one summary call, and the most tokens of its reply.

    The first is 0 if neither the policy nor upstream sets a limit. The second is `reply` if the window is unknown.
    """
    if window is None:
        return compress.group_token_threshold, reply
    history, reply = shares(window, compress.snapshot_tokens)
    return compress.group_token_threshold or history, reply


def _scope(history: PlannedRequest, records: Records) -> str:
    return records.key("snapshots", history.summary_model)


def _line(history: PlannedRequest, boundary: SummaryBoundary, records: Records) -> Line:
    return Line(_scope(history, records), history.chain, history.past.messages, boundary.end)


def _shown(history: PlannedRequest, boundary: SummaryBoundary, snapshot: Snapshot) -> ActiveSnapshot:
    before = [one for one in history.plan.boundaries if one.end < boundary.end]
    earlier = tuple(history.originals_path(one) for one in before)
    return ActiveSnapshot(
        boundary, snapshot.text, history.originals_path(boundary), before[-1] if before else None, earlier
    )
