"""What a plan would have sent and what that would have cost, for a request that went upstream as it came. Pure.

Costs are in plain input tokens, under the policy's prices. Upstream's cache keeps the beginning of a prompt. As much of
it as upstream read there, or as the request before this one had, would also have been cached with the plan, but only up
to the first change that the plan makes between these two requests. A summary costs what its call does. What the model
would have read back is not known, and the reply costs the same in both cases; neither is included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from msgspec.structs import replace

from proxy.plan.history import History
from proxy.plan.plan import Item, Plan, Role, live
from proxy.plan.rental import OUTPUT_PRICE, SkiRental
from proxy.policy import Inject, Offload, Policy, Wait


class Billed(msgspec.Struct, frozen=True):
    """The input tokens of a request as upstream counted them, and those of them that it had in its cache."""

    prompt: int
    cached: int


class Forecast(msgspec.Struct, frozen=True):
    """What the plan would have sent, and the cost of the request's input as it came and as planned."""

    tokens: int
    """Of the history, without definitions of tools."""
    ours: bool
    """Whether our tools would have been added."""
    compacted: int
    compressed: int
    before: int
    after: int


def cost(offload: Offload, prompt: int, cached: int, output: int = 0) -> int:
    """Return what a request of ours cost that upstream has billed."""
    return round(_cost(offload, prompt, cached) + OUTPUT_PRICE * output)


def cost_as_it_came(
    items: Sequence[Item], offload: Offload, head: int, scale: float = 1.0, *, cached: bool = True
) -> int:
    """Return what the input of a request would have cost as it came.

    `head` is the tokens before the history, and `scale` how many upstream counts for one of ours. Everything that the
    request before this one had counts as cached, unless upstream had none of it `cached` although it was sent again.
    """
    came = head + sum([item.tokens for item in items])
    return round(scale * _cost(offload, came, _cached_before(items, head) if cached else 0))


def as_sent(history: History) -> Sequence[Item]:
    """Return the items with the tokens that are sent, those of spaces in arguments included. No plan sees these."""
    if history.sent_tokens == history.tokens:
        return history.items
    return [_wider(item, message.spaces) for item, message in zip(history.items, history.messages, strict=True)]


def _wider(item: Item, by: int) -> Item:
    if not by:
        return item
    return replace(item, tokens=item.tokens + by, first_preview=item.first_preview + by, preview=item.preview + by)


class _Segment(msgspec.Struct, frozen=True, gc=False):
    """A part of a planned prompt. `end` is where what it stands for ends in the history as it came."""

    key: tuple[int, int]
    tokens: int
    end: int


def forecast(
    items: Sequence[Item], plan: Plan, policy: Policy, head: int, tools: int, billed: Billed | None = None
) -> Forecast:
    """Return what this plan of a history would have come to.

    `head` is the tokens before the history, and `tools` those of our tools. A snapshot that nobody waits for is shown
    from the client's next request on. `billed` is what upstream said; without it, everything that the request before
    this one had counts as cached.
    """
    offload = policy.offload
    wait = offload.compress.wait
    now, earlier = _shown(plan, plan.waited, wait), _shown(plan, plan.waited - 1, wait)
    sent = _segments(items, now, offload)
    tokens = sum(segment.tokens for segment in sent)
    came = head + sum(item.tokens for item in items)
    scale = billed.prompt / came if billed and came else 1.0
    cached = billed.cached / scale if billed and scale else float(_cached_before(items, head))
    ours, had = _our_tools(now, policy, tools), _our_tools(earlier, policy, tools)
    kept, reach = min(cached, head), cached - head
    if reach > 0 and ours == had:
        kept += ours + _common(sent, _segments(items, earlier, offload), reach)
    summary = 0.0
    if plan.events and not plan.waited and _summarises(plan):
        summary = SkiRental(offload).price(0, tokens)
    taken = {segment.key[0] for segment in sent}
    return Forecast(
        tokens=tokens,
        ours=ours > 0,
        compacted=sum(index in taken for index in now.moves),
        compressed=sum(index not in taken for index in range(len(items))),
        before=round(scale * _cost(offload, came, cached)),
        after=round(scale * (_cost(offload, head + ours + tokens, kept) + summary)),
    )


