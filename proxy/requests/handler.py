"""The life of a chat request, from its first byte to its last.

body ──parse, plan──> nothing to do: it goes upstream as it came, and so does the reply to the client
                └───> render, converse ──> upstream's reply, without our tools; the rounds that it hides are recorded

`prepare` plans and renders, `tool_loop` converses with upstream, and `core` makes every decision. The stages are the
values of `attempt`. If upstream refuses a request for its length or for our tools, we make another attempt.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from msgspec.structs import replace

from proxy.core.history import Unplannable
from proxy.core.policy import Mode, Policy
from proxy.core.reasons import Reason
from proxy.core.request import LARGE_BYTES
from proxy.dialects import Dialect
from proxy.errors import ClientFault
from proxy.regex import Budget
from proxy.requests import prepare, tool_loop
from proxy.requests.attempt import AsItCame, Attempt, ParsedRequest, Rewritten, outcome, rendered_headers
from proxy.requests.passthrough import ReplyEnd, served
from proxy.requests.prepare import RenderedRequest
from proxy.requests.records import Records
from proxy.requests.tool_loop import Refusal
from proxy.requests.turn_io import REWRITTEN, RequestTurnIO, rewritten
from proxy.telemetry import logs
from proxy.upstream.content_encoding import decoded
from proxy.upstream.headers import Header, reply_headers

if TYPE_CHECKING:
    from proxy.policies.tenants import Tenant
    from proxy.requests.exchange import Exchange
    from proxy.requests.services import Services
    from proxy.telemetry.outcome import Outcome

T = TypeVar("T")

log = logging.getLogger(__name__)

ATTEMPTS = 3
"""Most attempts: a request is planned again at most twice, if its context is too long or upstream refuses our tools."""


class Chat:
    """Answers every chat request of this process."""

    def __init__(self, services: Services, dialect: Dialect) -> None:
        self._services = services
        self._dialect = dialect

    async def __call__(self, client: Exchange, tenant: Tenant) -> None:
        """Reply, and record one outcome whatever happens."""
        request = _Request(self._services, self._dialect, client, tenant)
        await served(client, self._services.sink, request.answer(), request.outcome)


class _Request:
    """One client request. Only its newest attempt changes, so that the outcome can tell how far it got."""

    def __init__(self, services: Services, dialect: Dialect, client: Exchange, tenant: Tenant) -> None:
        self._services = services
        self._dialect = dialect
        self._client = client
        self._tenant = tenant
        self._records = Records(services.store.visit(), tenant.namespace)
        self._newest: Attempt = AsItCame(_parsed(b"", tenant))
        self._window: int | None = None
        """The window for which this request alone is planned, after upstream refused it as too long."""

    async def answer(self) -> None:
        """Read and parse the request; then plan, render and send it until upstream takes it or we give up."""
        body = await self._client.read(self._services.settings.body_limit)
        with self._client.present():
            parsed = await self._parse(body)
            too_long: Refusal | None = None
            for more in reversed(range(ATTEMPTS)):
                planned = self._newest = await self._plan(parsed)
                attempt = self._newest = await self._render(planned)
                refusal = await self._send(attempt)
                if refusal is None:
                    self._confirm(parsed)
                    return
                overflowed = self._dialect.is_overflow(refusal.status, refusal.said())
                too_long = too_long or (refusal if overflowed else None)
                again = self._learn(attempt, refusal) if more else None
                if again is None:
                    # The numbers in a later overflow are about a request that the client never saw.
                    first = too_long if overflowed else None
                    await self._pass_on(first or refusal, attempt.headers())
                    return
                parsed = again

    def outcome(self) -> Outcome:
        """Return the outcome of the request so far."""
        return outcome(self._newest, self._client, self._records.errors)

    # -- from the body to an attempt --

    async def _parse(self, body: bytes) -> ParsedRequest:
        """Parse the body and choose the policy for its model. Gives a reason instead if we cannot read the body."""
        tenant, client = self._tenant, self._client
        limit, threads = self._services.settings.body_limit, self._services.threads
        try:
            clear = body
            if client.encoded:
                clear = await decoded(body, client.headers, limit, threads.decoding, tenant.namespace, client.hold)
            chat = await self._run(partial(self._dialect.parse, clear), len(clear) > LARGE_BYTES)
        except ClientFault:
            return _parsed(body, tenant, Reason.ENCODING)
        except Unplannable as error:
            return _parsed(body, tenant, error.reason)
        policy = tenant.policy.for_model(chat.model)
        tenant = tenant if policy is tenant.policy else replace(tenant, policy=policy)
        self._services.seen(tenant, client.headers)
        going_on = await self._records.continuation(chat.continues) if chat.continues else None
        continued = self._dialect.continued(chat, going_on) if going_on else None
        return ParsedRequest(body, tenant, _searching(policy), chat, _held_back(client, policy), continued)

    async def _plan(self, parsed: ParsedRequest) -> AsItCame:
        """Return the request with its plan, or with the reason why it has none."""
        chat, policy, limits = parsed.chat, parsed.tenant.policy, self._services.learned
        if chat is None or parsed.reason:
            return AsItCame(parsed, reason=parsed.reason)
        if limits.refuses(policy, chat.model):
            return AsItCame(parsed, reason=Reason.TOOLS_REFUSED)
        try:
            known = limits.window(self._tenant.namespace, policy, chat.model)
            window = min((tokens for tokens in (known, self._window) if tokens is not None), default=None)
            planned = await prepare.plan(
                self._dialect, chat, policy, window, self._services.reader, self._tenant.namespace
            )
        except Unplannable as error:
            return AsItCame(parsed, reason=error.reason)
        if planned is None:
            return AsItCame(parsed, reason=Reason.FIELD, obstacle=chat.obstacle)
        return AsItCame(parsed, planned)

    async def _render(self, attempt: AsItCame) -> Attempt:
        """Return the request rewritten to its plan, or as it came if there is no plan or it changes nothing."""
        planned = attempt.planned
        if planned is None:
            return attempt
        self._services.snapshots.seen(planned, self._records)
        if not planned.concerns_us:
            return attempt
        reader, snapshots, large = self._services.reader, self._services.snapshots, planned.request.large
        shown, rounds = await asyncio.gather(
            snapshots.existing(planned, self._records),
            self._records.rounds(planned.reply_links(), planned.request.model),
        )
        rendered = await self._run(partial(prepare.rendered, planned, shown, rounds, reader), large)
        ask = self._turn_io(attempt.parsed, rendered).ask
        rendered = await snapshots.complete(rendered, self._records, self._tenant.name, ask)
        if rounds and not planned.room.holds(rendered.tokens):
            rendered = await self._run(partial(prepare.fitting, rendered, reader), large)
        if not rendered.changed:
            return attempt
        turn = await self._run(rendered.turn, large)
        return Rewritten(attempt.parsed, rendered, turn, self._turn_io(attempt.parsed, rendered))

    # -- sending it --

    async def _send(self, attempt: Attempt) -> Refusal | None:
        """Have upstream answer the client. Returns a refusal if another attempt may succeed; the client has then seen
        nothing."""
        if isinstance(attempt, AsItCame):
            return await self._send_untouched(attempt)
        self._keep_originals(attempt.rendered)
        try:
            await tool_loop.converse(attempt.turn, self._client, attempt.io, large=attempt.planned.request.large)
        except Refusal as refusal:
            return refusal
        self._accepted(attempt, attempt.spent.largest)
        return None

    async def _send_untouched(self, attempt: AsItCame) -> Refusal | None:
        """Send the client's bytes upstream and upstream's bytes back. Returns a refusal as `_send` does."""
        parsed = attempt.parsed
        request = self._services.relay.request(self._client, parsed.tenant, parsed.body)
        if parsed.continued is not None:
            request = rewritten(request, parsed.continued, REWRITTEN)
        self._client.sent = self._client.sent or time.perf_counter()
        async with aclosing(await self._services.upstream.send(request)) as reply:
            if attempt.planned is not None and self._dialect.may_be_overflow(reply.status):
                return await tool_loop.refusal(reply)
            end = ReplyEnd()
            await tool_loop.pass_on(reply, self._client, attempt.headers(), self._dialect.error_event, end.take)
            if reply.status == 200:
                self._accepted(attempt, self._dialect.prompt_tokens(end.last))
            return None

    async def _pass_on(self, refusal: Refusal, ours: Sequence[Header]) -> None:
        """Reply with upstream's refusal: its status, headers and body."""
        await self._client.start(refusal.status, reply_headers(refusal.headers, ours))
        await self._client.finish(refusal.body)

    def _turn_io(self, parsed: ParsedRequest, rendered: RenderedRequest) -> RequestTurnIO:
        headers = partial(rendered_headers, rendered)
        return RequestTurnIO(
            self._services, self._client, parsed.tenant, rendered, self._records, headers, parsed.searching
        )

    def _keep_originals(self, rendered: RenderedRequest) -> None:
        """Store the moved texts in the background, for people. The proxy itself reads them from each request."""
        namespace, name = self._tenant.namespace, rendered.moves_name
        if not rendered.history.policy.store_originals or self._records.has_originals(name):
            return

        async def keep() -> None:
            records = Records(self._services.store.visit(), namespace)
            await records.keep_originals(name, prepare.originals(rendered))

        held = 2 * len(rendered.history.request.body)  # once as it came, and once as it was rendered
        self._services.background.start(f"{namespace}/{name}", keep, held)

    # -- learning from refusals --

    def _learn(self, attempt: Attempt, refusal: Refusal) -> ParsedRequest | None:
        """Return what to attempt next, after upstream refused this, or None if nothing else can be sent."""
        planned, parsed = attempt.planned, attempt.parsed
        if planned is None or attempt.rounds:
            return None  # a follow-up round's refusal says nothing about the request that the client sent
        model, policy, said = planned.request.model, parsed.tenant.policy, refusal.said()
        if self._dialect.is_overflow(refusal.status, said):
            counted, named = planned.needs(attempt.tokens), self._dialect.window(said)
            self._window = self._services.learned.overflowed(
                self._tenant.namespace, policy, model, named, counted, measured=planned.measured
            )
            return parsed
        if isinstance(attempt, Rewritten) and self._dialect.refuses_additions(refusal.status, said):
            return replace(parsed, reason=Reason.TOOLS_REFUSED)
        return None

    def _accepted(self, attempt: Attempt, tokens: int) -> None:
        """Learn that upstream took a prompt of so many tokens; 0 if its reply did not say how many."""
        chat, policy = attempt.parsed.chat, attempt.parsed.tenant.policy
        if tokens and chat is not None:
            self._services.learned.accepted(self._tenant.namespace, policy, chat.model, tokens, attempt.tokens)

    def _confirm(self, parsed: ParsedRequest) -> None:
        """Remember that upstream refuses our tools. If the request fails without them too, the client is at fault."""
        if parsed.reason is Reason.TOOLS_REFUSED and parsed.chat is not None and self._client.status < 400:
            self._services.learned.refused(parsed.tenant.policy, parsed.chat.model)
            logs.event(log, "upstream refuses our tools: sent as it came", logging.WARNING, tenant=self._tenant.name)

    async def _run(self, work: Callable[[], T], large: bool) -> T:
        """Return the result of `work`, run off the event loop if `large`."""
        return await self._services.threads.reading.run(self._tenant.namespace, work) if large else work()


def _parsed(body: bytes, tenant: Tenant, reason: Reason = Reason.NONE) -> ParsedRequest:
    """Return a request of which only the bytes are known."""
    return ParsedRequest(body, tenant, _searching(tenant.policy), reason=reason)


def _searching(policy: Policy) -> Budget:
    return Budget(policy.tools.max_search_seconds)


def _held_back(client: Exchange, policy: Policy) -> Reason:
    """Return why the client or the policy wants the request sent as it came, or `Reason.NONE`."""
    if policy.offload.mode is Mode.OFF:
        return Reason.OFF
    said = {value.strip().lower() for value in client.headers.get_all(b"x-offload")} if client.has_wish else ()
    return Reason.HEADER if b"off" in said else Reason.NONE
