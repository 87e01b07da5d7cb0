"""Asks a share of requests again, off the client's path: does the model do the same with the plan as
with its whole history, and does it write more?

    the reply that the client got ──── is compared with the reply
                                        to the same request again: the noise of asking twice
                                        to the other request: what the plan changes, and that noise

The other request is the client's own bytes where it was sent as planned, and the planned one where
it was only observed, so that nobody's reply changes. Nobody sees these replies, nothing is recorded
of them but numbers, and a tenant spends at most `verify_budget` a day, with the credentials of the
requests themselves.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial

from proxy.apps.verify.asking import (
    Asker,
    Meter,
    ModelReply,
    Purse,
    as_observed,
    blamed,
    compared,
    heard,
)
from proxy.errors import Fault, OffloadError, UpstreamBroken
from proxy.plan.turn import Usage
from proxy.requests.conversation import PARSED
from proxy.requests.exchange import Exchange
from proxy.requests.planned import Planned
from proxy.requests.prepared import Prepared
from proxy.server.parts import Part
from proxy.server.process import Process
from proxy.telemetry.outcome import DECIMALS, Kind, Outcome

DAY = 86_400
SECONDS = 600.0
"""Seconds that both replies together may take."""
REST = 60.0
"""Seconds for which nothing of a tenant is asked again after upstream has refused or failed: what is
left of its limits is the clients'."""


class Spending:
    """What each tenant has spent today, in money. `clock` returns seconds since the epoch."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._spent: dict[str, tuple[int, float]] = {}

    def today(self, tenant: str) -> float:
        day, spent = self._spent.get(tenant, (0, 0.0))
        return spent if day == self._clock() // DAY else 0.0

    def add(self, tenant: str, money: float) -> None:
        self._spent[tenant] = int(self._clock() // DAY), self.today(tenant) + money


class Verify(Part):
    """Asks again, as the policies' `offload.verify` says. `clock` returns seconds since the
    epoch."""

    def __init__(self, process: Process, clock: Callable[[], float] = time.time) -> None:
        self._services = process.services
        self._spending = Spending(clock)
        self._clock = clock
        self._rests = dict[str, float]()
        """Until when nothing of a tenant is asked again, on the clock."""

    def watch(self, outcome: Outcome, prepared: Prepared | None, client: Exchange | None) -> None:
        """Start asking again if the request is of the share, and its tenant has money left today."""
        if prepared is None or client is None or outcome.status != 200 or outcome.fault:
            return
        rendered = prepared.rendered
        planned = rendered.planned if rendered else prepared.planned
        if planned is None or not planned.asked_again:
            return
        if rendered is not None:
            compares = prepared.turn is not None and not rendered.plan.empty
        else:
            # no summary was made for what is only observed
            compares = bool(prepared.reply) and not planned.plan.boundaries
        if compares:
            self._consider(outcome, prepared, planned, client)

    def _consider(
        self, outcome: Outcome, prepared: Prepared, planned: Planned, client: Exchange
    ) -> None:
        services = self._services
        policy = prepared.tenant.policy
        tenant = prepared.tenant.name
        unpriced = policy.offload.input_price is None
        if unpriced or self._clock() < self._rests.get(tenant, 0.0):
            return
        budget = policy.offload.verify_budget / services.settings.workers
        purse = Purse(budget - self._spending.today(tenant))
        meter = Meter(purse, policy.offload, planned.request.reply_tokens)
        if meter.most(planned.tokens_before) + meter.most(prepared.tokens_after) > purse.left:
            return

        async def ask_twice() -> None:
            try:
                made = await self._compared(outcome, prepared, planned, client, purse)
            finally:
                self._spending.add(tenant, purse.spent)
            if made.fault:
                self._rests[tenant] = self._clock() + REST
            services.sink(made)

        # one at a time
        held = 3 * planned.request.size + len(prepared.reply)
        services.background.start(f"verify {tenant}", ask_twice, held, awaited=False)

    async def _compared(
        self,
        outcome: Outcome,
        prepared: Prepared,
        planned: Planned,
        client: Exchange,
        purse: Purse,
    ) -> Outcome:
        """Ask again, and return how the replies compare with what the client has seen."""
        began = time.perf_counter()
        services = self._services
        observed = prepared.rendered is None
        price = planned.policy.offload.input_price
        found = dict[str, int]()
        fault = Fault.NONE
        detail = ""
        spent: list[Usage] = []
        try:
            async with asyncio.timeout(SECONDS):
                seen = await self._passed(prepared, planned)
                rendered = prepared.rendered or await as_observed(services, prepared, planned)
                asker = Asker(services, client, prepared, rendered, purse)
                spent = asker.spent
                again = await (asker.unchanged() if observed else asker.planned())
                other = await (asker.planned() if observed else asker.unchanged())
                costs = outcome.cost_before, outcome.cost_after
                found = compared(planned, seen, again, other, costs, observed=observed)
        except (OffloadError, TimeoutError) as error:
            fault, detail = blamed(error)
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
            detail=detail,
            prompt_tokens=sum(one.prompt for one in spent),
            completion_tokens=sum(one.completion for one in spent),
            cached_tokens=sum(one.cached for one in spent),
            verify_cost=round(1_000_000 * purse.spent / price) if price else 0,
            seconds=round(time.perf_counter() - began, DECIMALS),
            **found,  # type: ignore[arg-type]
        )

    async def _passed(self, prepared: Prepared, planned: Planned) -> ModelReply:
        """Return what the client got. Raises UpstreamBroken if that is no whole reply."""
        if prepared.turn is not None:
            return ModelReply.of(prepared.turn, 0)
        read = partial(heard, planned, prepared.reply)
        size = PARSED * len(prepared.reply)
        namespace = prepared.tenant.namespace
        seen = await self._services.threads.run(namespace, read, size, begun=True)
        if seen is None:
            raise UpstreamBroken("the client's reply stopped before its end")
        return seen
