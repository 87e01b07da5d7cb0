"""The life of a chat request, from its first byte to its last.

body ──parse, plan──> nothing to do, or only to be observed: it goes upstream as it came, and so does the reply
                └───> render, converse ──> upstream's reply, without our tools; the rounds that it hides are recorded

`Prepared` is the request, which each stage fills in further. `prepare` plans and renders, `tool_loop` converses with
upstream, and `ladder` says how to send it again after a refusal.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from msgspec.structs import replace

from proxy.dialects import Dialect, overflow, refusals, usage
from proxy.errors import ClientFault, Overloaded, UpstreamBroken
from proxy.plan.history import Unplannable
from proxy.plan.reasons import Reason
from proxy.plan.refusals import Addition, Step, Verdict
from proxy.policies import identity
from proxy.policy import Mode, SnapshotRole
from proxy.regex import Budget
from proxy.requests import archive, outcome, prepare, tool_loop
from proxy.requests.archive import Archive
from proxy.requests.ladder import Ladder
from proxy.requests.prepared import Prepared
from proxy.requests.records import Records
from proxy.requests.relay import DecodedEnds, ReplyEnds, ignore, served
from proxy.requests.tool_loop import Refusal
from proxy.requests.turn_io import IDEMPOTENCY_KEY, REWRITTEN, RequestTurnIO, forgiving, rewritten
from proxy.requests.windows import TELLING
from proxy.telemetry import logs
from proxy.telemetry.outcome import Holdout, Kind, Outcome
from proxy.upstream.codings import decoded
from proxy.upstream.headers import Header, Headers, reply_headers

if TYPE_CHECKING:
    from proxy.dialects.turn import Turn
    from proxy.plan.request import Request
    from proxy.policies.tenants import Tenant
    from proxy.requests.exchange import Exchange
    from proxy.requests.prepare import PlannedRequest, RenderedRequest
    from proxy.requests.services import Services
    from proxy.upstream.client import UpstreamReply

T = TypeVar("T")

_without_identity = logs.Limited(logging.getLogger(__name__))


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
    """One client request. `ready` is how far it got, which the outcome tells."""

    def __init__(self, services: Services, dialect: Dialect, client: Exchange, tenant: Tenant) -> None:
        self._services = services
        self._dialect = dialect
        self._client = client
        self._tenant = tenant
        self._owner = tenant  # whose records the request reads; it writes some only once `_accepted`
        self._accepted = True
        self._own: Records | None = None  # where a snapshot that could not wait for that was stored
        self._records = Records(services.store.visit(), tenant.namespace)
        self._ladder = Ladder(services.known, dialect, tenant.namespace, tenant.namespace)
        self._io: RequestTurnIO | None = None  # of the request as it was rendered last
        self.ready = Prepared(b"", tenant)

    async def answer(self) -> None:
        """Reply to the client. The body is whole here; if the client hangs up, all work for it ends."""
        body = await self._client.read(self._services.settings.body_limit)
        with self._client.present():
            self.ready = await self._parse(body)
            if self.ready.observed:
                await self._observe()
                return
            self.ready = await self._plan(self.ready)
            if self.ready.planned is not None and self.ready.planned.holdout is Holdout.KEPT:
                await self._observe()
                return
            await self._climb(self._ladder.first(self.ready, Step()))

    async def _climb(self, step: Step) -> None:
        """Send the request, and again otherwise, until upstream takes it or its refusal goes to the client."""
        while True:
            self.ready = await self._render(step)
            refusal = await self._send()
            if refusal is None:
                return
            again = self._ladder.next(self.ready, refusal)
            if isinstance(again, Refusal):
                await self._pass_on(again)
                return
            step = again
            if step.replanned > self.ready.step.replanned:
                carried = self.ready.additions
                self.ready = await self._plan(self.ready)
                if not carried:  # only now is there anything that upstream may refuse
                    step = self._ladder.first(self.ready, step)

    def outcome(self) -> Outcome:
        """Return the outcome of the request so far."""
        if self._dialect.counts:  # what is counted is sent, and recorded, later
            return self._client.outcome(Kind.RELAY, self._tenant.name, self._tenant.namespace)
        if not self._accepted:  # then nobody may see what its records made of it
            self.ready = self.ready.again()
        return outcome.of_chat(self.ready, self._client, self._records.errors, self._ladder.refused)

    def ended(self, outcome: Outcome) -> None:
        """Pass on the outcome of the whole request."""
        if self._services.watch is not None:
            self._services.watch(outcome, self.ready)
        self._services.sink(outcome)

    # -- from the body to what is sent --

    async def _parse(self, body: bytes) -> Prepared:
        """Parse the body and choose the policy for its model. Gives a reason instead if we cannot read the body."""
        tenant, client = self._tenant, self._client
        limit, threads = self._services.settings.body_limit, self._services.threads
        try:
            clear = body
            if client.encoded:
                clear = await decoded(body, client.headers, limit, threads, tenant.namespace, client.hold)
            chat = await self._run(partial(self._dialect.parse, clear), len(clear))
        except ClientFault:
            return Prepared(body, tenant, unplanned=Reason.ENCODING)
        except Unplannable as error:
            return Prepared(body, tenant, unplanned=error.reason)
        tenant = await self._identify(chat)
        chosen, wishes = tenant.policy.for_model(chat.model), _wishes(client)
        policy = chosen.planning
        tenant = tenant if policy is tenant.policy else replace(tenant, policy=policy)
        ready = Prepared(body, tenant, chat, searching=Budget(policy.tools.max_search_seconds))
        if chosen.offload.mode is Mode.OFF or b"off" in wishes:
            ready = replace(ready, unplanned=Reason.OFF if chosen.offload.mode is Mode.OFF else Reason.HEADER)
        elif chosen.offload.mode is Mode.OBSERVE or b"observe" in wishes:
            return replace(ready, observed=True)
        elif self._accepted:
            self._services.known.ask(tenant, client.headers)
        going_on = await self._records.continuation(chat.continues) if chat.continues else None
        return replace(ready, continued=self._dialect.continued(chat, going_on) if going_on else None)

    async def _identify(self, chat: Request) -> Tenant:
        """Find whose records the request may read, and return the tenant with the namespace of what it leaves behind.

        Before upstream has accepted it, that is the key's: anybody can say to be the client.
        """
        tenant, client = self._tenant, self._client
        if not tenant.policy.identity.given:
            return tenant
        headers = client.headers if tenant.listed else self._services.relay.request(client, tenant, b"").headers
        members = await self._run(lambda: chat.members, chat.size) if tenant.policy.identity.body else None
        owner = identity.known(tenant, headers, members)
        if owner is None:
            _without_identity(tenant.name, f"{tenant.name}: a request lacks {tenant.policy.identity}; its key counts")
            return tenant
        self._owner, self._accepted = owner, tenant.listed
        self._records = Records(self._services.store.visit(), owner.namespace)
        self._ladder = Ladder(self._services.known, self._dialect, owner.namespace, tenant.namespace)
        return owner if tenant.listed else tenant

    async def _was_accepted(self) -> None:
        """Upstream has accepted the request: now it may leave behind what its client's next ones find."""
        ready, rendered, io = self.ready, self.ready.rendered, self._io
        if not self._accepted:
            self._accepted = True
            self._ladder.accepted()
            tenant = replace(ready.tenant, namespace=self._owner.namespace)
            self.ready = ready = replace(ready, tenant=tenant)
            if not ready.unplanned and not ready.observed:
                self._services.known.ask(tenant, self._client.headers)
            if rendered is not None and io is not None and rendered.history.plan.boundaries:
                if self._own is not None:
                    await self._services.summaries.adopt(rendered.history, self._own, self._records)
                await self._services.summaries.complete(rendered, self._records, tenant, io.ask, waits=False)
        if rendered is not None:
            self._keep_originals(rendered)

    def _ours(self) -> Sequence[Header]:
        """Return our headers for a reply. Whose request was not accepted does not learn what we found."""
        return self.ready.headers() if self._accepted else ()

    async def _plan(self, ready: Prepared) -> Prepared:
        """Return the request with its plan, or with the reason why it has none."""
        chat, policy, ready = ready.chat, ready.tenant.policy, ready.again()
        if chat is None or ready.unplanned:
            return ready
        window, factor = self._ladder.room(policy, chat.model)
        window = None if window is None else int(window / factor)
        reader, namespace = self._services.reader, self._tenant.namespace
        try:
            planned = await prepare.plan(self._dialect, chat, policy, window, reader, namespace)
        except Unplannable as error:
            return replace(ready, unplanned=error.reason)
        if planned is None:
            return replace(ready, unplanned=Reason.FIELD, obstacle=chat.obstacle_beside(policy.upstream.members))
        obstacle = "tool_choice" if planned.bound else ""
        relearned = planned.relearned or (self._ladder.too_long and not planned.plan.empty)
        return replace(ready, planned=replace(planned, factor=factor, relearned=relearned), obstacle=obstacle)

    async def _render(self, step: Step) -> Prepared:
        """Return the request rendered to its plan, or as it came if there is no plan or it changes nothing."""
        ready, planned = self.ready.again(step=step), self.ready.planned
        if planned is None or ready.reason:
            return ready
        if not planned.concerns_us:
            return await self._fitting(ready, planned)
        if Addition.PLACE in step.without:
            planned = planned.with_role(SnapshotRole.USER)
        rendered = await self._rendered(ready, planned)
        if not rendered.changed:
            return await self._fitting(ready, planned)
        size = planned.request.size
        turn = await self._run(partial(rendered.turn, Addition.USAGE not in step.without), size)
        self._io = io = self._turn_io(ready, rendered)
        return replace(ready, planned=planned, rendered=rendered, turn=turn, uses=io.uses)

    async def _rendered(self, ready: Prepared, planned: PlannedRequest) -> RenderedRequest:
        """Return the request with the records that its plan needs, as far as they exist and fit."""
        reader, summaries, size = self._services.reader, self._services.summaries, planned.request.size
        shown, rounds = await asyncio.gather(
            summaries.existing(planned, self._records),
            self._records.rounds(await self._run(planned.replies, size), planned.request.model),
        )
        rendered = await self._run(partial(prepare.rendered, planned, shown, rounds, reader), size)
        if not self._dialect.counts:
            ask = self._turn_io(ready, rendered).ask
            if self._accepted:
                rendered = await summaries.complete(rendered, self._records, ready.tenant, ask)
            elif summaries.waits(rendered):
                self._own = Records(self._services.store.visit(), self._tenant.namespace)
                rendered = await summaries.complete(rendered, self._own, ready.tenant, ask)
        if rounds and not planned.room.holds(rendered.tokens):
            rendered = await self._run(partial(prepare.fitting, rendered, reader), size)
        return rendered

    async def _fitting(self, ready: Prepared, planned: PlannedRequest) -> Prepared:
        """Return the request as it came, or with a lower limit for the reply if upstream would refuse the client's."""
        left = planned.reply_left(planned.tokens)
        if left is None or ready.continued is not None:
            return ready
        if not planned.exceeds(refused=self._ladder.too_long) or planned.reply_limit(planned.tokens) is None:
            return ready
        shorten = partial(self._dialect.with_lower_limit, planned.request, left)
        return replace(ready, shortened=await self._run(shorten, planned.request.size))

    # -- sending it --

    async def _send(self) -> Refusal | None:
        """Have upstream answer the client. Returns a refusal if another step may succeed; the client has then seen
        nothing."""
        ready = self.ready
        if ready.turn is None or ready.rendered is None or self._io is None:
            return await self._send_untouched(ready)
        if self._dialect.counts:
            return await self._count(ready, self._io, ready.turn)
        size = ready.rendered.history.request.size
        try:
            taken_back = await tool_loop.converse(ready.turn, self._client, self._io, size=size)
        except Refusal as refusal:
            return refusal
        # After a refusal was taken back, the largest prompt was the client's own.
        self._ladder.took_prompt(ready.again() if taken_back else ready, ready.turn.spent.largest)
        if taken_back is None or ready.rounds:
            self._ladder.took(ready, ready.additions, ready.step.blamed)
        elif not isinstance(complaint := self._dialect.complaint(taken_back.status, taken_back.said()), Verdict):
            named = complaint if complaint in ready.additions else Addition.ANY
            self._ladder.took(ready, frozenset(), ready.step.blamed | {named})
        return None

    async def _send_untouched(self, ready: Prepared) -> Refusal | None:
        """Send the client's bytes upstream and upstream's bytes back. Returns a refusal as `_send` does."""
        request = self._services.relay.request(self._client, ready.tenant, ready.body)
        clear = ready.chat.body if Addition.THINKING in ready.step.without and ready.chat else None
        changed = ready.continued or ready.shortened or clear
        if changed is not None:
            request = forgiving(rewritten(request, changed, REWRITTEN), self._dialect, ready.step.without)
        if self._client.sent:
            request = replace(request, headers=Headers(request.headers.without((IDEMPOTENCY_KEY,))))
        else:
            self._client.sent = time.perf_counter()
        async with aclosing(await self._services.upstream.send(request)) as reply:
            read = b""
            if ready.planned is not None and overflow.may_be(reply.status):
                refusal = await tool_loop.refusal(reply)
                if refusal.whole:
                    return refusal
                read = refusal.body
            compared = ready.in_force is not None and ready.in_force.holdout
            ends = None
            if compared or ready.step.blamed or ready.tokens >= TELLING:
                ends = ReplyEnds(reply if compared else None)
            watch = ends.take if ends else ignore
            if 200 <= reply.status < 300:
                await self._was_accepted()
            await tool_loop.pass_on(reply, self._client, self._ours(), self._dialect.error_event, watch, read)
            if ends is not None and reply.status == 200:
                self._took(ready, reply, ends)
            return None

    def _took(self, ready: Prepared, reply: UpstreamReply, ends: ReplyEnds) -> None:
        """Learn from a reply to the client's own bytes, of which `ends` was kept."""
        if ends.clear and (said := usage.reported(ends.clear)):
            self.ready = replace(self.ready, reported=said)
        if ready.tokens >= TELLING:
            self._ladder.took_prompt(ready, usage.prompt_tokens(ends.last))
        if ready.step.blamed and not refusals.is_error(tool_loop.first_data(reply, ends.first)):
            self._ladder.took(ready, frozenset(), ready.step.blamed)

    async def _count(self, ready: Prepared, io: RequestTurnIO, turn: Turn) -> Refusal | None:
        """Have upstream count the rewritten request's tokens. Nothing is stored, asked for or learned on the way."""
        async with aclosing(await io.send(turn.request())) as reply:
            if reply.status != 200:
                return await tool_loop.refusal(reply)
            await tool_loop.pass_on(reply, self._client, ready.headers(), self._dialect.error_event)
            return None

    async def _observe(self) -> None:
        """Send the client's bytes upstream and upstream's bytes back, and only record what the plan would have done.

        Nothing is stored, asked for or learned on the way.
        """
        try:
            if self.ready.planned is None:
                self.ready = await self._plan(self.ready)
            self.ready = await self._foreseen(self.ready)
        except Overloaded:  # what is only observed is not refused for want of a plan
            self.ready = self.ready.again(unplanned=Reason.BUSY)
        request = self._services.relay.request(self._client, self.ready.tenant, self.ready.body)
        self._client.sent = time.perf_counter()
        async with aclosing(await self._services.upstream.send(request)) as reply:
            if 200 <= reply.status < 300:
                await self._was_accepted()
            ends, ours = DecodedEnds(reply), self._ours()
            await tool_loop.pass_on(reply, self._client, ours, self._dialect.error_event, ends.take)
            said = usage.reported(ends.both) if reply.status == 200 else None
            if said is not None and self.ready.foreseen is not None:
                self.ready = await self._foreseen(replace(self.ready, reported=said))

    async def _foreseen(self, ready: Prepared) -> Prepared:
        """Return the request with its forecast, which rests on what upstream reported once its reply has ended."""
        planned, said = ready.planned, ready.reported
        if planned is None:
            return ready
        forecast = partial(outcome.foreseen, planned, said)
        threads, size = self._services.threads, planned.request.size
        foreseen = await threads.run(self._tenant.namespace, forecast, size, begun=said is not None)
        return replace(ready, foreseen=foreseen)

    async def _pass_on(self, refusal: Refusal) -> None:
        """Reply with upstream's refusal: its status, headers and body. Raises UpstreamBroken if it was cut off."""
        if not refusal.whole:
            raise UpstreamBroken(f"Upstream's refusal ({refusal.status}) is too long, too slow or broken off")
        await self._client.start(refusal.status, reply_headers(refusal.headers, self._ours()))
        await self._client.finish(refusal.body)

    def _turn_io(self, ready: Prepared, rendered: RenderedRequest) -> RequestTurnIO:
        headers, without = replace(ready, rendered=rendered).headers, ready.step.without
        return RequestTurnIO(
            self._services,
            self._client,
            ready.tenant,
            rendered,
            self._records,
            headers,
            self._was_accepted,
            ready.searching,
            without,
        )

    def _keep_originals(self, rendered: RenderedRequest) -> None:
        """Store the moved texts in the background, for the caller's next conversations and for people."""
        namespace, name = self._owner.namespace, rendered.moves_name
        if not rendered.history.policy.store_originals or self._records.has_originals(name):
            return

        async def keep() -> None:
            records, size = Records(self._services.store.visit(), namespace), rendered.history.request.size
            texts = await self._run(partial(prepare.originals, rendered), size)
            await records.keep_originals(name, texts, partial(self._run, size=size))
            index = await self._run(lambda: dict(archive.index(rendered, time.time())), size)
            await Archive(self._services.store.visit(), namespace).keep(index)

        held = 2 * len(rendered.history.request.body)  # once as it came, and once as it was rendered
        self._services.background.start(f"{namespace}/{name}", keep, held)

    async def _run(self, work: Callable[[], T], size: int) -> T:
        """Return the result of `work`, which looks through so many bytes."""
        return await self._services.threads.run(self._tenant.namespace, work, size)


def _wishes(client: Exchange) -> Collection[bytes]:
    """Return what the client says in its header `x-offload`. Proxies may join several of them into a list."""
    if not client.has_wish:
        return ()
    return {wish.strip().lower() for wish in b",".join(client.headers.get_all(b"x-offload")).split(b",")}
