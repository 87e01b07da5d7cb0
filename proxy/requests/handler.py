"""The life of a chat request, from its first byte to its last.

    body ──parse, plan──> render ──> send ──taken──> one outcome
             │              └───refused, in another version──┘
             └──only to be observed──> it goes upstream unchanged, and what the plan would have done is recorded

`Prepared` is the request, which each stage fills in further. A request that its plan changes goes
through a `conversation`, which answers the calls of our tools. All others are sent by
`_send_untouched`, in the client's own bytes. `versions` says which version follows a refusal.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from functools import partial

from msgspec.structs import replace

from proxy.dialects import Dialect, model_in, refusals, usage
from proxy.dialects.beginnings import parsed
from proxy.dialects.request import GLANCE, glanced
from proxy.dialects.usage import Reported
from proxy.errors import ClientFault, OffloadError, Overloaded, UpstreamBroken
from proxy.plan.compacting import MARK, Wish
from proxy.plan.turn import Addition, Reason, Request, Unplannable
from proxy.policies.tenants import Tenant
from proxy.policy import Mode
from proxy.requests import archive, compactions, observing, references, rendering
from proxy.requests.callers import Caller
from proxy.requests.conversation import converse
from proxy.requests.exchange import Exchange
from proxy.requests.outcomes import headers, of_chat
from proxy.requests.planned import Planned, Rendered, plan
from proxy.requests.prepared import Prepared
from proxy.requests.relay import IDEMPOTENCY_KEY, ReplyEnds, ignore, pass_on, served
from proxy.requests.rounds import Rounds, Services
from proxy.requests.versions import Refusal, Versions
from proxy.telemetry import logs
from proxy.telemetry.outcome import Kind, Outcome
from proxy.upstream.client import UpstreamReply
from proxy.upstream.codings import decoded_request
from proxy.upstream.headers import Header, Headers, reply_headers

logger = logging.getLogger(__name__)


class Chat:
    """Answers the chat requests of one API, and those that only count their tokens."""

    def __init__(self, services: Services, dialect: Dialect) -> None:
        self._services = services
        self._dialect = dialect

    async def __call__(self, client: Exchange, tenant: Tenant) -> None:
        """Reply, and record one outcome whatever happens."""
        request = _Request(self._services, self._dialect, client, tenant)
        await served(client, request.ended, request.answer(), request.outcome)


class _Request:
    """One client request. `prepared` is how far it got, which the outcome tells."""

    def __init__(
        self, services: Services, dialect: Dialect, client: Exchange, tenant: Tenant
    ) -> None:
        self._services = services
        self._dialect = dialect
        self._client = client
        self._caller = Caller(services, dialect, client, tenant)
        self._versions = Versions(services.known, services.refusals, dialect, self._caller)
        self.prepared = Prepared(b"", tenant)

    async def answer(self) -> None:
        """Reply to the client. The body is whole here; if the client hangs up, all work for it
        ends."""
        body = await self._client.read(self._services.settings.body_limit)
        with self._client.present():
            self.prepared = self.prepared.unrendered(body=body)
            if await self._planned():
                return
            bug = self.prepared.unrendered(
                planned=None, unplanned=Reason.BUG, obstacle="", without=frozenset()
            )
            self.prepared = compactions.as_wished(bug, bug.wish) if bug.wish else bug
            try:
                await self._send_untouched(self.prepared)
            except Refusal as refusal:
                await self._pass_on(refusal)

    async def _planned(self) -> bool:
        """Reply to the client, by way of the stages. Returns False after a bug of ours before the
        reply: it costs the plan and not the reply, because what fails at one request of a
        conversation would fail at all later ones."""
        try:
            await self._staged()
        except OffloadError:
            raise
        except Exception:
            client = self._client
            task = asyncio.current_task()
            # it would only be sent again
            as_it_came = client.sent and self.prepared.planned is None
            if client.status or client.gone or as_it_came or (task and task.cancelling()):
                raise
            request = client.request_id
            name = self.prepared.tenant.name
            logger.exception("a bug: request %s of %s is sent as it came", request, name)
            return False
        return True

    async def _staged(self) -> None:
        self.prepared = await self._parse(self.prepared)
        self.prepared = await self._plan(self.prepared)
        if self.prepared.wish is not None and await self._compacted(self.prepared.wish):
            return
        if self.prepared.observed:
            await self._observe()
        else:
            await self._serve()

    async def _serve(self, heard: int = 0) -> None:
        """Send one version after another until upstream takes it, or the client gets its refusal.
        `heard` as in `_send_untouched`."""
        try:
            while not await self._sent(heard):
                pass
        except Refusal as refusal:
            await self._pass_on(refusal)

    async def _sent(self, heard: int) -> bool:
        """Send the next version and return whether upstream takes it. Raises the refusal that the
        client gets."""
        version = self._versions.next(self.prepared)
        too_long = self._versions.too_long
        self.prepared = await rendering.render(self._caller, version, too_long=too_long)
        try:
            self._versions.check(self.prepared)
            await self._send(self.prepared, heard)
        except Refusal as refusal:
            if self._versions.refuse(self.prepared, refusal):
                self.prepared = await self._plan(self.prepared)
            return False
        return True

    def outcome(self) -> Outcome:
        """Return the outcome of the request so far."""
        caller = self._caller
        if self._dialect.counts:  # what is counted is sent, and recorded, later
            return self._client.outcome(Kind.RELAY, caller.key.name, caller.key.namespace)
        if not caller.vouched:  # then nobody may see what its records made of it
            self.prepared = self.prepared.unrendered()
        return of_chat(self.prepared, self._client, caller.store_errors, self._versions.refused)

    def ended(self, outcome: Outcome) -> None:
        """Pass on the outcome of the whole request."""
        if self._caller.vouched and not self._dialect.counts and 200 <= outcome.status < 300:
            miss, missed = self._services.last_requests.ended(outcome.namespace, self.prepared)
            outcome = replace(outcome, miss=miss, missed_tokens=missed)
        self._services.sink(outcome, self.prepared, self._client)

    # -- from the body to a plan --

    async def _parse(self, prepared: Prepared) -> Prepared:
        """Return the request with its policy, or with the reason why it cannot be read."""
        caller = self._caller
        try:
            if caller.key.policy.may_be_off and (passing := await self._glanced(prepared)):
                return passing
            request = await self._read(prepared.body)
            caller.identify(request)
            tenant = replace(caller.key, namespace=caller.namespace)
            prepared = replace(prepared, tenant=tenant)
            prepared = await references.resolved(caller, prepared, request)
        except ClientFault:
            return replace(prepared, unplanned=Reason.ENCODING)
        except Unplannable as error:
            return replace(prepared, unplanned=error.reason)
        return await references.continued(caller, await self._chosen(prepared))

    async def _glanced(self, prepared: Prepared) -> Prepared | None:
        """Return the request with nothing read but its model, if the policy for that is off and
        nothing in the body is ours. Raises Unplannable."""
        body = prepared.body
        tenant = prepared.tenant
        ours = self._dialect.name in references.NATIVE and MARK in body
        if self._client.encoded or tenant.policy.identity.given or ours:
            return None
        glance = partial(glanced, body, self._dialect.refers)
        request = await self._caller.run(glance, len(body) // GLANCE)
        if request is None:
            return None
        request = replace(request, model=request.model or model_in(self._client.path))
        policy = tenant.policy.for_model(request.model)
        if policy.offload.mode is not Mode.OFF:
            return None
        tenant = replace(tenant, policy=policy)
        return replace(prepared, tenant=tenant, request=request, unplanned=Reason.OFF)

    async def _read(self, body: bytes) -> Request:
        """Return the request that the body holds. Raises ClientFault and Unplannable."""
        client = self._client
        services = self._services
        caller = self._caller.key.namespace
        if client.encoded:
            limit = services.settings.body_limit
            body = await decoded_request(
                body, client.headers, limit, services.threads, caller, client.hold
            )
        known = services.reader.known(self._dialect, body, caller)
        new = len(body) - len(known.text) if known else len(body)
        return await self._caller.run(partial(parsed, self._dialect, body, known), new)

    async def _chosen(self, prepared: Prepared) -> Prepared:
        """Return the request with the policy for its model, and how that lets it be planned."""
        request = prepared.request
        tenant = prepared.tenant
        if request is None:
            return prepared
        policy = tenant.policy.for_model(request.model)
        if policy.planning is not tenant.policy:
            tenant = replace(tenant, policy=policy.planning)
            prepared = replace(prepared, tenant=tenant)
        if policy.offload.mode is Mode.OFF:
            return replace(prepared, unplanned=Reason.OFF)
        if b"off" in self._client.our_header:
            return replace(prepared, unplanned=Reason.HEADER)
        prepared = await observing.chosen(self._caller, prepared, request, policy.offload)
        if self._caller.vouched and not prepared.observed:
            self._services.known.list_models(tenant, self._client.headers)
        return prepared

    async def _plan(self, prepared: Prepared) -> Prepared:
        """Return the request with its plan, or with the reason why it has none."""
        request = prepared.request
        policy = prepared.tenant.policy
        prepared = prepared.unrendered()
        if request is None or prepared.unplanned:
            return prepared
        try:
            planned = await plan(
                self._dialect,
                request,
                policy,
                self._versions.window(policy, request.model),
                self._services.reader,
                self._caller.key.namespace,
                refused=self._versions.too_long,
                pauses=None if prepared.observed else self._pauses,
            )
        except Unplannable as error:
            return replace(prepared, unplanned=error.reason)
        except Overloaded:
            if prepared.observed:  # it is not refused for want of a plan
                return replace(prepared, unplanned=Reason.BUSY)
            raise
        if planned is None:
            obstacle = request.obstacle_beside(policy.upstream.members)
            return replace(prepared, unplanned=Reason.FIELD, obstacle=obstacle)
        obstacle = ""
        if planned.whole_for_tool_choice:
            # The client's replies may hold the thinking of several rounds, which upstream takes
            # only as it was.
            if not prepared.observed and await rendering.hidden(self._caller, planned):
                planned = planned.unmoved()
            else:
                obstacle = "tool_choice"
        remark = self._services.known.remark(self._caller.owner, policy, request.model)
        return replace(prepared, planned=planned, obstacle=obstacle, remark=remark)

    async def _pauses(self, planned: Planned) -> Mapping[bytes, int]:
        caller = self._caller
        new = caller.vouched and not self._dialect.counts
        return await self._services.last_requests.pauses(planned, caller.records, new=new)

    # -- what upstream gets as it came, or not at all --

    async def _compacted(self, wish: Wish) -> bool:
        """Reply with a reference to a snapshot, if the client asks for that and the proxy serves
        it."""
        prepared = self.prepared
        self.prepared, reply = await compactions.serve(self._caller, prepared, wish, self._accepted)
        if reply is None:
            return False
        self._renew()
        await self._client.start(200, Headers([*reply.headers, *self._ours()]))
        await self._client.finish(reply.body)
        return True

    async def _accepted(self, prepared: Prepared) -> Prepared:
        self.prepared = prepared
        await self._vouch()
        return self.prepared

    async def _observe(self) -> None:
        """Record what the plan would have done to what passes through."""
        caller = self._caller
        self.prepared = await observing.foresee(caller, self.prepared)
        with observing.heard(self.prepared, self._services.hearing) as heard:
            await self._serve(heard)
        self.prepared = await observing.foresee(caller, self.prepared)

    # -- sending it --

    async def _send(self, prepared: Prepared, heard: int) -> None:
        """Have upstream answer the client. Raises a refusal, of which the client has seen
        nothing."""
        turn = prepared.turn
        rendered = prepared.rendered
        if turn is None or rendered is None:
            await self._send_untouched(prepared, heard)
            return
        rounds = Rounds(
            self._services,
            self._client,
            prepared,
            rendered,
            self._caller.records,
            self._on_accepted,
        )
        if self._dialect.counts:  # nothing is stored, asked for or learned
            async with aclosing(await rounds.send(turn.request())) as reply:
                if reply.status != 200:
                    raise await Refusal.read(reply)
                ours = headers(prepared)
                await pass_on(reply, self._client, ours, self._dialect.error_event)
            return
        taken_back = await converse(turn, self._client, rounds)
        self._versions.take(prepared, turn.spent.prompt, taken_back)

    async def _send_untouched(self, prepared: Prepared, heard: int = 0) -> None:
        """Send the client's bytes upstream and upstream's bytes back. Raises a refusal as `_send`
        does. A reply to an observed request of at most `heard` bytes is kept."""
        client = self._client
        without = prepared.without
        tenant = prepared.tenant
        relay = self._services.relay
        body = prepared.continued or prepared.shortened
        if body is None and Addition.THINKING in without and prepared.request:
            body = prepared.request.body
        if body is not None:
            request = relay.changed(
                client, tenant, body, self._dialect, without, first=not client.sent
            )
        else:
            request = relay.request(client, tenant, prepared.body)
            if client.sent:
                request = replace(request, headers=request.headers.without((IDEMPOTENCY_KEY,)))
        client.sent = client.sent or time.perf_counter()
        async with aclosing(await self._services.upstream.send(request)) as reply:
            read = b""
            if prepared.request is not None and reply.status in refusals.LONG_STATUSES:
                refusal = await Refusal.read(reply)
                if refusal.complete:
                    raise refusal
                read = refusal.body
            ends = self._ends(prepared, reply, heard)
            if 200 <= reply.status < 300:
                await self._on_accepted()
            watch = ends.take if ends else ignore
            await pass_on(reply, client, self._ours(), self._dialect.error_event, watch, read)
            if reply.status == 200:
                self._note_taken(prepared, usage.reported(ends.both) if ends else None)
                if ends and heard:
                    self.prepared = replace(self.prepared, reply=ends.all)

    def _ends(self, prepared: Prepared, reply: UpstreamReply, heard: int) -> ReplyEnds | None:
        """Return what finds upstream's count of the prompt in a reply that passes, if we use it, and
        keeps a reply of at most `heard` bytes."""
        if prepared.records_cost:
            return ReplyEnds(reply, heard)
        if prepared.planned is None or self._dialect.counts:
            return None
        # Servers that cut prompts do not compress, so nothing is decompressed for it.
        return None if reply.headers.has(b"content-encoding") else ReplyEnds(reply)

    def _note_taken(self, prepared: Prepared, said: Reported | None) -> None:
        """Learn from the reply to the client's own bytes, and from what it `said` of their cost."""
        if not prepared.observed:
            self._versions.take(prepared, said.prompt if said else 0)
        if said is not None and prepared.records_cost:
            self.prepared = replace(self.prepared, reported=said)

    def _ours(self) -> Sequence[Header]:
        """Return our headers for a reply. Whose request was not accepted does not learn what we
        found."""
        return headers(self.prepared) if self._caller.vouched else ()

    async def _pass_on(self, refusal: Refusal) -> None:
        """Show the client a refusal as upstream sent it."""
        if not refusal.complete:
            raise UpstreamBroken(
                f"Upstream's refusal ({refusal.status}) is too long, too slow or broken off"
            )
        await self._client.start(refusal.status, reply_headers(refusal.headers, self._ours()))
        await self._client.finish(refusal.body)

    async def _on_accepted(self) -> None:
        """Upstream has accepted the request: now it may leave behind what its client's next ones
        find."""
        await self._vouch()
        with logs.beside(logger, f"keeping what later requests need of {self._client.request_id}"):
            self._renew()
            if self.prepared.rendered is not None:
                self._keep_originals(self.prepared.rendered)

    async def _vouch(self) -> None:
        """Let upstream's acceptance vouch for the request's owner."""
        caller = self._caller
        if caller.vouched:
            return
        with logs.beside(logger, f"vouching for the owner of {self._client.request_id}"):
            caller.vouched = True
            self._versions.vouched()
            tenant = replace(self.prepared.tenant, namespace=caller.owner)
            self.prepared = prepared = replace(self.prepared, tenant=tenant)
            if not prepared.unplanned and not prepared.observed:
                self._services.known.list_models(tenant, self._client.headers)
            await rendering.summarise_later(caller, prepared)

    def _renew(self) -> None:
        """Let the ages of what the request uses by reference begin anew, in the background."""
        planned = self.prepared.planned
        brought = self.prepared.references
        quoted = planned.quoted if planned else frozenset()
        if brought.digests or quoted:
            records = self._caller.records
            name = f"{records.namespace}/renew {self._client.request_id}"
            self._services.background.start(name, partial(records.renew, brought, quoted))

    def _keep_originals(self, rendered: Rendered) -> None:
        """Store the moved texts in the background, for the caller's next conversations and for
        people."""
        caller = self._caller
        name = rendered.moves_name
        request = rendered.planned.request
        if not rendered.planned.policy.store_originals or caller.records.has_originals(name):
            return
        run = partial(caller.run, size=request.size)
        keep = partial(archive.keep, rendered, self._services.store, caller.owner, run)
        held = 2 * len(request.body)  # once as it came, and once as it was rendered
        self._services.background.start(f"{caller.owner}/{name}", keep, held)
