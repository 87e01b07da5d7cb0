"""Asks a share of planned requests again, off the client's path: does the model do the same as with its whole history?

    the reply that the client got ──── is compared with the reply
                                        to the same request again: the noise of asking twice
                                        to the client's own bytes: what the plan changes, and that noise

Only what the model does next is compared: which tools it calls, with which arguments, or that it stops. Nobody sees
these replies, nothing is recorded of them but that, and a tenant spends at most `verify_budget` a day, with the
credentials of the requests themselves.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Mapping

from msgspec.structs import replace

from proxy.dialects.entries import canonical
from proxy.dialects.turn import Turn
from proxy.errors import Fault, OffloadError, UpstreamBroken, UpstreamFault
from proxy.plan.forecast import OUTPUT_PRICE
from proxy.plan.prices import FREE, price_of
from proxy.plan.turn import Addition
from proxy.policy import Policy
from proxy.requests.conversation import converse
from proxy.requests.exchange import Exchange
from proxy.requests.planned import OUR_TOOLS_TOKENS
from proxy.requests.prepared import Prepared
from proxy.requests.records import Records
from proxy.requests.rounds import Rounds, Services
from proxy.telemetry.outcome import DECIMALS, Kind, Outcome

REPLY_TOKENS = 2_000
"""Tokens of output that a reply is taken to cost until upstream has said it."""
SECONDS = 600.0
"""Seconds that both replies together may take."""

Action = tuple[tuple[str, str], ...]
"""What the model does next: the names of the tools that it calls, with their arguments; empty if it stops."""


def consider(services: Services, client: Exchange, prepared: Prepared, records: Records, outcome: Outcome) -> None:
    """Start asking again if the request is of the share, and its tenant has money left today. Returns at once."""
    rendered, turn, policy, spending = prepared.rendered, prepared.turn, prepared.tenant.policy, services.verifying
    if spending is None or rendered is None or turn is None:
        return
    if outcome.status != 200 or outcome.fault:
        return
    planned, tenant = rendered.planned, prepared.tenant.name
    drawn = int.from_bytes(hashlib.sha256(b"verify" + planned.chain[-1]).digest()[:8]) < policy.offload.verify * 2**64
    whole_fits = planned.room.holds(planned.history.tokens) and not planned.request.continues
    price = _price(policy, planned.request.model)
    if rendered.plan.empty or not whole_fits or not drawn or price is None:
        return
    expected = (
        planned.tokens_before + OUR_TOOLS_TOKENS + prepared.tokens_after + 2 * OUTPUT_PRICE * REPLY_TOKENS
    ) * price
    if spending.today(tenant) + expected > policy.offload.verify_budget / services.settings.workers:
        return
    seen, unheard = _action(turn), client.unheard()
    rounds = _Unseen(services, unheard, replace(prepared, uses=[]), rendered, records, _nothing)
    usage = Addition.USAGE not in prepared.form.without

    async def ask_twice() -> None:
        request = planned.request
        again = rendered.turn(usage)
        whole = planned.dialect.turn(request, [*request.entries], [], 1, usage, None)
        compared = await _compared({"again": again, "whole": whole}, unheard, rounds, seen, outcome)
        if prompt := compared.prompt_tokens:
            spending.add(tenant, (prompt + OUTPUT_PRICE * compared.completion_tokens) * price - expected)
        services.sink(compared)

    if services.background.start(f"verify {tenant}", ask_twice, 3 * planned.request.size):  # one at a time
        spending.add(tenant, expected)


async def _compared(
    turns: Mapping[str, Turn], client: Exchange, rounds: Rounds, seen: Action, outcome: Outcome
) -> Outcome:
    """Ask again, and return how the replies compare with what the client has `seen`."""
    began, same, fault = time.perf_counter(), dict[str, int](), Fault.NONE
    try:
        async with asyncio.timeout(SECONDS):
            for name, turn in turns.items():
                if refused := await converse(turn, client, rounds):
                    raise UpstreamBroken(f"Upstream answered {refused.status}")
                did = _action(turn)
                same[f"{name}_tools"] = int([tool for tool, _ in did] == [tool for tool, _ in seen])
                same[f"{name}_exact"] = int(did == seen)
    except (OffloadError, TimeoutError) as error:
        fault = error.fault if isinstance(error, UpstreamFault) else Fault.PROTOCOL
    spent = [turn.spent for turn in turns.values()]
    return Outcome(
        request_id=outcome.request_id,
        tenant=outcome.tenant,
        namespace=outcome.namespace,
        kind=Kind.VERIFY,
        method="POST",
        path="",
        dialect=outcome.dialect,
        model=outcome.model,
        status=502 if fault else 200,
        fault=fault,
        prompt_tokens=sum(one.prompt for one in spent),
        completion_tokens=sum(one.completion for one in spent),
        cached_tokens=sum(one.cached for one in spent),
        seconds=round(time.perf_counter() - began, DECIMALS),
        **({} if fault else same),  # type: ignore[arg-type]
    )


class _Unseen(Rounds):
    """The rounds of requests whose replies nobody sees."""

    async def remember(self, turn: Turn) -> None:
        """What nobody has seen leaves nothing behind."""


async def _nothing() -> None:
    """Upstream has accepted this request before."""


def _action(turn: Turn) -> Action:
    _, calls = turn.visible
    return tuple(sorted((call.name, canonical(call.arguments)) for call in calls))


def _price(policy: Policy, model: str) -> float | None:
    """Return the money for a token of plain input, None if it is not known. A model on this machine costs nothing."""
    listed = price_of(policy.upstream.base_url, model)
    said = policy.offload.input_price if policy.offload.input_price is not None else listed.input_price
    if said is None:
        return 0.0 if listed is FREE else None
    return said / 1_000_000
