"""Asks a share of planned requests again, off the client's path: does the model do the same as with
its whole history?

    the reply that the client got ──── is compared with the reply
                                        to the same request again: the noise of asking twice
                                        to the client's own bytes: what the plan changes, and that noise

Only what the model does next is compared: which tools it calls, with which arguments, or that it
stops. Nobody sees these replies, nothing is recorded of them but that, and a tenant spends at most
`verify_budget` a day, with the credentials of the requests themselves.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Mapping

from msgspec.structs import replace

from proxy.dialects.entries import canonical
from proxy.dialects.turn import Turn
from proxy.errors import Fault, OffloadError, UpstreamBroken, UpstreamFault
from proxy.plan.forecast import OUTPUT_PRICE
from proxy.plan.turn import Addition
from proxy.requests.conversation import converse
from proxy.requests.exchange import Exchange
from proxy.requests.planned import OUR_TOOLS_TOKENS, Planned, Rendered
from proxy.requests.prepared import Prepared
from proxy.requests.records import Records
from proxy.requests.rounds import Rounds
from proxy.server.parts import Part
from proxy.server.process import Process
from proxy.telemetry.outcome import DECIMALS, Kind, Outcome

DAY = 86_400
REPLY_TOKENS = 2_000
"""Tokens of output that a reply is taken to cost until upstream has said it."""
SECONDS = 600.0
"""Seconds that both replies together may take."""

Action = tuple[tuple[str, str], ...]
"""What the model does next: the names of the tools that it calls, with their arguments; empty if it
stops."""


class Spending:
    """What each tenant has spent today, in money. `clock` returns seconds since the epoch."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._spent: dict[str, tuple[int, float]] = {}

    def today(self, tenant: str) -> float:
        day, spent = self._spent.get(tenant, (0, 0.0))
        return spent if day == self._clock() // DAY else 0.0

    def add(self, tenant: str, money: float) -> None:
        """Add to what was spent today; less than nothing takes back what did not have to be
        spent."""
        self._spent[tenant] = int(self._clock() // DAY), max(self.today(tenant) + money, 0.0)


class Verify(Part):
    """Asks again, as the policies' `offload.verify` says. `clock` returns seconds since the
    epoch."""

    def __init__(self, process: Process, clock: Callable[[], float] = time.time) -> None:
        self._services = process.services
        self._spending = Spending(clock)

    def watch(self, outcome: Outcome, prepared: Prepared | None, client: Exchange | None) -> None:
        """Start asking again if the request is of the share, and its tenant has money left
        today."""
        if prepared is None or client is None or not prepared.tenant.policy.offload.verify:
            return
        if (
            outcome.status == 200
            and not outcome.fault
            and prepared.rendered is not None
            and prepared.turn is not None
        ):
            self._consider(outcome, prepared, prepared.rendered, prepared.turn, client)

    def _consider(
        self, outcome: Outcome, prepared: Prepared, rendered: Rendered, turn: Turn, client: Exchange
    ) -> None:
        services = self._services
        spending = self._spending
        policy = prepared.tenant.policy
        tenant = prepared.tenant.name
        planned = rendered.planned
        whole_fits = planned.room.holds(planned.history.tokens) and not planned.request.continues
        million = policy.offload.input_price
        if (
            rendered.plan.empty
            or not whole_fits
            or million is None
            or not _drawn(planned, policy.offload.verify)
        ):
            return
        price = million / 1_000_000
        output = 2 * OUTPUT_PRICE * REPLY_TOKENS
        expected = (
            planned.tokens_before + OUR_TOOLS_TOKENS + prepared.tokens_after + output
        ) * price
        if (
            spending.today(tenant) + expected
            > policy.offload.verify_budget / services.settings.workers
        ):
            return
        seen = _action(turn)
        unheard = client.unheard()
        records = Records(services.store.visit(), prepared.tenant.namespace)
        rounds = _Unseen(services, unheard, replace(prepared, uses=[]), rendered, records, _nothing)
        usage = Addition.USAGE not in prepared.form.without

        async def ask_twice() -> None:
            request = planned.request
            again = rendered.turn(usage)
            whole = planned.dialect.turn(request, [*request.entries], [], 1, usage, None)
            compared = await _compared(
                {"again": again, "whole": whole}, unheard, rounds, seen, outcome
            )
            if prompt := compared.prompt_tokens:
                spending.add(
                    tenant, (prompt + OUTPUT_PRICE * compared.completion_tokens) * price - expected
                )
            services.sink(compared)

        # one at a time
        if services.background.start(f"verify {tenant}", ask_twice, 3 * planned.request.size):
            spending.add(tenant, expected)


def _drawn(planned: Planned, share: float) -> bool:
    """Return whether this request is of the share. The same request always is, or never."""
    digest = hashlib.sha256(b"verify" + planned.chain[-1]).digest()
    return int.from_bytes(digest[:8]) < share * 2**64


async def _compared(
    turns: Mapping[str, Turn], client: Exchange, rounds: Rounds, seen: Action, outcome: Outcome
) -> Outcome:
    """Ask again, and return how the replies compare with what the client has `seen`."""
    began = time.perf_counter()
    same = dict[str, int]()
    fault = Fault.NONE
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
