"""The life of a chat request, from its first byte to its last.

body ──parse, plan──> nothing to do, or only to be observed: it goes upstream as it came, and so does the reply
                └───> render, converse ──> upstream's reply, without our tools; the rounds that it hides are recorded

`prepare` plans and renders, `tool_loop` converses with upstream, and `core` makes every decision. The stages are the
values of `attempt`. If upstream refuses a request for its length or for what we added, we make another attempt, which
`refusals` chooses.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from msgspec.structs import replace

from proxy.dialects import Dialect
from proxy.dialects.usage import Reported
from proxy.errors import ClientFault, Overloaded, UpstreamBroken
from proxy.plan.history import Unplannable
from proxy.plan.reasons import Reason
from proxy.plan.refusals import Addition, Verdict
from proxy.policy import SnapshotRole
from proxy.requests import prepare, tool_loop
from proxy.requests.attempt import (
    AsItCame,
    Attempt,
    Observed,
    ParsedRequest,
    Rewritten,
    Sent,
    outcome,
    rendered_headers,
)
from proxy.requests.feedback import Feedback
from proxy.requests.passthrough import DecodedEnds, ReplyEnds, ignore, served
from proxy.requests.prepare import PlannedRequest, RenderedRequest
from proxy.requests.records import Records
from proxy.requests.refusals import FORGIVING, Tries
from proxy.requests.tool_loop import Refusal
from proxy.requests.turn_io import IDEMPOTENCY_KEY, REWRITTEN, RequestTurnIO, forgiving, rewritten
from proxy.requests.windows import TELLING
from proxy.requests.wishes import held_back, observes
from proxy.telemetry.outcome import Holdout, Kind
from proxy.upstream.codings import decoded
from proxy.upstream.headers import Header, Headers, reply_headers

if TYPE_CHECKING:
    from proxy.policies.tenants import Tenant
    from proxy.requests.exchange import Exchange
    from proxy.requests.services import Services
    from proxy.telemetry.outcome import Outcome
    from proxy.upstream.client import UpstreamReply

T = TypeVar("T")


class Chat:
    """Answers every chat request of this process."""

    def __init__(self, services: Services, dialect: Dialect) -> None:
        self._services = services
        self._dialect = dialect

    async def __call__(self, client: Exchange, tenant: Tenant) -> None:
        """Reply, and record one outcome whatever happens."""
        request = _Request(self._services, self._dialect, client, tenant)
        await served(client, request.ended, request.answer(), request.outcome)


class _Request:
    """One client request. Only its newest attempt changes, so that the outcome can tell how far it got."""

    def __init__(self, services: Services, dialect: Dialect, client: Exchange, tenant: Tenant) -> None:
        self._services = services
        self._dialect = dialect
        self._client = client
        self._tenant = tenant
        self._records = Records(services.store.visit(), tenant.namespace)
        self._feedback = Feedback(services, dialect, tenant.namespace)
        self._newest: Attempt = AsItCame(ParsedRequest(b"", tenant))

    async def answer(self) -> None:
        """Reply to the client. The body is whole here; if the client hangs up, all work for it ends."""
        body = await self._client.read(self._services.settings.body_limit)
        with self._client.present():
            parsed = await self._parse(body)
            await (self._observe(parsed) if parsed.observed else self._converse(parsed))

    async def _converse(self, parsed: ParsedRequest) -> None:
        """Plan, render and send the request, and again differently, until upstream takes it or we give up."""
        planned = self._newest = await self._plan(parsed)
        if planned.planned is not None and planned.planned.holdout is Holdout.KEPT:
            await self._observe(parsed, planned)
            return
        tries, own = Tries(self._feedback.believed(planned)), None
        while True:
            attempt = self._newest = await self._render(planned, tries)
            refusal = await self._send(attempt, tries)
            if refusal is None:
                return
            complaint = self._dialect.complaint(refusal.status, refusal.said())
            carried = attempt.additions or tries.without & FORGIVING
            own = own or (None if carried else refusal)
            again = None if attempt.rounds else tries.after(complaint, carried, concerned=attempt.concerned)
            if again is None:
                about_ours = own is not None and complaint is not Verdict.FINAL
                await self._pass_on(own if own and about_ours else refusal, attempt.headers())
                return
            tries = again
            if complaint is Verdict.OVERFLOW:
                self._feedback.too_long(attempt, refusal)
                planned = await self._plan(parsed)
                if not attempt.additions:  # only now is there anything that upstream may refuse
                    tries = replace(tries, without=self._feedback.believed(planned))

    def outcome(self) -> Outcome:
        """Return the outcome of the request so far."""
        if self._dialect.counts:  # what is counted is sent, and recorded, later
            return self._client.outcome(Kind.RELAY, self._tenant.name, self._tenant.namespace)
        return outcome(self._newest, self._client, self._records.errors, self._feedback.refused)

    def ended(self, outcome: Outcome) -> None:
        """Pass on the outcome of the whole request."""
        self._services.watch(outcome.request_id, self._newest)
        self._services.sink(outcome)
        self._services.capture(outcome, self._tenant.policy, self._newest.parsed.chat)

    # -- from the body to an attempt --

    async def _parse(self, body: bytes) -> ParsedRequest:
        """Parse the body and choose the policy for its model. Gives a reason instead if we cannot read the body."""
        tenant, client = self._tenant, self._client
        limit, threads = self._services.settings.body_limit, self._services.threads
        try:
            clear = body
            if client.encoded:
                clear = await decoded(body, client.headers, limit, threads, tenant.namespace, client.hold)
            chat = await self._run(partial(self._dialect.parse, clear), len(clear))
        except ClientFault:
            return ParsedRequest(body, tenant, reason=Reason.ENCODING)
        except Unplannable as error:
            return ParsedRequest(body, tenant, reason=error.reason)
        chosen = tenant.policy.for_model(chat.model)
        reason, policy = held_back(client, chosen), chosen.planning
        tenant = tenant if policy is tenant.policy else replace(tenant, policy=policy)
        if not reason:
            if observes(client, chosen):
                return ParsedRequest(body, tenant, chat, observed=True)
            self._services.known.ask(tenant, client.headers)
        going_on = await self._records.continuation(chat.continues) if chat.continues else None
        continued = self._dialect.continued(chat, going_on) if going_on else None
        return ParsedRequest(body, tenant, chat, reason, continued)

    async def _plan(self, parsed: ParsedRequest) -> AsItCame:
        """Return the request with its plan, or with the reason why it has none."""
        chat, policy, namespace = parsed.chat, parsed.tenant.policy, self._tenant.namespace
        if chat is None or parsed.reason:
            return AsItCame(parsed, reason=parsed.reason)
        window, factor = self._feedback.window_for(policy, chat.model), self._feedback.factor(policy, chat.model)
        window = None if window is None else int(window / factor)
        try:
            planned = await prepare.plan(self._dialect, chat, policy, window, self._services.reader, namespace)
        except Unplannable as error:
            return AsItCame(parsed, reason=error.reason)
        if planned is None:
            return AsItCame(parsed, reason=Reason.FIELD, obstacle=chat.obstacle_beside(policy.upstream.members))
        return AsItCame(parsed, planned if factor == 1 else replace(planned, factor=factor))

    async def _render(self, attempt: AsItCame, tries: Tries) -> Sent:
        """Return the request rewritten to its plan, or as it came if there is no plan or it changes nothing."""
        planned = attempt.planned
        if planned is None:
            return attempt
        if not planned.concerns_us:
            return await self._fitting(attempt, planned)
        if tries.reason:
            return AsItCame(attempt.parsed, reason=tries.reason, refused=planned)
        if Addition.PLACE in tries.without:
            planned = planned.with_role(SnapshotRole.USER)
        reader, summaries, size = self._services.reader, self._services.summaries, planned.request.size
        shown, rounds = await asyncio.gather(
            summaries.existing(planned, self._records),
            self._records.rounds(await self._run(planned.replies, size), planned.request.model),
        )
        rendered = await self._run(partial(prepare.rendered, planned, shown, rounds, reader), size)
        io = self._turn_io(attempt.parsed, rendered, tries)
        if not self._dialect.counts:
            rendered = await summaries.complete(rendered, self._records, self._tenant, io.ask)
        if rounds and not planned.room.holds(rendered.tokens):
            rendered = await self._run(partial(prepare.fitting, rendered, reader), size)
        if not rendered.changed:
            return await self._fitting(attempt, planned)
        turn = await self._run(partial(rendered.turn, Addition.USAGE not in tries.without), size)
        return Rewritten(attempt.parsed, rendered, turn, self._turn_io(attempt.parsed, rendered, tries))

    async def _fitting(self, attempt: AsItCame, planned: PlannedRequest) -> AsItCame:
        """Return the request as it came, or with a lower limit for the reply if upstream would refuse the client's."""
        left, refused = planned.reply_left(planned.tokens), self._feedback.window is not None
        if left is None or attempt.parsed.continued is not None:
            return attempt
        if not planned.exceeds(refused=refused) or planned.reply_limit(planned.tokens) is None:
            return attempt
        shorten = partial(self._dialect.with_lower_limit, planned.request, left)
        return replace(attempt, shortened=await self._run(shorten, planned.request.size))

    # -- sending it --

    async def _send(self, attempt: Sent, tries: Tries) -> Refusal | None:
        """Have upstream answer the client. Returns a refusal if another attempt may succeed; the client has then seen
        nothing."""
        if isinstance(attempt, AsItCame):
            return await self._send_untouched(attempt, tries)
        if self._dialect.counts:
            return await self._count(attempt)
        self._keep_originals(attempt.rendered)
        try:
            size = attempt.planned.request.size
            taken_back = await tool_loop.converse(attempt.turn, self._client, attempt.io, size=size)
        except Refusal as refusal:
            return refusal
        if taken_back is None:
            self._feedback.took_prompt(attempt, attempt.spent.largest)
        else:  # the largest prompt was the client's own
            self._feedback.took_prompt(AsItCame(attempt.parsed, attempt.planned), attempt.spent.largest)
        if taken_back is None or attempt.rounds:
            self._feedback.took_additions(attempt.planned, attempt.additions, tries.blamed)
        elif not isinstance(complaint := self._dialect.complaint(taken_back.status, taken_back.said()), Verdict):
            named = complaint if complaint in attempt.additions else Addition.ANY
            self._feedback.took_additions(attempt.planned, frozenset(), tries.blamed | {named})
        return None

    async def _send_untouched(self, attempt: AsItCame, tries: Tries) -> Refusal | None:
        """Send the client's bytes upstream and upstream's bytes back. Returns a refusal as `_send` does."""
        parsed = attempt.parsed
        request = self._services.relay.request(self._client, parsed.tenant, parsed.body)
        clear = parsed.chat.body if Addition.THINKING in tries.without and parsed.chat else None
        changed = parsed.continued or attempt.shortened or clear
        if changed is not None:
            request = forgiving(rewritten(request, changed, REWRITTEN), self._dialect, tries.without)
        if self._client.sent:
            request = replace(request, headers=Headers(request.headers.without((IDEMPOTENCY_KEY,))))
        else:
            self._client.sent = time.perf_counter()
        async with aclosing(await self._services.upstream.send(request)) as reply:
            read = b""
            plan = attempt.planned or attempt.refused
            if plan is not None and self._dialect.may_be_overflow(reply.status):
                refusal = await tool_loop.refusal(reply)
                if refusal.whole:
                    return refusal
                read = refusal.body
            compared = attempt.planned is not None and attempt.planned.holdout
            ends = None
            if compared or tries.blamed or attempt.tokens >= TELLING:
                ends = ReplyEnds(reply if compared else None)
            watch = ends.take if ends else ignore
            await tool_loop.pass_on(reply, self._client, attempt.headers(), self._dialect.error_event, watch, read)
            if ends is not None and reply.status == 200:
                self._took(attempt, tries, reply, ends)
            return None

    def _took(self, attempt: AsItCame, tries: Tries, reply: UpstreamReply, ends: ReplyEnds) -> None:
        """Learn from a reply to the client's own bytes, of which `ends` was kept."""
        if ends.clear and (said := self._dialect.reported(ends.clear)):
            self._newest = replace(attempt, reported=said)
        if attempt.tokens >= TELLING:
            self._feedback.took_prompt(attempt, self._dialect.prompt_tokens(ends.last))
        plan = attempt.planned or attempt.refused
        if plan is not None and tries.blamed and not self._is_error(reply, ends.first):
            self._feedback.took_additions(plan, frozenset(), tries.blamed)

    async def _count(self, attempt: Rewritten) -> Refusal | None:
        """Have upstream count the rewritten request's tokens. Nothing is stored, asked for or learned on the way."""
        async with aclosing(await attempt.io.send(attempt.turn.request())) as reply:
            if reply.status != 200:
                return await tool_loop.refusal(reply)
            await tool_loop.pass_on(reply, self._client, attempt.headers(), self._dialect.error_event)
            return None

    async def _observe(self, parsed: ParsedRequest, known: AsItCame | None = None) -> None:
        """Send the client's bytes upstream and upstream's bytes back, and only record what the plan would have done.

        Nothing is stored, asked for or learned on the way.
        """
        attempt: Attempt = AsItCame(parsed, reason=Reason.BUSY)
        with suppress(Overloaded):  # what is only observed is not refused for want of a plan
            attempt = known or await self._plan(parsed)
            if attempt.planned is not None:
                attempt = await self._observed(parsed, attempt.planned)
        self._newest, planned = attempt, attempt.planned
        request = self._services.relay.request(self._client, parsed.tenant, parsed.body)
        self._client.sent = time.perf_counter()
        async with aclosing(await self._services.upstream.send(request)) as reply:
            ends = DecodedEnds(reply)
            await tool_loop.pass_on(reply, self._client, attempt.headers(), self._dialect.error_event, ends.take)
            said = self._dialect.reported(ends.both) if reply.status == 200 else None
            if planned is not None and said is not None:
                self._newest = await self._observed(parsed, planned, said)

    async def _observed(self, parsed: ParsedRequest, planned: PlannedRequest, said: Reported | None = None) -> Observed:
        """Return the attempt with its forecast, which rests on what upstream `said` once its reply has ended."""
        observe = partial(Observed.of, parsed, planned, said)
        size = planned.request.size
        return await self._services.threads.run(self._tenant.namespace, observe, size, begun=said is not None)

    async def _pass_on(self, refusal: Refusal, ours: Sequence[Header]) -> None:
        """Reply with upstream's refusal: its status, headers and body. Raises UpstreamBroken if it was cut off."""
        if not refusal.whole:
            raise UpstreamBroken(f"Upstream's refusal ({refusal.status}) is too long, too slow or broken off")
        await self._client.start(refusal.status, reply_headers(refusal.headers, ours))
        await self._client.finish(refusal.body)

    def _turn_io(self, parsed: ParsedRequest, rendered: RenderedRequest, tries: Tries) -> RequestTurnIO:
        headers, without = partial(rendered_headers, rendered), tries.without
        return RequestTurnIO(
            self._services, self._client, parsed.tenant, rendered, self._records, headers, parsed.searching, without
        )

    def _keep_originals(self, rendered: RenderedRequest) -> None:
        """Store the moved texts in the background, for people. The proxy itself reads them from each request."""
        namespace, name = self._tenant.namespace, rendered.moves_name
        if not rendered.history.policy.store_originals or self._records.has_originals(name):
            return

        async def keep() -> None:
            records, size = Records(self._services.store.visit(), namespace), rendered.history.request.size
            texts = await self._run(partial(prepare.originals, rendered), size)
            await records.keep_originals(name, texts, partial(self._run, size=size))

        held = 2 * len(rendered.history.request.body)  # once as it came, and once as it was rendered
        self._services.background.start(f"{namespace}/{name}", keep, held)

    def _is_error(self, reply: UpstreamReply, beginning: bytes) -> bool:
        """Whether a reply that begins like this is an error in spite of its status."""
        return self._dialect.is_error(tool_loop.first_data(reply, beginning))

    async def _run(self, work: Callable[[], T], size: int) -> T:
        """Return the result of `work`, which looks through so many bytes."""
        return await self._services.threads.run(self._tenant.namespace, work, size)
