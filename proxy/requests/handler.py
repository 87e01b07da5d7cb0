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
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import TypeVar

from msgspec.structs import replace

from proxy.dialects import Dialect, for_model, model_in, refusals, usage
from proxy.dialects.beginnings import parsed
from proxy.dialects.render import put_back, shown_block
from proxy.dialects.request import GLANCE, glanced
from proxy.dialects.usage import Reported
from proxy.errors import ClientFault, OffloadError, Overloaded, UpstreamBroken
from proxy.plan.compacting import MARK, Compacting, Wish
from proxy.plan.recognise import Hidden
from proxy.plan.summary import SummaryAnswer
from proxy.plan.turn import Addition, Declined, Reason, Request, Unplannable
from proxy.policies.tenants import Tenant, identified
from proxy.policy import Mode, SnapshotRole
from proxy.requests import archive, observing, references
from proxy.requests.conversation import converse
from proxy.requests.exchange import Exchange
from proxy.requests.planned import Planned, Rendered, plan
from proxy.requests.prepared import Prepared, of_chat
from proxy.requests.records import Records, References
from proxy.requests.relay import IDEMPOTENCY_KEY, ReplyEnds, ignore, pass_on, served
from proxy.requests.rounds import Rounds, Services
from proxy.requests.summary_writer import ask
from proxy.requests.versions import Refusal, Versions
from proxy.telemetry import logs
from proxy.telemetry.outcome import Holdout, Kind, Outcome
from proxy.upstream.client import UpstreamReply
from proxy.upstream.codings import decoded_request
from proxy.upstream.headers import Header, Headers, reply_headers

T = TypeVar("T")

WRITING = 30.0
"""Seconds that a reply to a request for compaction waits for the store. Without its records it is
none."""

