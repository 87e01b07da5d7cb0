"""The I/O of a turn: it sends requests upstream, answers calls of our tools, and stores hidden rounds."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import msgspec

from proxy import regex
from proxy.dialects import Dialect, refusals
from proxy.dialects.files import Files
from proxy.dialects.turn import Turn
from proxy.plan.history import ToolCall, extend
from proxy.plan.recognition import Visible
from proxy.plan.refusals import Addition, Verdict
from proxy.plan.summary import SummaryAnswer
from proxy.plan.turn import HiddenRound
from proxy.policy import ArchiveUse
from proxy.regex import Budget, sliced
from proxy.requests import tool_loop
from proxy.requests.archive import Archive
from proxy.requests.prepare import PlannedRequest, RenderedRequest
from proxy.requests.records import Records
from proxy.telemetry.outcome import ToolUse
from proxy.tools import answer as tools
from proxy.upstream.headers import Header, Headers

T = TypeVar("T")

if TYPE_CHECKING:
    from proxy.policies.tenants import Tenant
    from proxy.requests.exchange import Exchange
    from proxy.requests.services import Services
    from proxy.upstream.client import UpstreamClient, UpstreamReply, UpstreamRequest

REWRITTEN = (b"content-length", b"content-encoding", b"accept-encoding")
IDEMPOTENCY_KEY = b"idempotency-key"
ANOTHER = (*REWRITTEN, IDEMPOTENCY_KEY)
"""Headers that a second body must not have: upstream would take its idempotency key for the first body's."""


