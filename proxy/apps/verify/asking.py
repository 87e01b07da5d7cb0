"""Asks one request again: in the client's own bytes, or as planned, for replies that nobody sees.

What that costs is metered: each round is sent only if there is money for it at its full price, and
for a reply of `REPLY_TOKENS`. Once upstream has said what it counted, that is paid instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from msgspec.structs import replace

from proxy import sse
from proxy.apps.verify.pairs import NextStep, Took, measured, same
from proxy.dialects.entries import canonical
from proxy.dialects.turn import Turn
from proxy.errors import Fault, OffloadError, ProxyError, UpstreamBroken, UpstreamUnreachable
from proxy.plan.forecast import OUTPUT_PRICE, cost
from proxy.plan.turn import Addition, Broken, Usage
from proxy.policy import Offload
from proxy.rawjson import NotJson
from proxy.requests.conversation import converse
from proxy.requests.exchange import Exchange
from proxy.requests.planned import OUR_TOOLS_TOKENS, Planned, Rendered
from proxy.requests.prepared import Prepared
from proxy.requests.records import Records
from proxy.requests.rounds import Rounds, Services
from proxy.requests.versions import Refusal
from proxy.upstream.client import UpstreamReply

REPLY_TOKENS = 2_000
"""Tokens that a reply is taken to have until upstream has said it, or its limit if that is lower."""
DECIMALS = 9
"""Money is rounded to the billionth of a dollar."""
DEAREST_OUTPUT = 9
"""The most that an output token costs in input tokens, in the lists of `plan.prices`' providers
(8.3, of gemini-2.5-flash). What is spent is counted by this."""


class OverBudget(OffloadError):
    """There is no money for another round."""


@dataclass
class Purse:
    """Money for extra requests, in USD. What is `spent` has, of replies that upstream has not
    counted, the most that they can cost."""

    budget: float = 0.0
    spent: float = 0.0

    @property
    def left(self) -> float:
        return self.budget - self.spent


class Meter:
    """Takes what one reply costs out of a purse. `limit` is the tokens that the client allows it; 0
    if it does not say."""

    def __init__(self, purse: Purse, offload: Offload, limit: int) -> None:
        self._purse = purse
        self._price = (offload.input_price or 0.0) / 1_000_000
        self._offload = offload
        self._reply = min(limit or REPLY_TOKENS, REPLY_TOKENS)
        self._taken = 0.0

    def most(self, prompt: int) -> float:
        """Return the most that a round costs with so many tokens of input."""
        dearest = cost(self._offload, prompt, 0, 0, prompt) + DEAREST_OUTPUT * self._reply
        return self._price * dearest

    def open(self, prompt: int) -> None:
        """Take the most that a round can cost. Raises OverBudget if that is not left."""
        if self.most(prompt) > self._purse.left:
            raise OverBudget
        self._take(self._taken + self.most(prompt))

    def settle(self, spent: Usage, rounds: int) -> None:
        """Take what the rounds so far cost instead, if upstream has said of all of them what it
        counted."""
        if spent.counted_rounds >= rounds:
            counted = cost(self._offload, spent.prompt, spent.cached, 0, spent.largest)
            self._take(self._price * (counted + DEAREST_OUTPUT * spent.completion))

    def _take(self, money: float) -> None:
        # what is taken and given back leaves nothing behind
        self._purse.spent = round(self._purse.spent + money - self._taken, DECIMALS)
        self._taken = money


class Asker:
    """A request that is asked again. `prepared` is the client's, and `rendered` the request as
    planned."""

    def __init__(
        self,
        services: Services,
        client: Exchange,
        prepared: Prepared,
        rendered: Rendered,
        purse: Purse,
    ) -> None:
        self._services = services
        self._client = client
        self._prepared = prepared
        self._rendered = rendered
        self._purse = purse
        self._usage = asks_usage(prepared)
        self.spent: list[Usage] = []
        """What all replies so far took, whole or not."""

    async def unchanged(self) -> ModelReply:
        """Ask in the client's own bytes. Raises OffloadError if there is no whole reply."""
        planned = self._rendered.planned
        return await self._ask(whole_turn(planned, usage=self._usage), planned.tokens_before)

    async def planned(self) -> ModelReply:
        """Ask as planned. Raises OffloadError if there is no whole reply."""
        return await self._ask(self._rendered.turn(self._usage), planned_tokens(self._rendered))

    async def _ask(self, turn: Turn, tokens: int) -> ModelReply:
        prepared = replace(self._prepared, uses=[])
        services = self._services
        client = self._client.unheard()
        records = Records(services.store.visit(), prepared.tenant.namespace)
        planned = self._rendered.planned
        meter = Meter(self._purse, planned.policy.offload, planned.request.reply_tokens)

        def open_round() -> None:
            meter.settle(turn.spent, turn.rounds)
            meter.open(tokens + sum(use.tokens for use in prepared.uses))

        rounds = _Unseen(services, client, prepared, self._rendered, records, _nothing)
        rounds.open = open_round
        self.spent.append(turn.spent)
        try:
            refused = await converse(turn, client, rounds)
            meter.settle(turn.spent, turn.rounds + 1)
        except (Refusal, UpstreamUnreachable):  # the newest round costs nothing
            meter.settle(turn.spent, turn.rounds)
            raise
        if refused is not None:
            raise refused
        if not turn.complete:
            raise UpstreamBroken("the reply stopped before its end")
        return ModelReply.of(turn, sum(use.tokens for use in prepared.uses))