class Kinds(msgspec.Struct, frozen=True):
    """The tokens of a planned history: of whole messages by their part, of previews, of a snapshot, of our tools."""

    whole: Mapping[Role, int]
    previews: int
    snapshot: int
    tools: int


def by_kind(items: Sequence[Item], plan: Plan, policy: Policy, tools: int) -> Kinds:
    """Return what this plan of a history would have sent. Together, that is `Forecast.tokens` and `tools`, if any."""
    now = _shown(plan, plan.waited, policy.offload.compress.wait)
    whole: dict[Role, int] = {}
    previews = snapshot = 0
    for segment in _segments(items, now, policy.offload):
        index, state = segment.key
        if index < 0:
            snapshot += segment.tokens
        elif state:
            previews += segment.tokens
        else:
            role = items[index].role
            whole[role] = whole.get(role, 0) + segment.tokens
    return Kinds(whole, previews, snapshot, _our_tools(now, policy, tools))


def _cost(offload: Offload, prompt: int, cached: float) -> float:
    """Return the cost of a prompt of which so many tokens are cached. The rest is written to the cache."""
    cached = min(cached, prompt)
    return offload.cached_read * cached + offload.cache_write * (prompt - cached)


def _summarises(plan: Plan) -> bool:
    """Whether the newest event has a summary."""
    return bool(plan.boundaries) and plan.boundaries[-1].event == len(plan.events)


def _shown(plan: Plan, waited: int, wait: Wait) -> Plan:
    """Return the part of the plan that was sent so many requests after its newest event; -1 is the one before it."""
    needed = int(_summarises(plan) and wait is not Wait.ALWAYS)
    return plan.without(len(plan.events)) if plan.events and waited < needed else plan


def _our_tools(plan: Plan, policy: Policy, tools: int) -> int:
    inject = policy.tools.inject
    return tools if inject is Inject.ALWAYS or (inject is Inject.WHEN_OFFLOADING and not plan.empty) else 0


def _segments(items: Sequence[Item], plan: Plan, offload: Offload) -> list[_Segment]:
    """Return the history as the plan sends it. The snapshot follows the leading system messages."""
    boundary = plan.boundaries[-1] if plan.boundaries else None
    segments: list[_Segment] = []
    end, leads = 0, True
    for index, item in enumerate(items):
        if leads and item.role is not Role.SYSTEM:
            leads = False
            if boundary:
                segments.append(_Segment((-1, boundary.end), offload.compress.snapshot_tokens, end))
        end += item.tokens
        if leads or not boundary or index >= boundary.end or index in boundary.pins:
            move = plan.moves.get(index)
            state = 0 if move is None else 2 if move.event else 1
            segments.append(_Segment((index, state), live(item, move), end))
    return segments


def _common(sent: Sequence[_Segment], earlier: Sequence[_Segment], reach: float) -> float:
    """Return the tokens at the beginning that both have, as far as upstream's cache reaches into the history."""
    tokens = 0.0
    for segment, other in zip(sent, earlier, strict=False):
        if segment.key != other.key:
            break
        if segment.end > reach:
            tokens += max(segment.tokens - (segment.end - reach), 0)
            break
        tokens += segment.tokens
    return tokens


def _cached_before(items: Sequence[Item], head: int) -> int:
    """Return the tokens that the client's request before this one had; 0 if this is the first one."""
    points = (index for index in range(len(items) - 1, 0, -1) if _is_answer(items, index))
    last = next(points, None)
    if last is not None and items[-1].role is Role.ASSISTANT:
        last = next(points, None)  # the history ends in a prefill, which is part of this request
    return 0 if last is None else head + sum(item.tokens for item in items[:last])


def _is_answer(items: Sequence[Item], index: int) -> bool:
    """Whether the client asked just before this message."""
    return items[index].role is Role.ASSISTANT and items[index - 1].role is not Role.ASSISTANT