class RequestTurnIO:
    """The I/O of one request. `ready` is the request to send; `searching` limits the time of all its searches."""

    def __init__(
        self,
        services: Services,
        client: Exchange,
        tenant: Tenant,
        ready: RenderedRequest,
        records: Records,
        ours: Callable[[], Sequence[Header]],
        accepted: Callable[[], Awaitable[None]],
        searching: Budget,
        without: frozenset[Addition] = frozenset(),
    ) -> None:
        self._services = services
        self._client = client
        self._tenant = tenant
        self._ready = ready
        self._records = records
        self._ours = ours
        self._accepted = accepted
        self._searching = searching
        self._without = without
        self._files: Files | None = None
        self._kept: Mapping[str, tuple[str, bytes]] | None = None  # what the caller's last conversations moved
        self.uses: list[ToolUse] = []
        """The calls of our tools so far, as the outcome reports them."""
        self._answered: set[tuple[str | bytes, ...]] = set()  # what each call asked for that got a whole answer

    @property
    def _history(self) -> PlannedRequest:
        return self._ready.history

    @property
    def own_fits(self) -> bool:
        """Whether the client's own request fits the window as far as that is known."""
        return self._history.room.holds(self._history.tokens)

    def is_final(self, refusal: tool_loop.Refusal) -> bool:
        """Whether upstream refuses the client's own request, too: for its limits, the credentials or the like."""
        return self._history.dialect.complaint(refusal.status, refusal.said()) is Verdict.FINAL

    async def send(self, body: bytes) -> UpstreamReply:
        """Send a rewritten body to the same address with the same headers. Raises UpstreamFault."""
        first = self._client.sent is None
        self._client.sent = self._client.sent or time.perf_counter()
        return await self._services.upstream.send(self._request(body, REWRITTEN if first else ANOTHER))

    def _request(self, body: bytes, dropped: Collection[bytes]) -> UpstreamRequest:
        request = rewritten(self._services.relay.request(self._client, self._tenant, body), body, dropped)
        return forgiving(request, self._history.dialect, self._without)

    def headers(self, turn: Turn) -> Sequence[Header]:
        """Return our headers. For a reply that is not a stream, they include the number of hidden rounds."""
        whole = not self._history.request.stream
        return [*self._ours(), (b"x-offload-rounds", b"%d" % turn.rounds)] if whole else self._ours()

    async def aside(self, work: Callable[[], T]) -> T:
        """Run work on upstream's reply in a thread, so that it does not block the event loop."""
        return await self._services.threads.run(self._tenant.namespace, work, begun=True)

    async def accepted(self) -> None:
        """Upstream has answered the first round: it accepts the request and its credentials."""
        await self._accepted()

    # -- our tools --

    async def resolve(self, calls: Sequence[ToolCall]) -> list[tools.ToolAnswer]:
        """Answer the calls in order. Each call gets an equal share of the tokens that the turn may still read."""
        if self._files is None:
            reading = self._services.threads  # a long history has thousands of files
            self._files = await reading.run(self._tenant.namespace, self._ready.files, begun=True)
        limits = self._history.policy.tools
        first = calls[: limits.max_calls]
        left = max(0, self._budget())
        share = min(limits.max_answer_tokens, left // len(first))
        answers: list[tools.ToolAnswer] = []
        try:
            for call in first:
                answers.append(await self._answer(call, self._files, min(share, left), left))
                left -= answers[-1].tokens
        finally:
            self._files.forget()
        self.uses += answers_used(first, answers, self._history.names)
        if rest := calls[limits.max_calls :]:
            too_many = tools.too_many(limits.max_calls, self._count)
            self.uses += refused_uses(rest, too_many, self._history.names)
            answers += [too_many] * len(rest)
        return answers

    def _budget(self) -> int:
        read = sum(use.tokens for use in self.uses)
        left = self._history.policy.tools.max_retrieved_tokens - read
        room = self._history.room
        return left if room.window is None else min(left, room.left(self._ready.tokens + read))

    async def _answer(self, call: ToolCall, files: Files, budget: int, left: int) -> tools.ToolAnswer:
        """Answer a call. The same call again, however it names the file, gets a line that points to the first answer,
        so that no model goes in circles."""
        names, reading = self._history.names, self._services.threads
        meaning = partial(tools.meaning, _tool(call, names), call.arguments, files.index, names)
        asked = await reading.run(self._tenant.namespace, meaning, begun=True)
        if asked in self._answered:
            return tools.repeated(self._count)
        recalled = await self._recalled(call, files)
        if recalled is None:
            return tools.gone(tools.asks_for(_tool(call, names), call.arguments, names), self._count)
        if not recalled and self._history.quoted:
            return tools.elsewhere(sorted(self._history.quoted), self._history.policy.offload.store_dir, self._count)
        answer = await self._found(call, recalled, budget, left)
        if answer.result in ("ok", "empty"):
            self._answered.add(asked)
        return answer

    async def _recalled(self, call: ToolCall, files: Files) -> Files | None:
        """Return the files that a call is about; None if what it names is not kept.

        These are this request's. A call that names a file which the request quotes in full and does not have is about
        one of the caller's earlier conversations, and a search without a path may go through the last of them. Callers
        without a key are many, so they have none.
        """
        path = tools.asks_for(_tool(call, self._history.names), call.arguments, self._history.names)
        store_dir = self._history.policy.offload.store_dir
        earlier = [name for name in self._history.quoted if f"{store_dir}/{name}" not in files]
        kept = await self._kept_of_others()
        if kept and _tool(call, self._history.names) == "grep" and path.strip("/ ") in ("", store_dir.strip("/")):
            return files.beside(kept, store_dir)
        earlier += [name for name in kept if f"{store_dir}/{name}" not in files]
        name = next((name for name in sorted(earlier) if name.removesuffix(".txt") in path), None)
        if name is None:
            return files
        text = None if self._tenant.anonymous else await self._records.original(name)
        return None if text is None else files.recalled(f"{store_dir}/{name}", text, store_dir)

    async def _kept_of_others(self) -> Mapping[str, tuple[str, bytes]]:
        """Return what the caller's last conversations moved, if the policy lets the model search it."""
        if self._history.policy.tools.archive is not ArchiveUse.SEARCH or self._tenant.anonymous:
            return {}
        if self._kept is None:
            self._kept = await Archive(self._services.store.visit(), self._tenant.namespace).last()
        return self._kept

    async def _found(self, call: ToolCall, files: Files, budget: int, left: int) -> tools.ToolAnswer:
        names, threads = self._history.names, self._services.threads
        tool = _tool(call, names)
        material = tools.Material(
            files,
            files.index,
            self._history.policy.offload.store_dir,
            budget,
            self._count,
            lambda pattern: regex.compile(pattern, self._searching),
            names,
            max(left, 0),
            files.media,
        )
        steps = tools.answering(tool, call.arguments, material)
        if tool == "grep":
            return await sliced(threads, self._tenant.namespace, steps, self._searching)
        return await sliced(threads, self._tenant.namespace, steps, Budget(math.inf))

    def _count(self, text: str) -> int:
        return self._services.reader.count(text, self._history.request.model)

    # -- hidden rounds --

    async def remember(self, turn: Turn) -> None:
        """Store the hidden rounds under the digest of the history that ends with the visible reply."""
        if continuation := turn.continuation:
            await self._records.keep_continuation(continuation)
        hidden, model = turn.hidden, self._history.request.model
        if hidden is None:
            await self._records.contest(self._history.chain[-1], model, lambda: self.aside(partial(_visible, turn)))
            return
        link, visible, sizes = await self.aside(partial(self._measured, turn, hidden))
        counted = msgspec.structs.replace(hidden, tokens=sum(sizes), sizes=sizes)
        places = {*self._history.befores(), *self._history.coming(visible).anchors()}
        await self._records.remember(link, model, counted, places, visible, self.aside)

    def _measured(self, turn: Turn, hidden: HiddenRound) -> tuple[bytes, Visible, tuple[int, ...]]:
        """Return the digest of the history that ends with the reply, the reply, and the tokens of what it hid."""
        visible = turn.visible
        dialect, reading = self._history.dialect, self._history.reading
        sizes = tuple(dialect.read(raw, reading, self._count).tokens for raw in (*hidden.before, *hidden.after))
        link = extend(self._history.chain[-1], dialect.reply_meaning(*visible))
        return link, Visible.of(*visible), sizes

    # -- summaries --

    async def ask(self, body: bytes) -> SummaryAnswer:
        """Make a summary call with the request's own upstream and credentials. Raises UpstreamFault."""
        return await ask(self._services.upstream, self._request(body, ANOTHER), self._history.dialect)


def _visible(turn: Turn) -> Visible:
    return Visible.of(*turn.visible)


def rewritten(request: UpstreamRequest, body: bytes, dropped: Collection[bytes]) -> UpstreamRequest:
    """Return the client's own request with another body and without the headers in `dropped`."""
    kept = request.headers.without(dropped)
    headers = Headers((*kept, (b"accept-encoding", b"identity"), (b"content-length", b"%d" % len(body))))
    return msgspec.structs.replace(request, content=body, headers=headers)


def forgiving(request: UpstreamRequest, dialect: Dialect, without: frozenset[Addition]) -> UpstreamRequest:
    """Return the request so that upstream drops the thinking that it would refuse, if it is to be sent without."""
    if Addition.THINKING not in without or not isinstance(request.content, bytes) or not request.content:
        return request
    body, headers = dialect.forgiving(request.content, request.headers)
    return rewritten(msgspec.structs.replace(request, headers=Headers(headers)), body, REWRITTEN)


async def ask(upstream: UpstreamClient, request: UpstreamRequest, dialect: Dialect) -> SummaryAnswer:
    """Send a summary call and return the answer. Raises UpstreamFault."""
    answer = await _answer(upstream, request, dialect)
    if answer.again is None or not isinstance(request.content, bytes):
        return answer
    return await _answer(upstream, rewritten(request, answer.again(request.content), REWRITTEN), dialect)


async def _answer(upstream: UpstreamClient, request: UpstreamRequest, dialect: Dialect) -> SummaryAnswer:
    async with aclosing(await upstream.send(request)) as reply:
        said = await tool_loop.body(reply)
        answer = dialect.summary_answer(reply.status, said)
        if answer.text or answer.too_long or (reply.status == 200 and not refusals.is_error(said)):
            return answer
        return msgspec.structs.replace(answer, refused=dialect.complaint(reply.status, said) is not Verdict.FINAL)


def answers_used(
    calls: Sequence[ToolCall], answers: Sequence[tools.ToolAnswer], names: tuple[str, str]
) -> list[ToolUse]:
    """Return the calls and their answers as the outcome reports them."""
    return [
        ToolUse(_tool(call, names), answer.result, answer.tokens) for call, answer in zip(calls, answers, strict=True)
    ]


def refused_uses(calls: Sequence[ToolCall], answer: tools.ToolAnswer, names: tuple[str, str]) -> list[ToolUse]:
    """Return the calls that all got this one answer, as the outcome reports them."""
    numbers = Counter(_tool(call, names) for call in calls)
    return [ToolUse(tool, answer.result, number * answer.tokens, number) for tool, number in numbers.items()]


def _tool(call: ToolCall, names: tuple[str, str]) -> tools.Tool:
    """Return which of our two tools the call is for."""
    return "grep" if call.name == names[0] else "read_file"