logger = logging.getLogger(__name__)
_without_identity = logs.Limited(logger)


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
        self._tenant = tenant
        self._owner = tenant  # whose records the request reads; it writes some only once `_vouched`
        # whether the owner's key is listed, or upstream has accepted the request
        self._vouched = True
        self._opened: Records | None = None
        self._versions = self._versions_of(tenant, tenant)
        self.prepared = Prepared(b"", tenant)

    async def answer(self) -> None:
        """Reply to the client. The body is whole here; if the client hangs up, all work for it
        ends."""
        body = await self._client.read(self._services.settings.body_limit)
        with self._client.present():
            self.prepared = self.prepared.unrendered(body=body)
            if await self._planned(body):
                return
            bug = self.prepared.unrendered(planned=None, unplanned=Reason.BUG, without=frozenset())
            self.prepared = replace(
                references.as_wished(bug, bug.wish) if bug.wish else bug, obstacle=""
            )
            await self._send_untouched(self.prepared)

    async def _planned(self, body: bytes) -> bool:
        """Reply to the client, by way of the stages. Returns False after a bug of ours before the
        reply: it costs the plan and not the reply, because what fails at one request of a
        conversation would fail at all later ones."""
        try:
            await self._staged(body)
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
            name = self._tenant.name
            logger.exception("a bug: request %s of %s is sent as it came", request, name)
            return False
        return True

    async def _staged(self, body: bytes) -> None:
        self.prepared = await self._parse(body)
        self.prepared = await self._plan(self.prepared)
        if self.prepared.wish is not None and await self._serve_wish(
            self.prepared, self.prepared.wish
        ):
            return
        if self.prepared.observed:
            await self._observe()
            return
        try:
            while not await self._sent():
                pass
        except Refusal as refusal:
            await self._pass_on(refusal)

    async def _sent(self) -> bool:
        """Send the next version and return whether upstream takes it. Raises the refusal that the
        client gets."""
        self.prepared = await self._render(self._versions.next(self.prepared))
        try:
            await self._send(self.prepared)
        except Refusal as refusal:
            if self._versions.refuse(self.prepared, refusal):
                self.prepared = await self._plan(self.prepared)
            return False
        return True

    def outcome(self) -> Outcome:
        """Return the outcome of the request so far."""
        if self._dialect.counts:  # what is counted is sent, and recorded, later
            return self._client.outcome(Kind.RELAY, self._tenant.name, self._tenant.namespace)
        if not self._vouched:  # then nobody may see what its records made of it
            self.prepared = self.prepared.unrendered()
        errors = self._opened.errors if self._opened else {}
        return of_chat(self.prepared, self._client, errors, self._versions.refused)

    def ended(self, outcome: Outcome) -> None:
        """Pass on the outcome of the whole request."""
        if self._vouched and not self._dialect.counts and 200 <= outcome.status < 300:
            miss, missed = self._services.last_requests.ended(outcome.namespace, self.prepared)
            outcome = replace(outcome, miss=miss, missed_tokens=missed)
        self._services.sink(outcome, self.prepared, self._client)

    # -- from the body to what is sent --

    async def _parse(self, body: bytes) -> Prepared:
        """Return the request with its policy, or with the reason why it cannot be read."""
        tenant = self._tenant
        if tenant.policy.may_be_off and (passing := await self._glanced(body)):
            return passing
        try:
            request = await self._read(body)
            tenant = self._identify(request)
            request, wish, brought = await self._restored(request)
        except ClientFault:
            return Prepared(body, tenant, unplanned=Reason.ENCODING)
        except Unplannable as error:
            return Prepared(body, tenant, unplanned=error.reason)
        if not request.model:
            request = replace(request, model=model_in(self._client.path))
        request, declined = await self._repeated(request)
        sent = request.body if wish or brought.digests else None
        prepared = Prepared(
            body, tenant, request, sent, wish=wish, declined=declined, references=brought
        )
        return await self._continued(await self._chosen(prepared, request), request)

    async def _glanced(self, body: bytes) -> Prepared | None:
        """Return the request with nothing read but its model, if the policy for that is off and
        nothing in the body is ours."""
        tenant = self._tenant
        ours = self._dialect.name in references.NATIVE and MARK in body
        if self._client.encoded or tenant.policy.identity.given or ours:
            return None
        glance = partial(glanced, body, self._dialect.refers)
        request = await self._run(glance, len(body) // GLANCE)
        if request is None:
            return None
        request = replace(request, model=request.model or model_in(self._client.path))
        policy = tenant.policy.for_model(request.model)
        if policy.offload.mode is not Mode.OFF:
            return None
        tenant = replace(tenant, policy=policy)
        return Prepared(body, tenant, request, unplanned=Reason.OFF)

    async def _read(self, body: bytes) -> Request:
        """Return the request that the body holds. Raises ClientFault and Unplannable."""
        client = self._client
        services = self._services
        if client.encoded:
            limit = services.settings.body_limit
            caller = self._tenant.namespace
            body = await decoded_request(
                body, client.headers, limit, services.threads, caller, client.hold
            )
        reader = self._services.reader
        known = reader.known(self._dialect, body, self._tenant.namespace)
        new = len(body) - len(known.text) if known else len(body)
        return await self._run(partial(parsed, self._dialect, body, known), new)

    async def _restored(self, request: Request) -> tuple[Request, Wish | None, References]:
        """Return the request with what its references stand for, the compaction that it asks for,
        and the references that were replaced."""
        if self._dialect.name not in references.NATIVE:
            return request, None, References()
        run = partial(self._run, size=request.size)
        parse = partial(self._services.reader.request, self._dialect, caller=self._tenant.namespace)
        return await references.read(
            self._dialect, self._client.path, request, self._records, run, parse
        )

    async def _chosen(self, prepared: Prepared, request: Request) -> Prepared:
        """Return the request with the policy for its model, and how that lets it be planned."""
        tenant = prepared.tenant
        header = self._client.our_header
        policy = tenant.policy.for_model(request.model)
        if policy.planning is not tenant.policy:
            tenant = replace(tenant, policy=policy.planning)
            prepared = replace(prepared, tenant=tenant)
        if policy.offload.mode is Mode.OFF:
            return replace(prepared, unplanned=Reason.OFF)
        if b"off" in header:
            return replace(prepared, unplanned=Reason.HEADER)
        if policy.offload.mode is Mode.OBSERVE or b"observe" in header:
            return replace(prepared, observed=True)
        group = partial(observing.holdout, self._dialect, request, policy.offload)
        holdout = await self._run(group, request.size) if policy.offload.holdout else Holdout.NONE
        prepared = replace(prepared, holdout=holdout, observed=holdout is Holdout.KEPT)
        if self._vouched and not prepared.observed:
            self._services.known.list_models(tenant, self._client.headers)
        return prepared

    async def _continued(self, prepared: Prepared, request: Request) -> Prepared:
        """Return the request that goes on from a reply upstream, from its last round if it had
        hidden ones."""
        if prepared.observed or not request.continues:
            return prepared
        last = await self._records.continuation(request.continues)
        return (
            replace(prepared, continued=self._dialect.continued(request, last))
            if last
            else prepared
        )

    async def _repeated(self, request: Request) -> tuple[Request, Declined | None]:
        """Return a request that repeats one for another model as one for the first model, so that
        it is planned and sent as that one was, and what is known of that."""
        declined = await self._records.declined(request.credit) if request.credit else None
        return (replace(request, model=declined.model) if declined else request), declined

    def _identify(self, request: Request) -> Tenant:
        """Find whose records the request uses, and return the tenant with the namespace to which it
        counts.

        Reads use the claimed identity. Anybody can claim one, so the request counts as its key's
        until upstream has accepted it.
        """
        tenant = self._tenant
        client = self._client
        if not tenant.policy.identity.given:
            return tenant
        headers = (
            client.headers
            if tenant.listed
            else self._services.relay.request(client, tenant, b"").headers
        )
        owner = identified(tenant, headers, request.members, client.target)
        if owner is None:
            _without_identity(
                tenant.name,
                f"{tenant.name}: a request does not say who it is by {tenant.policy.identity}; its key counts",
            )
            return tenant
        self._owner = owner
        self._vouched = tenant.listed
        left = owner if tenant.listed else tenant
        self._versions = self._versions_of(owner, left)
        return left

    def _versions_of(self, owner: Tenant, left: Tenant) -> Versions:
        services = self._services
        return Versions(
            services.known, services.refusals, self._dialect, owner.namespace, left.namespace
        )

    @property
    def _records(self) -> Records:
        """The owner's records. Most requests need none, so they are opened when something asks for
        them."""
        if self._opened is None:
            self._opened = Records(self._services.store.visit(), self._owner.namespace)
        return self._opened

    async def _plan(self, prepared: Prepared) -> Prepared:
        """Return the request with its plan, or with the reason why it has none."""
        request = prepared.request
        policy = prepared.tenant.policy
        prepared = prepared.unrendered()
        if request is None or prepared.unplanned:
            return prepared
        window = self._versions.window(policy, request.model)
        refused = self._versions.too_long
        reader = self._services.reader
        caller = self._tenant.namespace
        pauses = None if prepared.observed else self._pauses
        try:
            planned = await plan(
                self._dialect,
                request,
                policy,
                window,
                reader,
                caller,
                refused=refused,
                pauses=pauses,
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
            restores = not prepared.observed and await self._hidden(planned)
            planned, obstacle = (planned.unmoved(), "") if restores else (planned, "tool_choice")
        remark = self._versions.remark(policy, request.model)
        return replace(prepared, planned=planned, obstacle=obstacle, remark=remark)

    async def _pauses(self, planned: Planned) -> Mapping[bytes, int]:
        """Return at which of this history's requests upstream's cache had expired. Whoever sees a
        pause first records it, so that every later request plans with it, on any replica; without
        the record, it counts for none."""
        model = planned.request.model
        found = await self._records.pauses(planned.point_digests, model)
        if self._dialect.counts or not self._vouched or planned.last_point_digests[-1] in found:
            return found
        pause = self._services.last_requests.expired(self._owner.namespace, planned)
        return (
            found | await self._records.keep_pause(planned.last_point_digests[-1], model, pause)
            if pause
            else found
        )

    async def _render(self, prepared: Prepared) -> Prepared:
        """Return the request rendered to its plan; as it came if there is no plan or it changes
        nothing."""
        planned = prepared.planned
        without = prepared.without
        if planned is None or prepared.reason:
            return prepared
        size = planned.request.size
        if planned.may_change:
            if Addition.PLACE in without:
                planned = replace(planned, role=SnapshotRole.USER)
            if Addition.LOOSE in without:
                planned = replace(planned, strict=planned.among_strict)
            rendered = await self._rendered(prepared, planned)
            if rendered.changed:
                turn = await self._run(partial(rendered.turn, Addition.USAGE not in without), size)
                if prepared.declined is not None:
                    turn.resume(prepared.declined.before)
                return replace(prepared, planned=planned, rendered=rendered, turn=turn, uses=[])
        left = planned.reply_left(planned.history.tokens)
        if (
            left is None
            or prepared.continued is not None
            or planned.reply_limit(planned.history.tokens) is None
        ):
            return prepared
        if not planned.exceeds(refused=self._versions.too_long):
            return prepared
        shorten = partial(self._dialect.with_lower_limit, planned.request, left)
        return replace(prepared, shortened=await self._run(shorten, size))

    async def _rendered(self, prepared: Prepared, planned: Planned) -> Rendered:
        """Return the request with the records that its plan needs, as far as they exist and fit."""
        reader = self._services.reader
        summaries = self._services.summaries
        size = planned.request.size
        shown, rounds = await asyncio.gather(
            summaries.existing(planned, self._records), self._hidden(planned)
        )
        rendered = await self._run(partial(Rendered.of, planned, shown, rounds, reader), size)
        waits = summaries.waits(rendered)
        if not self._dialect.counts and (self._vouched or waits):
            rendered = await self._summarised(prepared, rendered, waits=waits)
        if rounds and not planned.room.holds(rendered.tokens):
            rendered = await self._run(partial(rendered.fitting, reader), size)
        return rendered

    async def _hidden(self, planned: Planned) -> Mapping[int, Hidden]:
        size = planned.request.size
        model = planned.request.model
        history = planned.history.stem or planned.history
        before = self._records.still_there(history.sought)
        replies = await self._run(partial(planned.replies, before.upto), size)
        found, sought = await self._records.rounds(replies, model, before)
        made = await self._run(
            partial(put_back, planned.dialect, model, planned.transcript, found), size
        )
        rounds = {**before.rounds, **made}
        if not self._records.unread:
            history.sought = sought.ending(min(sought.upto, len(history)), rounds)
        return rounds

    async def _summarised(self, prepared: Prepared, rendered: Rendered, *, waits: bool) -> Rendered:
        """Return the request with the snapshot that its plan needs, if it waits for it."""
        tenant = prepared.tenant
        without = prepared.without
        relay = self._services.relay

        async def summarise(body: bytes) -> SummaryAnswer:
            target = self._dialect.target(self._client.target)
            if other := tenant.policy.offload.compress.model:
                target = for_model(target, other)
            call = relay.changed(
                self._client, tenant, body, self._dialect, without, first=False, target=target
            )
            return await ask(self._services.upstream, call, self._dialect)

        return await self._services.summaries.complete(
            rendered, self._records, tenant, summarise, waits=waits
        )

    # -- compaction that the client asks for --

    async def _serve_wish(self, prepared: Prepared, wish: Wish) -> bool:
        """Reply with a reference to a snapshot if the client asks for all of its history to be
        compacted. Returns False if the request is to be sent: with the wish for upstream if that is
        to compact, else without it."""
        ours = references.compacts(prepared, self._dialect)
        whole = wish.kind is Compacting.WHOLE
        obstacle = ""
        if ours and whole and prepared.planned:
            obstacle = await self._compact_all(prepared, prepared.planned, wish.came)
            if not obstacle:
                return True
        if not ours or whole:
            self.prepared = references.as_wished(prepared, wish, obstacle)
        return False

    async def _compact_all(self, prepared: Prepared, planned: Planned, came: Request) -> str:
        """Reply with a reference to a snapshot of the whole history. Returns the obstacle instead
        if there can be none: the client drops its history, so all that stands behind the reference
        has to be in the store before."""
        if not planned.policy.store_originals:
            return "store_originals"
        summaries = self._services.summaries
        reader = self._services.reader
        size = planned.request.size
        cut = planned.cut()
        shown = await summaries.existing(cut if self._vouched else planned, self._records)
        rendered = await self._run(
            partial(Rendered.of, cut, shown, await self._hidden(planned), reader), size
        )
        rendered = await self._summarised(prepared, rendered, waits=True)
        if rendered.shown is None or rendered.shown.boundary != cut.plan.boundaries[-1]:
            return "compact"
        self.prepared = replace(prepared, planned=cut, rendered=rendered)
        await self._vouch()  # the summary's call was accepted
        await summaries.existing(cut, self._records)  # it is used
        text = shown_block(cut.transcript, rendered.shown)
        digest = await self._compaction_stored(rendered, text)
        if not digest:
            return "unstored"
        self._renew()
        reply = partial(
            references.reply_to_wish, planned, came, self._client.path, text, digest, reader
        )
        head, body = await self._run(reply, size)
        await self._client.start(200, Headers([*head, *self._ours()]))
        await self._client.finish(body)
        return ""

    async def _compaction_stored(self, rendered: Rendered, text: str) -> str:
        """Store the moved texts, and then the snapshot's `text` with the names of all that stands
        behind it: of the references that it replaces, too. Returns the digest once the store has it
        all, else an empty string."""
        run = partial(self._run, size=rendered.planned.request.size)
        records = self._records
        with suppress(TimeoutError):
            async with asyncio.timeout(WRITING):
                if await archive.keep(
                    rendered, self._services.store, records.namespace, run, sure=True
                ):
                    files = await run(lambda: rendered.files().described())
                    return await records.keep_compaction(
                        text, {**self.prepared.references.files, **files}
                    )
        return ""

    # -- sending it --

    async def _send(self, prepared: Prepared) -> None:
        """Have upstream answer the client. Raises a refusal, of which the client has seen
        nothing."""
        turn = prepared.turn
        rendered = prepared.rendered
        if turn is None or rendered is None:
            await self._send_untouched(prepared)
            return
        rounds = Rounds(
            self._services, self._client, prepared, rendered, self._records, self._on_accepted
        )
        if self._dialect.counts:  # nothing is stored, asked for or learned
            async with aclosing(await rounds.send(turn.request())) as reply:
                if reply.status != 200:
                    raise await Refusal.read(reply)
                await pass_on(reply, self._client, prepared.headers(), self._dialect.error_event)
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
        planned = prepared.planned
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
            if (
                reply.status >= 400
                and not prepared.observed
                and planned is not None
                and reply.status in refusals.LONG_STATUSES
            ):
                refusal = await Refusal.read(reply)
                if refusal.whole:
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

    async def _observe(self) -> None:
        """Record what the plan would have done to what passes through."""
        threads = self._services.threads
        self.prepared = await observing.foresee(self.prepared, threads)
        with observing.heard(self.prepared, self._services.hearing) as heard:
            await self._send_untouched(self.prepared, heard)
        self.prepared = await observing.foresee(self.prepared, threads)

    def _ours(self) -> Sequence[Header]:
        """Return our headers for a reply. Whose request was not accepted does not learn what we
        found."""
        return self.prepared.headers() if self._vouched else ()

    async def _pass_on(self, refusal: Refusal) -> None:
        """Show the client a refusal as upstream sent it."""
        if not refusal.whole:
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

    def _renew(self) -> None:
        """Let the ages of what the request uses by reference begin anew, in the background."""
        planned = self.prepared.planned
        brought = self.prepared.references
        quoted = planned.quoted if planned else frozenset()
        if brought.digests or quoted:
            name = f"{self._records.namespace}/renew {self._client.request_id}"
            self._services.background.start(name, partial(self._records.renew, brought, quoted))

    async def _vouch(self) -> None:
        """Let upstream's acceptance vouch for the request's owner."""
        if self._vouched:
            return
        with logs.beside(logger, f"vouching for the owner of {self._client.request_id}"):
            self._vouched = True
            self._versions.vouched()
            tenant = replace(self.prepared.tenant, namespace=self._owner.namespace)
            self.prepared = prepared = replace(self.prepared, tenant=tenant)
            if not prepared.unplanned and not prepared.observed:
                self._services.known.list_models(tenant, self._client.headers)
            rendered = prepared.rendered
            if rendered is not None and rendered.planned.plan.boundaries:
                await self._summarised(prepared, rendered, waits=False)

    def _keep_originals(self, rendered: Rendered) -> None:
        """Store the moved texts in the background, for the caller's next conversations and for
        people."""
        namespace = self._owner.namespace
        name = rendered.moves_name
        request = rendered.planned.request
        if not rendered.planned.policy.store_originals or self._records.has_originals(name):
            return
        keep = partial(
            archive.keep,
            rendered,
            self._services.store,
            namespace,
            partial(self._run, size=request.size),
        )
        held = 2 * len(request.body)  # once as it came, and once as it was rendered
        self._services.background.start(f"{namespace}/{name}", keep, held)

    async def _run(self, work: Callable[[], T], size: int) -> T:
        """Return the result of `work`, which looks through so many bytes."""
        return await self._services.threads.run(self._tenant.namespace, work, size)
