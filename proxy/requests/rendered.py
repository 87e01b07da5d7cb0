"""A request as it is sent: rendered to its plan with the records that exist."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from proxy.dialects import Entry, render
from proxy.dialects.files import Files, moved_files
from proxy.dialects.render import ActiveSnapshot
from proxy.dialects.turn import Turn
from proxy.plan import compacting
from proxy.plan.plan import Plan, live
from proxy.plan.turn import Hidden
from proxy.policy import ArchiveUse, Inject
from proxy.requests.planned import Planned
from proxy.tools import answer as tools

if TYPE_CHECKING:
    from proxy.dialects.turn import Turn
    from proxy.requests.cache import MessageCache


class Rendered(msgspec.Struct, frozen=True):
    """A request ready to send. `plan` is the part of the history's plan that it shows."""

    planned: Planned
    plan: Plan
    shown: ActiveSnapshot | None
    rounds: Mapping[int, Hidden]
    """The hidden rounds as they are sent, by the index of the reply that hid them."""
    entries: list[Entry]
    tokens: int
    """The tokens of the entries as sent."""
    found: Mapping[int, Hidden]
    """The hidden rounds that have records, whether or not there is room for them."""
    altered: Mapping[int, Entry] = {}
    """The client's entries that are sent otherwise than they came, as they are sent."""

    @classmethod
    def of(
        cls,
        planned: Planned,
        shown: ActiveSnapshot | None,
        rounds: Mapping[int, Hidden],
        reader: MessageCache,
        plan: Plan | None = None,
    ) -> Rendered:
        """Render the plan with the records that exist. `plan` replaces the part of the plan that they allow."""
        plan = plan or planned.plan.shown(shown.boundary if shown else None)
        compacted = reader.compactor(planned.dialect, planned.transcript, planned.reading.shape)
        sent = shrunk(planned, plan, rounds)
        altered: dict[int, Entry] = {}
        entries = render.render(
            planned.dialect,
            planned.transcript,
            plan,
            compacted,
            shown=shown,
            role=planned.role,
            rounds=sent,
            marking=planned.request,
            altered=altered,
        )
        asked, start = planned.summary_asked, shown.boundary.end if shown else 0
        if asked is not None and asked >= start and planned.policy.tools.inject is not Inject.NEVER:
            last = asked - len(planned.history)
            part, text = planned.dialect.texts(entries[last])[-1]
            hinted = {part: text + compacting.hint(planned.names[1])}
            altered[asked] = entries[last] = planned.dialect.replace(entries[last], hinted)
        tokens = _size(planned, plan, shown, sent, reader)
        return Rendered(planned, plan, shown, sent, entries, tokens, rounds, altered)

    @property
    def changed(self) -> bool:
        """Whether the request differs from what the client sent."""
        return self.injecting or not self.plan.empty or bool(self.rounds)

    @property
    def injecting(self) -> bool:
        """Whether our tools are added. Once added, they stay, because decisions are final.

        Hidden rounds alone are a reason to add them: an event that was shown while the request was too large may be
        waiting again, and the planned still has the calls of our tools from that time.
        """
        inject = self.planned.policy.tools.inject
        offloading = not self.plan.empty or bool(self.rounds) or self.planned.recalls
        return inject is Inject.ALWAYS or (inject is Inject.WHEN_OFFLOADING and offloading)

    @property
    def moves_name(self) -> str:
        """A name for all files together, which identifies the planned up to the last one and the set of texts."""
        moves, end = self.plan.moves, self.shown.boundary.end if self.shown else 0
        last = max(max(moves, default=-1) + 1, end)
        return f"{self.planned.chain[last].hex()}-{len(self.plan.events)}-{end}-{hash(tuple(moves)):x}"

    def turn(self, usage: bool = True) -> Turn:
        """Return the turn that sends this request, and asks for its `usage`."""
        planned = self.planned
        definitions = our_definitions(planned) if self.injecting else []
        max_rounds = planned.policy.tools.max_rounds
        left = planned.reply_left(self.tokens)
        return planned.dialect.turn(planned.request, self.entries, definitions, max_rounds, usage, left)

    def files(self) -> Files:
        """Return the files that our tools can read. A waiting event's files are included: it may have been shown.

        Beside these, they can read `planned.quoted` where the caller's records have it.
        """
        planned = self.planned
        boundary = self.shown.boundary if self.shown else None
        store_dir = planned.policy.offload.store_dir
        return moved_files(planned.dialect, planned.transcript, planned.plan, store_dir, boundary, planned.chain)

    def originals(self) -> dict[str, Callable[[], str]]:
        """Return functions that return the moved texts and the originals behind snapshots, by their files' names."""
        files = self.files()
        return {path.rpartition("/")[2]: partial(files.read, path) for path in files}

    def fitting(self, reader: MessageCache) -> Rendered:
        """Return the request without the hidden rounds that do not fit the window. The oldest are left out first.

        Each time that one more is left out, the prefix breaks near its beginning. So they leave in a few large groups,
        of more than half of all tokens but the newest round's. The newest is left out only if it does not fit itself.
        """
        planned, rounds = self.planned, dict(self.found)
        start = self.shown.boundary.end if self.shown else 0
        sizes = [(index, hidden.tokens if index >= start else 0) for index, hidden in sorted(self.rounds.items())]
        excess = -planned.room.left(self.tokens)
        group = 1 << max(sum(size for _, size in sizes[:-1]).bit_length() - 1, 0)
        freed, enough = 0, -(-excess // group) * group
        for index, size in sizes:
            if freed >= (excess if index == sizes[-1][0] else enough):
                break
            del rounds[index]
            freed += size
        fewer = Rendered.of(planned, self.shown, rounds, reader, self.plan)
        return msgspec.structs.replace(fewer, found=self.found)

    def compressed(self) -> int:
        """Return how many entries the snapshot replaces."""
        return len(render.taken(self.planned.transcript, self.shown.boundary)) if self.shown else 0

    def compacted(self) -> int:
        """Return how many entries are sent with previews."""
        gone = set(render.taken(self.planned.transcript, self.shown.boundary)) if self.shown else set()
        return len(self.plan.moves.keys() - gone)


def shrunk(planned: Planned, plan: Plan, rounds: Mapping[int, Hidden]) -> dict[int, Hidden]:
    """Return the hidden rounds as they are sent: long answers that were used are pointers."""
    least = planned.policy.offload.max_tool_message_tokens
    return render.shrunk(planned.dialect, plan, rounds, least, planned.names)


def our_definitions(planned: Planned) -> list[bytes]:
    """Return the definitions of our tools, as the request's API has them."""
    others = planned.policy.tools.archive is ArchiveUse.SEARCH
    return tools.definitions(planned.names, planned.policy.offload.store_dir, others=others)


def _size(
    planned: Planned,
    plan: Plan,
    shown: ActiveSnapshot | None,
    rounds: Mapping[int, Hidden],
    reader: MessageCache,
) -> int:
    """Return the tokens of the entries as sent."""
    start = shown.boundary.end if shown else 0
    total = sum(hidden.tokens for index, hidden in rounds.items() if index >= start)
    if shown:
        total += reader.count(render.shown_block(planned.transcript, shown), planned.request.model)
    for index, item in enumerate(planned.history.items):
        if shown and index < shown.boundary.end and not render.stays(planned.transcript, shown.boundary, index):
            continue
        total += live(item, plan.moves.get(index))
    return total
