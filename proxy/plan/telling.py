"""Says in words what a plan did at one request, and why, with the figures that decided. Pure.

The log, the dashboard and the replay's report show the same sentences. All figures are tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import takewhile

import msgspec

from proxy.plan.plan import Cause, Item, OffloadEvent, Plan, Role, live
from proxy.plan.rental import PAYBACK, SkiRental
from proxy.policy import Offload

CAUSES = {
    Cause.RENT.name.lower(): "newest results that paid off",
    Cause.TOTAL.name.lower(): "too much old history",
    Cause.HARD.name.lower(): "far too much old history",
    Cause.WINDOW.name.lower(): "to fit the context window",
}
"""Why an event happened, in a few words."""


class Answers(msgspec.Struct, frozen=True):
    """Answers of our tools that this request has pointers to instead, for the first time."""

    count: int
    """The replies before which they were given."""
    before: int
    after: int


def event_at(plan: Plan, messages: int) -> OffloadEvent | None:
    """Return the event that happens at a request of so many messages, if there is one."""
    return plan.events[-1] if plan.events and plan.events[-1].point == messages else None


def told(
    items: Sequence[Item],
    plan: Plan,
    offload: Offload,
    window: int | None,
    *,
    waiting: bool = False,
    answers: Answers | None = None,
) -> str:
    """Say what the plan of a history did at the request that ends with it; empty if that is nothing.

    `waiting`: the event is not shown yet, because its summary is not ready.
    """
    return " ".join(_sentences(items, plan, offload, window, waiting, answers))


def _sentences(
    items: Sequence[Item], plan: Plan, offload: Offload, window: int | None, waiting: bool, answers: Answers | None
) -> Iterator[str]:
    new = range(_unanswered(items), len(items))
    early = [index for index in new if index in plan.moves and not plan.moves[index].event]
    if early:
        limit = f"max_unseen_tool_tokens ({offload.max_unseen_tool_tokens:,})"
        each = "it has" if len(early) == 1 else "each has"
        yield f"Sent only a preview of {_sized(items, plan, early, 'new result')}, because {each} more than {limit}."
    event = event_at(plan, len(items))
    if event:
        done = _done(items, plan, event)
        why = _because(event, offload, window, items, plan)
        anew = "" if _weighs(event, offload) else f"; {event.rewritten:,} tokens are written anew"
        waits = " Requests are sent without this until its summary is ready." if waiting else ""
        yield f"{done[0].upper()}{done[1:]} because {why}{anew}.{waits}"
    if answers:
        sizes = f"{answers.before:,} tokens, {answers.after:,} stay"
        where = _several(answers.count, "reply", "replies")
        yield f"Replaced what grep and read_file answered before {where} ({sizes}) because the model has used it."


def _because(event: OffloadEvent, offload: Offload, window: int | None, items: Sequence[Item], plan: Plan) -> str:
    """Say why the newest event happened."""
    limit, first = offload.max_total_tokens, offload.plan == 1
    anew = f"rewriting {event.rewritten:,} tokens" + (" and a summary" if _summarised(items, plan) else "")
    grown = f"old history had grown to {event.old:,} tokens, above"
    them = "it" if sum(move.event == len(plan.events) for move in plan.moves.values()) == 1 else "them"
    match event.cause:
        case Cause.RENT if event.paid >= round(SkiRental(offload).price(event.rewritten, None)):
            return f"carrying {them} had cost as much as {anew}"
        case Cause.RENT:
            return f"{PAYBACK} more requests with {them} would cost as much as {anew}"
        case Cause.TOTAL if first:
            return f"{grown} max_total_tokens ({limit:,}), and carrying it had cost as much as {anew}"
        case Cause.TOTAL:
            return f"{grown} max_total_tokens ({limit:,}), and the session stays no dearer than as it came"
        case Cause.HARD if first:
            return f"{grown} twice max_total_tokens ({limit:,}), where an event need not pay for itself"
        case Cause.HARD:
            return f"{grown} hard_total_tokens ({offload.hard_total():,}), where an event need not pay for itself"
        case Cause.WINDOW:
            return f"the history, {event.old:,} tokens, did not fit the context window of {window or 0:,}"


def _weighs(event: OffloadEvent, offload: Offload) -> bool:
    """Whether the reason for an event weighs what is written anew."""
    return event.cause is Cause.RENT or (event.cause is Cause.TOTAL and offload.plan == 1)


def newly_used(items: Sequence[Item], plan: Plan) -> range:
    """Return where the replies are whose hidden answers leave at this history's request; see `Plan.used`."""
    if plan.answered is None:
        newest = event_at(plan, len(items))
        return range(plan.without(len(plan.events)).used, plan.used) if newest else range(0)
    before = plan.used - 1
    while before > 0 and not (items[before].role is Role.ASSISTANT and items[before - 1].role is not Role.ASSISTANT):
        before -= 1
    return range(max(before, 0), plan.used)


def _done(items: Sequence[Item], plan: Plan, event: OffloadEvent) -> str:
    number, gone = len(plan.events), _summarised(items, plan)
    taken = set(gone)
    moved = [index for index, move in plan.moves.items() if move.event == number and index not in taken]
    results = [index for index in moved if items[index].role is not Role.USER]
    users = [index for index in moved if items[index].role is Role.USER]
    parts = []
    if results:
        parts.append(f"moved {_sized(items, plan, results, 'result')}")
    if users:
        parts.append(f"{'' if results else 'moved '}{_sized(items, plan, users, 'long user message')}")
    if gone:
        replaced = sum(items[index].tokens for index in gone)
        parts.append(f"summarised {_several(len(gone), 'old message')} ({replaced:,} tokens as they came)")
    return _joined(parts) or "changed nothing"


def _summarised(items: Sequence[Item], plan: Plan) -> list[int]:
    """Return the messages that the newest event's snapshot replaces."""
    if not plan.boundaries or plan.boundaries[-1].event != len(plan.events):
        return []
    leading = sum(1 for _ in takewhile(lambda item: item.role is Role.SYSTEM, items))
    boundary = plan.boundaries[-1]
    return [index for index in range(leading, boundary.end) if index not in boundary.pins]


def _sized(items: Sequence[Item], plan: Plan, indexes: Collection[int], noun: str) -> str:
    before = sum(items[index].tokens for index in indexes)
    after = sum(live(items[index], plan.moves[index]) for index in indexes)
    return f"{_several(len(indexes), noun)} ({before:,} tokens, {after:,} stay)"


def _unanswered(items: Sequence[Item]) -> int:
    """Return where the messages begin that the model has not answered."""
    return next((index + 1 for index in range(len(items) - 1, -1, -1) if items[index].role is Role.ASSISTANT), 0)


def _joined(parts: Sequence[str]) -> str:
    return " and ".join(parts) if len(parts) < 3 else f"{', '.join(parts[:-1])}, and {parts[-1]}"


def _several(count: int, noun: str, nouns: str = "") -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {nouns or noun + 's'}"
