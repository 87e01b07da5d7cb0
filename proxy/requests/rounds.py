"""What a process's requests share, and what the rounds of one request need of it: upstream, the
answers to calls of our tools, and the records.

The answers are read from the files of the request itself, from the records of texts that it quotes,
and, if the policy says so, from what the caller's last conversations moved.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Protocol, TypeVar

from msgspec.structs import replace

from proxy import regex
from proxy.dialects.render import Files
from proxy.dialects.turn import Turn
from proxy.errors import StoreFault
from proxy.plan.plan import ToolCall
from proxy.plan.preview import names_in, unescaped
from proxy.plan.recognise import Visible
from proxy.plan.turn import Declined, Unplannable, Verdict
from proxy.policy import ArchiveUse
from proxy.rawjson import NotJson
from proxy.regex import Budget
from proxy.requests import outcomes
from proxy.requests.archive import Archive
from proxy.requests.cache import MessageCache
from proxy.requests.exchange import Exchange
from proxy.requests.planned import Rendered, named
from proxy.requests.prepared import Prepared
from proxy.requests.records import Records
from proxy.requests.relay import Relay
from proxy.requests.summaries import Summaries
from proxy.requests.upstream_caches import LastRequests
from proxy.requests.versions import Refusal, Refusals
from proxy.requests.windows import Known
from proxy.settings import Settings
from proxy.stores.guarded import Guarded
from proxy.telemetry import logs
from proxy.telemetry.outcome import Outcome, ToolUse
from proxy.threads import NEW, Background, WorkPool
from proxy.tools import answer as tools
from proxy.tools.answer import ToolAnswer
from proxy.tools.definitions import Tool, brief, parsed
from proxy.upstream.client import UpstreamClient, UpstreamReply
from proxy.upstream.headers import Header

T = TypeVar("T")

logger = logging.getLogger(__name__)

READING = 10.0
READ_AT_ONCE = 16
BEHIND_CHARS = 32 << 20
"""Seconds that one call may wait for texts behind references, how many are read at once, and about
how many characters of them one request holds."""
NAMED = 4
"""The most names of files in a call's path that are looked for in the request, and the most texts of
earlier conversations that are read for it."""


def _decoded(values: Mapping[str, bytes]) -> dict[str, str]:
    return {name: value.decode("utf-8", "surrogatepass") for name, value in values.items()}


class Sink(Protocol):
    """Gets the outcome of every request, and of a chat what was made of it, and its client."""

    def __call__(
        self, outcome: Outcome, prepared: Prepared | None = None, client: Exchange | None = None, /
    ) -> None: ...


@dataclass(frozen=True)
class Services:
    """What all requests of a process share: `reader` measures histories, `known` is what upstreams
    have shown, `refusals` what they refused, and `sink` gets all outcomes."""

    settings: Settings
    upstream: UpstreamClient
    relay: Relay
    store: Guarded
    reader: MessageCache
    summaries: Summaries
    background: Background
    threads: WorkPool
    known: Known
    sink: Sink
    refusals: Refusals = field(default_factory=Refusals)
    last_requests: LastRequests = field(default_factory=LastRequests)
    hearing: set[str] = field(default_factory=set)
    """The tenants of which a reply is being kept, to be compared."""


class Rounds:
    """`rendered` is the request that is sent. The calls of our tools are added to `prepared.uses`,
    as the outcome reports them."""

    def __init__(
        self,
        services: Services,
        client: Exchange,
        prepared: Prepared,
        rendered: Rendered,
        records: Records,
        on_accepted: Callable[[], Awaitable[None]],
    ) -> None:
        self.on_accepted = on_accepted
        """Called once upstream has begun to answer, and so accepted the request and its
        credentials."""
        self._services = services
        self._client = client
        self._prepared = prepared
        self._rendered = rendered
        self._planned = rendered.planned
        self._records = records
        self._count = services.reader.counter(rendered.planned.request.model)
        self._files: Files | None = None
        # what the caller's last conversations moved
        self._archived: Mapping[str, tuple[str, bytes]] | None = None
        # paths of the texts behind references, which the store has, to their names
        self._outside: dict[str, str] = {}
        self._behind: dict[str, str] = {}  # those of them that were read by now, by their names
        self._gone: set[str] = set()  # the names of those that are no longer there
        self._unread = False  # whether the store failed to read some
        # what each call asked for that got a whole answer
        self._answered: set[tuple[object, ...]] = set()
        self._newest: set[tuple[object, ...]] = set()  # those of the newest round

    @property
    def size(self) -> int:
        """The bytes that building a request looks through."""
        return self._planned.request.size

    @property
    def own_fits(self) -> bool:
        """Whether the client's own request fits the window as far as that is known, so that it may
        be sent."""
        return self._planned.room.holds(self._planned.history.tokens)

    def is_final(self, refusal: Refusal) -> bool:
        """Whether upstream refuses the client's own request, too: for its limits, the credentials
        or the like."""
        return (
            self._planned.dialect.complaint(refusal.status, refusal.error_body()) is Verdict.FINAL
        )

    async def send(self, body: bytes) -> UpstreamReply:
        """Send one round's request and return the reply. Raises UpstreamFault if there is none."""
        client = self._client
        prepared = self._prepared
        first = self._client.sent is None
        changed = self._services.relay.changed
        request = changed(
            client, prepared.tenant, body, self._planned.dialect, prepared.without, first=first
        )
        client.sent = client.sent or time.perf_counter()
        return await self._services.upstream.send(request)

    def headers(self, turn: Turn) -> Sequence[Header]:
        """Return our headers for the client's reply. One that is no stream is told the number of
        hidden rounds."""
        ours = outcomes.headers(self._prepared)
        return (
            ours
            if self._planned.request.stream
            else [*ours, (b"x-offload-rounds", b"%d" % turn.rounds)]
        )

    async def aside(self, work: Callable[[], T], size: float = math.inf) -> T:
        """Return the result of work for a reply that has begun, which looks through so many
        bytes."""
        return await self._services.threads.run(
            self._prepared.tenant.namespace, work, size, begun=True
        )

    # -- what the reply hides --

    async def remember(self, turn: Turn) -> None:
        """Record what the finished turn hid, under the digest of the history that ends with the
        visible reply. The client's reply ends only afterwards. A reply that no history could hold
        is not recorded."""
        doing = f"recording what request {self._client.request_id} hid"
        with logs.beside(logger, doing), suppress(NotJson, Unplannable):
            await self._remember(turn)

    async def _remember(self, turn: Turn) -> None:
        if continuation := turn.continuation:
            await self._records.keep_continuation(continuation)
        planned = self._planned
        hidden = turn.hidden
        dialect = planned.dialect
        model = planned.request.model
        if turn.credit:
            await self._records.keep_declined(turn.credit, Declined(model, tuple(turn.before)))

        def coming() -> tuple[Visible, set[bytes]]:
            reply = planned.coming(*turn.visible)
            return reply.visible(), {reply.link, *planned.befores(), *reply.anchors()}

        if hidden is None:
            visible, places = await self.aside(coming, self.size)
            await self._records.contest(places, visible)
            return
        raws = (*hidden.before, *hidden.after)

        def measured() -> tuple[int, ...]:
            return tuple(dialect.read(raw, planned.reading, self._count).tokens for raw in raws)

        new = NEW * sum(len(memoryview(raw)) for raw in raws)
        sizes = await self.aside(measured, max(new, self.size))
        visible, places = await self.aside(coming, self.size)
        counted = replace(hidden, sizes=sizes, api=dialect.name, model=model)
        await self._records.remember(counted, places, visible)

    # -- calls of our tools --

    async def resolve(self, calls: Sequence[ToolCall]) -> list[ToolAnswer]:
        """Answer calls of our tools, in order. Each gets an equal share of the tokens that the turn
        may still read."""
        limits = self._planned.policy.tools
        room = self._planned.room
        uses = self._prepared.uses
        if self._files is None:  # a long history has thousands
            self._files = await self._all_files()
        self._newest = set()
        first = calls[: limits.max_calls]
        rest = calls[limits.max_calls :]
        read = sum(use.tokens for use in uses)
        left = limits.max_retrieved_tokens - read
        if room.window is not None:
            left = min(left, room.left(self._rendered.tokens + read))
        left = max(left, 0)
        share = min(limits.max_answer_tokens, left // len(first))
        answers = list[ToolAnswer]()
        for call in first:
            answers.append(await self._answer(call, self._files, min(share, left), max(left, 0)))
            left -= answers[-1].tokens
        for call, answer in zip(first, answers, strict=True):
            uses.append(ToolUse(self._tool(call), answer.result, answer.tokens))
        if rest:
            too_many = ToolAnswer.of(
                tools.TOO_MANY.format(most=limits.max_calls), "refused", self._count
            )
            for tool, number in Counter(map(self._tool, rest)).items():
                uses.append(ToolUse(tool, too_many.result, number * too_many.tokens, number))
            answers += [too_many] * len(rest)
        return answers

    def _tool(self, call: ToolCall) -> Tool:
        return "grep" if call.name == self._planned.names[0] else "read_file"

    @cached_property
    def _searching(self) -> Budget:
        return Budget(self._planned.policy.tools.max_search_seconds)

    async def _answer(self, call: ToolCall, files: Files, budget: int, left: int) -> ToolAnswer:
        """Answer a call. The same call again, however it names the file, gets a line that points to
        the first answer, so that no model goes in circles."""
        tool = self._tool(call)
        planned = self._planned
        count = self._count
        given = parsed(tool, call.arguments, planned.names)
        reached: Files | None = files
        if self._outside:
            reached, note = await self._reached(tool, given.path, files)
            given = replace(given, note=given.note + note)
        found: Files | None = None
        if reached is not None:
            found, note = await self._files_for(tool, given.path, reached)
            given = replace(given, note=given.note + note)
        if found is None:
            words = tools.UNREAD if self._unread or self._records.unread else tools.GONE
            path = brief(given.path) or planned.policy.offload.store_dir
            return ToolAnswer.of(words.format(path=path), "empty", count)
        if not found and planned.quoted:
            quoted = tools.elsewhere(sorted(planned.quoted), planned.policy.offload.store_dir)
            return ToolAnswer.of(quoted, "empty", count)
        # by the files that the call is about: an earlier conversation's may be called alike
        meant = await self.aside(partial(tools.meaning, given, found.index), self.size)
        if meant in self._answered:
            return ToolAnswer.of(tools.REPEATED, "empty", count)
        compiled = partial(regex.compile, budget=self._searching)
        media = found.media
        material = tools.Material(
            found, found.index, budget, count, compiled, planned.names, left, media
        )
        answer = await self.aside(lambda: tools.answer(given, material))
        if answer.result in ("ok", "empty"):
            self._answered.add(meant)
            self._newest.add(meant)
        return answer

    def forget_answers(self) -> None:
        """Let the calls of the newest round count as not answered: their answers were too long
        together, and the model may ask for each alone."""
        self._answered -= self._newest

    async def _all_files(self) -> Files:
        """Return this request's files, and those behind its references, of which no text is read
        yet."""
        ours = await self.aside(self._rendered.files, self.size)
        behind = self._prepared.references.files
        if not behind:
            return ours
        store_dir = self._planned.policy.offload.store_dir
        paths = {f"{store_dir}/{name}": name for name in behind}
        self._outside = {path: name for path, name in paths.items() if path not in ours}
        return ours.after(behind, self._behind)

    async def _reached(self, tool: Tool, path: str, files: Files) -> tuple[Files | None, str]:
        """Read what a call for this path needs of the texts behind references: a file, or for a
        search all of them, as far as there is room. Returns the files for the answer, and a line
        about those that a search leaves out; None if all that the path means cannot be read."""
        meant = await self.aside(lambda: files.index.find(path))
        if tool == "grep":
            chosen = set(meant)
            wanted = [*meant, *(other for other in reversed(self._outside) if other not in chosen)]
        else:
            wanted = meant if len(meant) == 1 else []
        await self._read_behind([self._outside[one] for one in wanted if one in self._outside])
        unread = {one: name for one, name in self._outside.items() if name not in self._behind}
        if meant and wanted and unread.keys() >= set(meant):
            return None, ""
        if tool != "grep":
            return files, ""
        left = len(unread.keys()) - len(self._gone)
        words = tools.UNREACHED if self._unread else tools.UNSEARCHED
        return files.without(unread), words.format(number=left) if left else ""

    async def _read_behind(self, names: Sequence[str]) -> None:
        """Read these texts behind references, unless they are read or gone."""
        archive = Archive(self._services.store.visit(READING), self._records.namespace, self.aside)
        left = [name for name in names if name not in self._behind and name not in self._gone]
        size = sum(map(len, self._behind.values()))
        for at in range(0, len(left), READ_AT_ONCE):
            if size > BEHIND_CHARS and len(names) > 1:
                return
            part = left[at : at + READ_AT_ONCE]
            try:
                values = await archive.read_many(part)
            except StoreFault:
                self._unread = True
                return
            there = {
                name: value for name, value in zip(part, values, strict=True) if value is not None
            }
            self._gone.update(name for name in part if name not in there)
            texts = await self.aside(partial(_decoded, there))
            self._behind.update(texts)
            size += sum(map(len, texts.values()))

    async def _files_for(self, tool: Tool, path: str, files: Files) -> tuple[Files | None, str]:
        """Return the files that a call for this path is about, and a line about those that a search
        leaves out; None if what it names is not kept.

        These are this request's. A call that names files which the request quotes in full and does
        not have is about the caller's earlier conversations, and a search without a path may go
        through the last of them, if the policy says so. Callers without a key are many, so they
        have none, and an identity for which no listed key vouches opens only what the request
        names.
        """
        tenant = self._prepared.tenant
        store_dir = self._planned.policy.offload.store_dir
        records = self._records
        searched = (
            self._planned.policy.tools.archive is ArchiveUse.SEARCH
            and tenant.namespace == records.namespace
        )
        if searched and not tenant.anonymous and self._archived is None:
            self._archived = await Archive(
                self._services.store.visit(), records.namespace, self.aside
            ).last()
        kept = self._archived or {}
        path = unescaped(path)
        if (
            kept
            and tool == "grep"
            and path.removesuffix(".txt").strip("/ *") in ("", store_dir.strip("/"))
        ):
            return files.beside(kept), ""
        names = sorted(names_in(path.encode("utf-8", "replace")))
        asked = [name for name in names if f"{store_dir}/{name}" not in files][:NAMED]
        # the request may quote a name without our folder
        quoted = named(self._planned.history, self._planned.request) if asked else frozenset()
        asked = [name for name in asked if name in quoted]
        earlier = sorted(
            name
            for name in {*self._planned.quoted, *asked, *kept}
            if f"{store_dir}/{name}" not in files
        )
        meant = [name for name in earlier if name.removesuffix(".txt") in path]
        if not meant:
            return files, ""
        if tenant.anonymous:
            return None, ""
        texts = dict[str, str]()
        for name in meant[:NAMED]:
            if (text := await records.original(name)) is not None:
                texts[f"{store_dir}/{name}"] = text
        left = len(meant) - len(texts) if tool == "grep" else 0
        note = tools.UNSEARCHED.format(number=left) if left else ""
        return files.recalled(texts) if texts else None, note
