"""The conductor of a chat request: read, plan, carry out, send, remember. What it decides is decided in `core`.

body ──parse, plan──> nothing to do: on its way as it came, and so is the reply
                └───> records, render ──> turn ──exchange──> reply; what it hid is remembered
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec.structs import replace

from proxy.core.history import Unplannable
from proxy.core.policy import Mode
from proxy.dialects.chat import overflow
from proxy.dialects.chat.request import LARGE_BYTES, ChatRequest, parse
from proxy.dialects.chat.turn import ChatTurn, RoundRequest
from proxy.errors import ClientFault
from proxy.regex import Budget
from proxy.requests import prepare, tool_loop
from proxy.requests.passthrough import served
from proxy.requests.prepare import PlannedRequest, RenderedRequest, rendered
from proxy.requests.records import Records
from proxy.requests.tool_loop import Interrupted, Refusal
from proxy.requests.turn_io import RequestTurnIO
from proxy.telemetry import logs
from proxy.telemetry.outcome import Outcome
from proxy.upstream.content_encoding import decoded
from proxy.upstream.headers import Headers, reply_headers

if TYPE_CHECKING:
    from proxy.policies.tenants import Tenant
    from proxy.requests.exchange import Exchange
    from proxy.requests.services import Services

T = TypeVar("T")

log = logging.getLogger(__name__)

ATTEMPTS = 3
"""A request is planned anew at most twice, when upstream says that the context is too long or refuses our tools."""


class Chat:
    """Answers every chat request of this process."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, client: Exchange, tenant: Tenant) -> None:
        """Reply, and record one outcome whatever happens."""
        await _Request(self._services, client, tenant).serve()


