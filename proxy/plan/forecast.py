"""What a plan would have sent, what that would have cost, and in words what it did or waits for.
Pure.

Costs are in plain input tokens, under the policy's prices. Upstream's cache keeps the beginning of
a prompt. As much of it as upstream read there, or as the request before this one had, would also
have been cached with the plan, but only up to the first change that the plan makes between these
two requests. A summary costs what its call does. What the model would have read back is not known,
and the reply costs the same in both cases; neither is included.

The log, the header `x-offload-reason`, the dashboard and the replay's report show the same
sentences. All figures are tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import takewhile

import msgspec

from proxy.plan.plan import CEILING_SHARE, Cause, Item, OffloadEvent, Plan, Role, Standing, live
from proxy.plan.planner import PAYBACK, least_freed
from proxy.policy import Inject, Mode, Offload, Policy, Wait

# about the tokens that the task adds to the conversation in a summary call
SUMMARY_REQUEST_TOKENS = 500
# an output token in input tokens: 5 at Anthropic's, 4 to 8 at OpenAI's price lists (2025)
OUTPUT_PRICE = 5
LEARNED = "learned"
UNSEEN = "unseen"
"""Causes besides those of events: the plan was made again for a learned window; a result was too
large to be sent."""
CAUSES = {
    Cause.EARLY.name.lower(): "results that cost more to keep than to move",
    Cause.TOTAL.name.lower(): "history above its ceiling",
    Cause.WINDOW.name.lower(): "to fit the context window",
    Cause.ASKED.name.lower(): "compaction that the client asked for",
    Cause.EXPIRED.name.lower(): "upstream's cache had expired",
    LEARNED: "planned again for a window that was learned",
    UNSEEN: "new results, too large to be sent even once",
}
"""Why an event happened, in a few words."""


class Billed(msgspec.Struct, frozen=True):
    """The input tokens of a request as upstream counted them, and those of them that it had in its
    cache."""

    prompt: int
    cached: int


class Forecast(msgspec.Struct, frozen=True):
    """What the plan would have sent, and the cost of the request's input as it came and as
    planned."""

    tokens: int  # of the history, without definitions of tools
    ours: bool  # whether our tools would have been added
    compacted: int
    compressed: int
    before: int
    after: int


def cost(offload: Offload, prompt: int, cached: int, output: int = 0, largest: int = 0) -> int:
    """Return what a request of ours cost that upstream has billed. `largest` is the largest prompt
    of its rounds."""
    return round(_cost(offload, prompt, cached, largest) + OUTPUT_PRICE * output)


def cost_as_it_came(
    items: Sequence[Item], offload: Offload, head: int, scale: float = 1.0, *, cached: bool = True
) -> int:
    """Return what the input of a request would have cost as it came. `head` is the tokens before
    the history, and `scale` how many upstream counts for one of ours. Everything that the request
    before this one had counts as cached, unless upstream had none of it `cached` although it was
    sent again."""
    came = head + sum([item.tokens for item in items])
    return round(scale * _cost(offload, came, _cached_before(items, head) if cached else 0))


def forecast(
    items: Sequence[Item],
    plan: Plan,
    policy: Policy,
    head: int,
    tools: int,
    billed: Billed | None = None,
) -> Forecast:
    """Return what this plan of a history would have come to. `head` is the tokens before the
    history, and `tools` those of our tools. A snapshot that nobody waits for is shown from the
    client's next request on. `billed` is what upstream said; without it, everything that the
    request before this one had counts as cached."""
    offload = policy.offload
    inject = policy.tools.inject
    awaited = 1 if _summarises(plan) and offload.compress.wait is not Wait.ALWAYS else 0

    def shown(waited: int) -> tuple[Plan, int]:
        """The part of the plan that is sent so many requests after its newest event (-1: before
        it), and our tools."""
        part = plan.without(len(plan.events)) if plan.events and waited < awaited else plan
        added = inject is Inject.ALWAYS or (inject is Inject.WHEN_OFFLOADING and not part.empty)
        return part, tools if added else 0

    now, ours = shown(plan.waited)
    earlier, had = shown(plan.waited - 1)
    sent = _segments(items, now, offload)
    tokens = sum(size for _, size, _ in sent)
    came = head + sum(item.tokens for item in items)
    scale = billed.prompt / came if billed and came else 1.0
    cached = billed.cached / scale if billed and scale else float(_cached_before(items, head))
    kept = min(cached, head)
    reach = cached - head
    # the beginning that both have, as far as upstream's cache reaches into the history
    if reach > 0 and ours == had:
        kept += ours
        for (key, size, end), (other, _, _) in zip(
            sent, _segments(items, earlier, offload), strict=False
        ):
            if key == other:
                kept += size if end <= reach else max(size - (end - reach), 0)
            if key != other or end > reach:
                break
    summary = summary_cost(offload, tokens) if not plan.waited and _summarises(plan) else 0.0
    taken = {key[0] for key, _, _ in sent}
    return Forecast(
        tokens=tokens,
        ours=ours > 0,
        compacted=sum(index in taken for index in now.moves),
        compressed=sum(index not in taken for index in range(len(items))),
        before=round(scale * _cost(offload, came, cached)),
        after=round(scale * (_cost(offload, head + ours + tokens, kept) + summary)),
    )


def summary_cost(offload: Offload, tokens: int) -> float:
    """Return the cost of the call that summarises so many cached tokens."""
    output = OUTPUT_PRICE * offload.compress.snapshot_tokens
    return offload.cached_read * tokens + SUMMARY_REQUEST_TOKENS + output


def worth_whole(items: Sequence[Item], plan: Plan, policy: Policy, head: int, tools: int) -> bool:
    """Whether sending a history whole once costs at most twice what the plan costs. Upstream's
    cache has the beginning up to the first message that the plan changes."""
    first = 0 if plan.boundaries else min(plan.moves, default=0)
    came = head + sum(item.tokens for item in items)
    same = head + sum(item.tokens for item in items[:first])
    return _cost(policy.offload, came, same) <= 2 * forecast(items, plan, policy, head, tools).after


def _cost(offload: Offload, prompt: int, cached: float, largest: int = 0) -> float:
    """Return the cost of a prompt of which so many tokens are cached. The rest is written to the
    cache."""
    cached = min(cached, prompt)
    usual = offload.cached_read * cached + offload.cache_write * (prompt - cached)
    return offload.factor(largest or prompt) * usual


def _summarises(plan: Plan) -> bool:
    """Whether the newest event has a summary."""
    return bool(plan.events and plan.boundaries) and plan.boundaries[-1].event == len(plan.events)


def _segments(
    items: Sequence[Item], plan: Plan, offload: Offload
) -> list[tuple[tuple[int, int], int, int]]:
    """Return the parts of the history as the plan sends it: what each is, its tokens, and where
    what it stands for ends in the history as it came. The snapshot follows the leading system
    messages."""
    boundary = plan.boundaries[-1] if plan.boundaries else None
    segments: list[tuple[tuple[int, int], int, int]] = []
    end = 0
    leads = True
    for index, item in enumerate(items):
        if leads and item.role is not Role.SYSTEM:
            leads = False
            if boundary:
                segments.append(((-1, boundary.end), offload.compress.snapshot_tokens, end))
        end += item.tokens
        if leads or not boundary or index >= boundary.end or index in boundary.pins:
            move = plan.moves.get(index)
            state = 0  # whole; 1: moved at first sight; 2: moved at an event
            if move:
                state = 2 if move.event else 1
            segments.append(((index, state), live(item, move), end))
    return segments


def _cached_before(items: Sequence[Item], head: int) -> int:
    """Return the tokens that the client's request before this one had; 0 if this is the first
    one."""
    points = (index for index in range(len(items) - 1, 0, -1) if is_answer(items, index))
    last = next(points, None)
    if last is not None and items[-1].role is Role.ASSISTANT:
        last = next(points, None)  # the history ends in a prefill, which is part of this request
    return 0 if last is None else head + sum(item.tokens for item in items[:last])


def is_answer(items: Sequence[Item], index: int) -> bool:
    """Whether the client asked just before this message."""
    return items[index].role is Role.ASSISTANT and items[index - 1].role is not Role.ASSISTANT


# -- in words --------------------------------------------------------------------------------------


class Answers(msgspec.Struct, frozen=True):
    """Answers of our tools that this request has pointers to instead, for the first time."""

    count: int  # the replies before which they were given
    before: int
    after: int


def event_at(plan: Plan) -> OffloadEvent | None:
    """Return the event that happens at the plan's own request, if there is one."""
    return plan.events[-1] if plan.events and not plan.waited else None


