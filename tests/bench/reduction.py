"""What auto mode leaves of recorded runs at the default policy, on paper: no server and no model are asked.

    python -m tests.bench.reduction [--smoke] [--above TOKENS]

Every request of a run is planned as the proxy would. A snapshot counts as made at once and as large as the policy
allows, our two tool definitions as `OUR_TOOLS_TOKENS`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Hashable, Iterable, Iterator
from itertools import islice, pairwise
from statistics import median

import msgspec

from proxy.core.plan import Item, Plan, Role, Room, fold, live
from proxy.core.policy import Offload
from proxy.core.transcript import Reading, Transcript, Unplannable, read
from proxy.prepare import OUR_TOOLS_TOKENS
from proxy.tokens import Tokens
from tests.transcripts import Run, absence, load

Segment = tuple[Hashable, int]
"""What stands at a place of the prompt, and its tokens."""
Planner = Callable[[list[Item]], Plan]


class Row(msgspec.Struct, frozen=True):
    """One run. `before` and `after` are tokens of its last request, `breaks` the times that its prefix changed."""

    run: str
    requests: int
    before: int
    after: int
    events: int
    cuts: int
    breaks: int

    @property
    def reduction(self) -> float:
        return 1 - self.after / self.before


def items_of(run: Run, offload: Offload, tokens: Tokens) -> list[Item]:
    """The run's messages as the plan sees them. Raises Unplannable."""
    raws = [json.dumps(message, ensure_ascii=False).encode() for message in run.messages]
    measured = [read(raw, Reading.of(offload), lambda text: tokens.count(text, "gpt-4o")) for raw in raws]
    return Transcript(raws, measured).items(offload)


def points(items: list[Item]) -> list[int]:
    """How many messages each of the run's requests had: the client asked before every assistant message."""
    return [index for index, item in enumerate(items) if index and item.role is Role.ASSISTANT]


def prompts(items: list[Item], planner: Planner) -> Iterator[tuple[Plan, list[Segment]]]:
    """Every request of a run: its plan, and what goes upstream."""
    for point in points(items):
        plan = planner(items[:point])
        yield plan, list(segments(items[:point], plan))


def segments(
    items: list[Item], plan: Plan, snapshot_tokens: int = Offload().compress.snapshot_tokens
) -> Iterator[Segment]:
    """The prompt as upstream lays it out: tools, then messages, the snapshot behind the first system message."""
    cut = plan.cuts[-1] if plan.cuts else None
    yield ("tools", plan.empty), 0 if plan.empty else OUR_TOOLS_TOKENS
    snapshot: list[Segment] = [(("snapshot", cut.end), snapshot_tokens)] if cut else []
    if items[0].role is not Role.SYSTEM:
        yield from snapshot
    for index, item in enumerate(items):
        if not (cut and index < cut.end and item.role is not Role.SYSTEM and index not in cut.pins):
            move = plan.moves.get(index)
            yield (index, move and bool(move.event)), live(item, move)
        if index == 0 and item.role is Role.SYSTEM:
            yield from snapshot


def measured(run: Run, offload: Offload, tokens: Tokens) -> Row:
    items = items_of(run, offload, tokens)
    sent = list(prompts(items, lambda history: fold(history, offload, Room())))
    plan, last = sent[-1]
    breaks = sum(later[: len(earlier)] != earlier for (_, earlier), (_, later) in pairwise(sent))
    before = sum(item.tokens for item in items[: points(items)[-1]])
    after = sum(size for _, size in last)
    return Row(run.id, len(sent), before, after, len(plan.events), len(plan.cuts), breaks)


def rows(runs: Iterable[Run], offload: Offload) -> Iterator[Row]:
    tokens = Tokens()
    for run in runs:
        try:
            yield measured(run, offload, tokens)
        except Unplannable as error:
            print(f"{run.id}: left out, {error}")


def table(found: list[Row]) -> str:
    lines = [
        f"{'run':48} {'requests':>8} {'before':>8} {'after':>8} {'reduced':>8} {'events':>6} {'cuts':>5} {'breaks':>6}"
    ]
    lines += [
        f"{row.run:48.48} {row.requests:8} {row.before:8,} {row.after:8,} {row.reduction:8.1%}"
        f" {row.events:6} {row.cuts:5} {row.breaks:6}"
        for row in found
    ]
    middle = (median(getattr(row, name) for row in found) for name in ("reduction", "events", "cuts", "breaks"))
    lines.append("median of {}: reduced {:.1%}, {:g} events, {:g} cuts, {:g} breaks".format(len(found), *middle))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--above", type=int, default=90_000, help="tokens that a run must have")
    parser.add_argument("--smoke", action="store_true", help="two runs only")
    options = parser.parse_args()
    if absence():
        parser.exit(0, absence() + "\n")
    print(table(list(rows(islice(load(options.above), 2 if options.smoke else None), Offload()))))


if __name__ == "__main__":
    main()