class _Request:
    """One client request from its first byte to its last."""

    def __init__(self, services: Services, client: Exchange, tenant: Tenant) -> None:
        self._services = services
        self._client = client
        self._tenant = tenant
        self._body = b""
        self._asked: ChatRequest | None = None
        self._history: PlannedRequest | None = None
        self._ready: RenderedRequest | None = None
        self._partner: RequestTurnIO | None = None
        self._turn: ChatTurn | None = None
        self._records = Records(services.store.visit(), tenant.namespace)
        self._searching = Budget(tenant.policy.tools.max_search_seconds)
        self._as_it_came = False
        self._suspected = False  # that upstream will not have our tools, if only it takes the request without

    async def serve(self) -> None:
        try:
            await served(self._client, self._services.sink, self._reply(), self._outcome)
        finally:
            self._partner = None  # knows us as well: bodies of megabytes would wait for the garbage collector

    async def _reply(self) -> None:
        self._body = await self._client.read(self._services.settings.body_limit)
        with self._client.present():
            try:
                await self._parse()
                await self._attempts()
            except Interrupted as interrupted:
                raise interrupted.fault from interrupted

    async def _attempts(self) -> None:
        original: Refusal | None = None
        for attempt in range(ATTEMPTS):
            refusal = await self._attempt()
            if refusal is None:
                self._confirm()
                return
            too_long = overflow.is_overflow(refusal.status, refusal.said())
            original = original or (refusal if too_long else None)
            if attempt == ATTEMPTS - 1 or not self._learn(refusal):
                # A later one's numbers are those of a request that the client knows nothing of.
                await self._pass_on(original if too_long and original else refusal)
                return

    async def _attempt(self) -> Refusal | None:
        """Send what the plan makes of the request. What upstream refuses comes back, and nothing was sent on yet."""
        self._history = await self._planned()
        self._ready = await self._prepared(self._history) if self._history else None
        if self._ready is None:
            return await self._untouched()
        try:
            await self._offloaded(self._ready)
        except Refusal as refusal:
            return refusal
        return None

    # -- reading and planning --

    async def _parse(self) -> None:
        """Look into the body, if it is one that we understand; the tenant's policy becomes that for its model."""
        limit, threads = self._services.settings.body_limit, self._services.threads
        try:
            body = await decoded(
                self._body, self._client.headers, limit, threads.decoding, self._tenant.namespace, self._client.hold
            )
            self._asked = await self._run(partial(parse, body), len(body) > LARGE_BYTES)
        except (Unplannable, ClientFault):
            return  # upstream will say what is wrong with it
        policy = self._tenant.policy.for_model(self._asked.model)
        self._tenant = replace(self._tenant, policy=policy)
        self._searching = Budget(policy.tools.max_search_seconds)
        said = {value.strip().lower() for name, value in self._client.headers if name.lower() == b"x-offload"}
        self._as_it_came = b"off" in said or policy.offload.mode is Mode.OFF

    async def _run(self, work: Callable[[], T], large: bool) -> T:
        """Off the event loop, if it takes long."""
        return await self._services.threads.reading.run(self._tenant.namespace, work) if large else work()

    async def _planned(self) -> PlannedRequest | None:
        """The history and its plan; None where the request is to go as it came."""
        asked, policy, learned = self._asked, self._tenant.policy, self._services.learned
        if asked is None or self._as_it_came or learned.refuses(policy, asked.model):
            return None
        try:
            window, reader = learned.window(policy, asked.model), self._services.reader
            return await prepare.plan(asked, policy, window, reader, self._tenant.namespace)
        except Unplannable:
            return None

    async def _prepared(self, history: PlannedRequest) -> RenderedRequest | None:
        """The request as it is to be sent; None where that is as it came."""
        if not history.concerns_us:
            return None
        reader, snapshots = self._services.reader, self._services.snapshots
        shown, rounds = await asyncio.gather(
            snapshots.existing(history, self._records),
            self._records.rounds(history.reply_links(), history.request.model),
        )
        ready = await self._run(partial(rendered, history, shown, rounds, reader), history.request.large)
        partner = self._new_partner(ready)
        ready = await snapshots.complete(ready, self._records, self._tenant.name, partner.ask)
        if rounds and not history.room.holds(ready.tokens):
            ready = rendered(history, ready.shown, {}, reader, ready.plan)
        return ready if ready.changed else None

    # -- sending --

    async def _untouched(self) -> Refusal | None:
        """The client's own bytes, and upstream's own bytes back. What may say that it was too long comes to us."""
        request = self._services.relay.request(self._client, self._tenant, self._body)
        self._client.sent = self._client.sent or time.perf_counter()
        async with aclosing(await self._services.upstream.send(request)) as reply:
            if self._history is None or not overflow.may_be(reply.status):
                await tool_loop.pass_on(reply, self._client, self._headers())
                return None
            return await tool_loop.refusal(reply)

    async def _offloaded(self, ready: RenderedRequest) -> None:
        self._partner = self._new_partner(ready)
        self._keep_originals(ready)
        history = ready.history
        members = await self._run(lambda: history.request.members, history.request.large)
        asked = RoundRequest(
            members=members,
            messages=ready.messages,
            tools=ready.definitions(),
            names=history.names,
            max_rounds=history.policy.tools.max_rounds,
        )
        self._turn = await self._run(partial(ChatTurn, asked), history.request.large)
        await tool_loop.converse(self._turn, self._client, self._partner)

    def _new_partner(self, ready: RenderedRequest) -> RequestTurnIO:
        return RequestTurnIO(
            self._services, self._client, self._tenant, ready, self._records, self._headers, self._searching
        )

    async def _pass_on(self, refusal: Refusal) -> None:
        """An upstream error reaches the client with its status, headers and body."""
        await self._client.start(refusal.status, reply_headers(refusal.headers, self._headers()))
        await self._client.finish(refusal.body)

    def _keep_originals(self, ready: RenderedRequest) -> None:
        """For people to trace; nobody has to wait for it, as the proxy reads them out of each request."""
        name = ready.moves_name
        if not ready.history.policy.store_originals or self._records.has_originals(name):
            return

        async def keep() -> None:
            records = Records(self._services.store.visit(), self._tenant.namespace)
            await records.keep_originals(name, prepare.originals(ready))

        held = 2 * len(ready.history.request.body)  # as it came, and as it was rendered
        self._services.background.start(f"{self._tenant.namespace}/{name}", keep, held)

    def _learn(self, refusal: Refusal) -> bool:
        """Whether something else can be sent now."""
        history, learned = self._history, self._services.learned
        if history is None or (self._turn and self._turn.rounds):
            return False  # what a follow-up round brought up is not about the request that the client sent
        said = refusal.said()
        model, policy = history.request.model, self._tenant.policy
        if overflow.is_overflow(refusal.status, said):
            sent = self._ready.tokens if self._ready else history.tokens
            learned.overflowed(policy, model, said, sent + history.room.aside)
            return True
        if self._ready and overflow.refuses_additions(refusal.status, said):
            self._suspected = self._as_it_came = True
            return True
        return False

    def _confirm(self) -> None:
        """Remember who refuses our tools; what is refused without them as well is the client's own mistake."""
        asked, policy = self._asked, self._tenant.policy
        if self._suspected and asked is not None and self._client.status < 400:
            self._services.learned.refused(policy, asked.model)
            logs.event(log, "upstream refuses our tools: sent as it came", logging.WARNING, tenant=self._tenant.name)

    # -- what is seen from outside --

    def _headers(self) -> Headers:
        """Ours, for the reply."""
        mode = "off" if self._history is None else self._history.policy.offload.mode.value
        headers = [(b"x-offload-mode", mode.encode())]
        if self._history is None:
            return headers
        before = self._history.tokens
        numbers = {
            b"x-offload-tokens-before": before,
            b"x-offload-tokens-after": self._ready.tokens if self._ready else before,
            b"x-offload-compacted": self._ready.compacted() if self._ready else 0,
            b"x-offload-compressed": self._ready.compressed() if self._ready else 0,
        }
        return headers + [(name, b"%d" % number) for name, number in numbers.items()]

    def _outcome(self) -> Outcome:
        outcome = self._client.outcome("untouched", self._tenant.name, self._tenant.namespace)
        if self._asked:
            outcome = replace(outcome, model=self._asked.model, stream=self._asked.stream)
        if self._history:
            outcome = replace(outcome, **_planned(self._history))
        if self._ready:
            outcome = replace(outcome, **_carried_out(self._ready))
        if self._turn and self._partner:
            outcome = replace(outcome, **_spent(self._turn), tool_uses=tuple(self._partner.uses))
        return replace(outcome, store_errors=self._records.errors)


def _planned(history: PlannedRequest) -> dict[str, Any]:
    events = history.plan.events
    tokens = history.tokens
    return {
        "mode": history.policy.offload.mode.value,
        "messages": len(history.past.items),
        "tokens_before": tokens,
        "tokens_after": tokens,
        "events": len(events),
        "new_event": bool(events) and events[-1].point == len(history.past.items),
    }


def _carried_out(ready: RenderedRequest) -> dict[str, Any]:
    return {
        "kind": "offloaded",
        "tokens_after": ready.tokens,
        "compacted": ready.compacted(),
        "compressed": ready.compressed(),
        "reinserted": len(ready.rounds),
    }


def _spent(turn: ChatTurn) -> dict[str, Any]:
    return {
        "rounds": turn.rounds + turn.mixed,
        "prompt_tokens": turn.spent.prompt,
        "completion_tokens": turn.spent.completion,
        "cached_tokens": turn.spent.cached,
    }