def newly_moved(items: Sequence[Item], plan: Plan) -> int:
    """Return how many messages have moved at the plan's own request that were sent before, or are
    new."""
    number = len(plan.events) if event_at(plan) else -1
    now = (move for move in plan.moves.values() if move.event == number and not move.first_preview)
    return len(unseen(items, plan)) + sum(1 for _ in now)


def newly_used(items: Sequence[Item], plan: Plan) -> range:
    """Return where the replies are whose hidden answers leave at this history's request; see
    `Plan.used`."""
    before = plan.used - 1
    while before > 0 and not is_answer(items, before):
        before -= 1
    return range(max(before, 0), plan.used)


def described(
    items: Sequence[Item],
    plan: Plan,
    offload: Offload,
    window: int | None,
    *,
    late: bool = False,
    answers: Answers | None = None,
) -> str:
    """Say what the plan of a history did at the request that ends with it or, if that is nothing,
    what it waits for. `late`: the newest event is not shown yet, because its summary is not
    ready."""
    said = []
    if new := unseen(items, plan):
        each = "it has" if len(new) == 1 else "each has"
        sized = _sized(items, plan, new, "new result")
        limit = offload.unseen_limit(window)
        said.append(f"Sent only a preview of {sized}, because {each} more than {limit:,} tokens.")
    if event := event_at(plan):
        done = f"{_done(items, plan)} because {_because(event, offload, window, plan)}."
        said.append(
            f"Planned, and its summary is not ready yet: {done}"
            if late
            else done[0].upper() + done[1:]
        )
    if answers:
        sizes = f"{answers.before:,} tokens, {answers.after:,} stay"
        where = _several(answers.count, "reply", "replies")
        said.append(
            f"Replaced what grep and read_file answered before {where} ({sizes}) because the model has used it."
        )
    return " ".join(said) or waiting(plan, offload, late=late)