class _Unseen(Rounds):
    """The rounds of requests whose replies nobody sees. `open` is called before each of them."""

    open: Callable[[], None]

    async def send(self, body: bytes) -> UpstreamReply:
        self.open()
        reply = await super().send(body)
        if reply.headers.has(b"x-offload-mode"):
            await reply.aclose()
            raise UpstreamBroken("upstream is an Offload Proxy, and changes requests itself")
        return reply

    async def remember(self, turn: Turn) -> None:
        """What nobody has seen leaves nothing behind."""


async def _nothing() -> None:
    """Upstream has accepted this request before."""


# -- turns -----------------------------------------------------------------------------------------


class ModelReply(NamedTuple):
    """What the model did, and what it took: `read` is the tokens that it read back."""

    reply: NextStep
    spent: Usage
    read: int

    @classmethod
    def of(cls, turn: Turn, read: int) -> ModelReply:
        _, calls = turn.visible
        did = tuple(sorted((call.name, canonical(call.arguments)) for call in calls))
        said = turn.spent.counted_rounds > turn.rounds
        return cls(NextStep(did, turn.spent.completion if said else 0), turn.spent, read)

    def more(self, offload: Offload) -> int:
        """Return the cost of the input of all rounds but the first, in plain input tokens: each
        reads what the one before it had from upstream's cache, and writes what is new."""
        earlier = self.spent.prompt - self.spent.largest
        new = self.read + self.spent.hidden
        return cost(offload, earlier + new, earlier, 0, self.spent.largest) if earlier else 0


def compared(
    planned: Planned,
    seen: ModelReply,
    again: ModelReply,
    other: ModelReply,
    costs: tuple[int, int],
    *,
    observed: bool,
) -> dict[str, int]:
    """Return what three replies come to, as fields of an outcome: the one that was `seen`, the one
    to the same bytes `again`, and the `other`. `observed`: those were the client's own, and the
    other one's bytes the planned ones; else the other way round. `costs` are those of the input, as
    it came and as planned; 0 if they are not known."""
    offload = planned.policy.offload
    before, after = costs
    if observed and after:
        after += other.more(offload)

    def took(answer: ModelReply, cost: int) -> Took:
        return Took(answer.reply.tokens, cost and cost + OUTPUT_PRICE * answer.reply.tokens)

    twice = [one for one in (seen, again) if one.reply.tokens]
    if observed:
        whole = [took(one, before) for one in twice]
        as_planned = [took(other, after)]
    else:
        whole = [took(other, before)]
        # what was hidden of the client's reply is in the cost of its input
        after = after and after - OUTPUT_PRICE * seen.spent.hidden
        as_planned = [took(one, after) for one in twice]
    return same(seen.reply, again.reply, other.reply) | measured(whole, as_planned)


async def as_observed(services: Services, prepared: Prepared, planned: Planned) -> Rendered:
    """Return the request as planned that was only observed: nothing was hidden in its history, and
    no summary was made."""
    make = partial(Rendered.of, planned, None, {}, services.reader)
    return await services.threads.run(prepared.tenant.namespace, make, planned.request.size)


def blamed(error: OffloadError | TimeoutError) -> tuple[Fault, str]:
    """Return whose fault it is that a request could not be asked again, and what went wrong."""
    if isinstance(error, TimeoutError):
        return Fault.TIMEOUT, "not answered in time"
    if isinstance(error, OverBudget):
        return Fault.OVERLOADED, "no money is left for it"
    if isinstance(error, ProxyError):
        return error.fault, error.message
    return Fault.PROTOCOL, str(error)


def asks_usage(prepared: Prepared) -> bool:
    """Whether extra requests may ask upstream for their usage."""
    return Addition.USAGE not in prepared.without


def whole_turn(planned: Planned, *, usage: bool) -> Turn:
    """Return the turn that sends the client's own request."""
    request = planned.request
    return planned.dialect.turn(request, [*request.entries], [], 1, usage, None)


def planned_tokens(rendered: Rendered) -> int:
    """Return the tokens of the whole prompt as planned."""
    ours = OUR_TOOLS_TOKENS if rendered.injecting else 0
    return rendered.planned.before_history + rendered.tokens + ours


def heard(planned: Planned, reply: bytes) -> ModelReply | None:
    """Return what the model did in a reply to the client's own bytes, as it came from upstream,
    decompressed; None if it is no whole reply."""
    turn = whole_turn(planned, usage=False)
    turn.request()
    try:
        if reply.lstrip().startswith(b"{"):
            turn.receive_whole(reply)
        else:
            decoder = sse.EventDecoder()
            for event in [*decoder.feed(reply), *decoder.flush()]:
                turn.receive(event)
        turn.end()
    except (Broken, NotJson, sse.TooLarge):
        return None
    return ModelReply.of(turn, 0) if turn.complete and turn.refusal is None else None