def waiting(plan: Plan, offload: Offload, *, late: bool = False) -> str:
    """Say how far the next event is, in one sentence."""
    if late:
        return "waiting: the summary of old history is not ready yet"
    now = plan.standing
    if now.total > now.ceiling and 2 * now.task > now.total:
        return (
            f"waiting: {now.task:,} of {now.total:,} tokens are in the user's first message, which stays as it is: "
            "what a client writes into one message cannot be moved"
        )
    if not (now.full or now.total > now.ceiling):
        so_far = f"waiting: the history is {now.total:,} of {now.ceiling:,} tokens"
        return (
            so_far
            if offload.mode is Mode.COMPRESS
            else so_far + _early(now, offload) + _stuck(now, offload)
        )
    free = max(now.free, 0)
    least = least_freed(now.ceiling, full=now.full)
    compress = now.full or offload.mode is Mode.COMPRESS
    event = f"a summary of {offload.compress.snapshot_tokens:,} tokens" if compress else "an event"
    if not now.full:
        said = (
            f"the history is {now.total:,} tokens, above its ceiling of {now.ceiling:,}, but "
            + (
                f"{event} would free only {free:,}; it waits until it frees {least:,}, a tenth of the ceiling"
                if free
                else "nothing in it can move now"
            )
        )
    elif free:
        said = (
            f"the request does not fit the context window, but {event} would free only {free:,} of the "
            f"history's {now.total:,} tokens; it waits until it frees {least:,}, half of the ceiling"
        )
    else:
        said = (
            "the request does not fit the context window, but nothing in its history can move now"
        )
    new = (
        f"; {_several(now.new, 'new result')} {'stays' if now.new == 1 else 'stay'} for now"
        if now.new
        else ""
    )
    return f"waiting: {said}{new}{_stuck(now, offload)}"


def _early(now: Standing, offload: Offload) -> str:
    """Say when results move below the ceiling."""
    if not now.results:
        return ""
    results = _several(now.results, "result")
    if not offload.cached_read:
        return f"; {results} can move, and moving early saves nothing where cached input is free"
    old = f"; {now.old:,} of {results} {'is' if now.results == 1 else 'are'} old"
    if not now.old:
        return f"{old}, which takes {_several(offload.keep_views, 'reply', 'replies')}"
    if now.pays_after is None:
        return f"{old}, but so much follows that moving waits for the ceiling"
    return f"{old}, moving {'it' if now.old == 1 else 'them'} pays after {_several(now.pays_after, 'more request')}"


def _stuck(now: Standing, offload: Offload) -> str:
    """Say which results never move."""
    size = f"{offload.max_tool_message_tokens:,} tokens"
    if now.held:
        return f"; {_several(now.held, 'result')} above {size} may not move"
    return (
        ""
        if now.results or offload.mode is Mode.COMPRESS
        else f"; no result above {size} is left to move"
    )


def unseen(items: Sequence[Item], plan: Plan) -> list[int]:
    """Return the new results that this request has only previews of."""
    found: list[int] = []
    for index in range(len(items) - 1, -1, -1):
        if items[index].role is Role.ASSISTANT or plan.empty:
            break
        if index in plan.moves and not plan.moves[index].event:
            found.append(index)
    return found[::-1]


def _because(event: OffloadEvent, offload: Offload, window: int | None, plan: Plan) -> str:
    """Say why the newest event happened, and how much of the history is written again."""
    if event.cause is Cause.ASKED:
        return "the client asked for compaction"
    if event.cause is Cause.EXPIRED:
        return f"the cache at upstream had expired after {_several(event.pause // 60, 'minute')}"
    again = event.rewritten
    total = f"{event.total:,} tokens"
    ceiling = plan.standing.ceiling
    behind = f"; {again:,} tokens are written again"
    if event.cause is Cause.EARLY:
        them = (
            "it"
            if sum(move.event == len(plan.events) for move in plan.moves.values()) == 1
            else "them"
        )
        return f"{PAYBACK} more requests with {them} would cost more than writing {again:,} tokens again"
    if event.cause is Cause.WINDOW:
        return f"the request, with {total} of history, did not fit the context window of {window or 0:,}{behind}"
    limit = (
        "max_total_tokens"
        if ceiling == offload.max_total_tokens
        else f"{CEILING_SHARE:.0%} of the context window"
    )
    return f"the history had grown to {total}, above {ceiling:,} ({limit}){behind}"


def _done(items: Sequence[Item], plan: Plan) -> str:
    """Say what the newest event did."""
    number = len(plan.events)
    gone = list[int]()
    parts = list[str]()
    if _summarises(plan):
        leading = sum(1 for _ in takewhile(lambda item: item.role is Role.SYSTEM, items))
        boundary = plan.boundaries[-1]
        gone = [index for index in range(leading, boundary.end) if index not in boundary.pins]
    moved = sorted(
        {index for index, move in plan.moves.items() if move.event == number}.difference(gone)
    )
    if results := [index for index in moved if items[index].role is not Role.USER]:
        parts.append(f"moved {_sized(items, plan, results, 'result')}")
    if users := [index for index in moved if items[index].role is Role.USER]:
        parts.append(
            f"{'' if results else 'moved '}{_sized(items, plan, users, 'long user message')}"
        )
    if gone:
        replaced = sum(items[index].tokens for index in gone)
        parts.append(
            f"summarised {_several(len(gone), 'old message')} ({replaced:,} tokens as they came)"
        )
    if len(parts) == 3:
        return f"{parts[0]}, {parts[1]}, and {parts[2]}"
    return " and ".join(parts) or "changed nothing"


def _sized(items: Sequence[Item], plan: Plan, indexes: Collection[int], noun: str) -> str:
    before = sum(items[index].tokens for index in indexes)
    after = sum(live(items[index], plan.moves[index]) for index in indexes)
    return f"{_several(len(indexes), noun)} ({before:,} tokens, {after:,} stay)"


def _several(count: int, noun: str, nouns: str = "") -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {nouns or noun + 's'}"
