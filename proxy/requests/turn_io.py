"""What a turn needs of the world: upstream to ask, our tools to answer, the store to remember."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING

import msgspec

from proxy import regex
from proxy.core.history import ToolCall, extend
from proxy.core.retrieval import tools
from proxy.dialects.chat.files import Files
from proxy.dialects.chat.messages import reply_meaning
from proxy.dialects.chat.render import HiddenRound
from proxy.dialects.chat.turn import ChatTurn
from proxy.regex import Budget, sliced
from proxy.requests import tool_loop
from proxy.requests.prepare import PlannedRequest, RenderedRequest
from proxy.requests.records import Records
from proxy.requests.summarizer import SummaryAnswer
from proxy.telemetry.outcome import ToolUse
from proxy.upstream.headers import Headers, without

if TYPE_CHECKING:
    from proxy.policies.tenants import Tenant
    from proxy.requests.exchange import Exchange
    from proxy.requests.services import Services
    from proxy.upstream.client import UpstreamClient, UpstreamReply, UpstreamRequest

REWRITTEN = (b"content-length", b"content-encoding", b"accept-encoding")
ANOTHER = (*REWRITTEN, b"idempotency-key")
"""What does not go along with a second body: its key stands for the first one's reply."""

SUMMARY_BYTES = 4 << 20
"""Of a summary call's reply, of which a record is a few thousand. A larger one is not parsed: that would take the event
loop more than 10 ms."""


class RequestTurnIO:
    """One request's. `ready` is what was made of it; `searching` is what all its searches may take together."""

    def __init__(
        self,
        services: Services,
        client: Exchange,
        tenant: Tenant,
        ready: RenderedRequest,
        records: Records,
        ours: Callable[[], Headers],
        searching: Budget,
    ) -> None:
        self._services = services
        self._client = client
        self._tenant = tenant
        self._ready = ready
        self._records = records
        self._ours = ours
        self._searching = searching
        self._files: Files | None = None
        self.uses: list[ToolUse] = []
        """Calls of our tools so far, as the outcome reports them."""

    @property
    def _history(self) -> PlannedRequest:
        return self._ready.history

    async def send(self, body: bytes) -> UpstreamReply:
        """A rewritten body, to the same address with the same headers. Raises UpstreamFault."""
        first = self._client.sent is None
        self._client.sent = self._client.sent or time.perf_counter()
        return await self._services.upstream.send(self._request(body, REWRITTEN if first else ANOTHER))

    def _request(self, body: bytes, dropped: Collection[bytes]) -> UpstreamRequest:
        return rewritten(self._services.relay.request(self._client, self._tenant, body), body, dropped)

    def headers(self, turn: ChatTurn) -> Headers:
        """Ours; in a reply that is not a stream with the number of internal rounds, which is known by then."""
        whole = not self._history.request.stream
        return [*self._ours(), (b"x-offload-rounds", b"%d" % turn.rounds)] if whole else self._ours()

    async def aside(self, work: Callable[[], bytes]) -> bytes:
        """Work on upstream's reply that would hold up the event loop, in a thread."""
        return await self._services.threads.reading.run(self._tenant.namespace, work, begun=True)

    # -- our tools --

    async def resolve(self, calls: Sequence[ToolCall]) -> list[str]:
        """The answers, within what the turn may still read; one after another, each with its share."""
        if self._files is None:
            self._files = self._ready.files()
        limits = self._history.policy.tools
        first = calls[: limits.max_calls]
        share = max(0, min(limits.max_answer_tokens, self._budget() // len(first)))
        try:
            answers = [await self._answer(call, self._files, share) for call in first]
        finally:
            self._files.forget()
        if len(calls) > len(first):
            too_many = tools.too_many(limits.max_calls, self._count)
            answers += [too_many] * (len(calls) - len(first))
        self.uses += answers_used(calls, answers, self._history.names)
        return [answer.text for answer in answers]

    def _budget(self) -> int:
        read = sum(use.tokens for use in self.uses)
        left = self._history.policy.tools.max_retrieved_tokens - read
        room = self._history.room
        return left if room.window is None else min(left, room.left(self._ready.tokens + read))

    async def _answer(self, call: ToolCall, files: Files, budget: int) -> tools.ToolAnswer:
        names, threads = self._history.names, self._services.threads
        tool = _tool(call, names)
        steps = tools.answering(
            tool,
            call.arguments,
            files,
            self._history.policy.offload.store_dir,
            budget,
            self._count,
            lambda pattern: regex.compile(pattern, self._searching),
            names,
        )
        if tool == "grep":
            return await sliced(threads.searching, self._tenant.namespace, steps, self._searching)
        return await sliced(threads.reading, self._tenant.namespace, steps, Budget(math.inf))

    def _count(self, text: str) -> int:
        return self._services.reader.count(text, self._history.request.model)

    # -- what the reply hid --

    async def remember(self, turn: ChatTurn) -> None:
        """Under the digest of the history that the visible reply ends."""
        hidden = turn.hidden
        if hidden is None:
            return
        model = self._history.request.model
        link = extend(self._history.chain[-1], reply_meaning(*turn.visible))
        raws = [*hidden.before, *hidden.after]
        count = self._services.reader.count
        tokens = await self._services.threads.reading.run(
            self._tenant.namespace, lambda: count(b"".join(raws).decode("utf-8", "replace"), model)
        )
        links = self._history.reply_links()
        earlier = [links[index] for index in sorted(self._ready.rounds)]
        round_ = HiddenRound(tuple(hidden.before), hidden.instead, tuple(hidden.after), tokens)
        await self._records.remember(link, model, round_, earlier)

    # -- summaries --

    async def ask(self, body: bytes) -> SummaryAnswer:
        """A summary call: by the request's own upstream and credentials. Raises UpstreamFault."""
        return await ask(self._services.upstream, self._request(body, ANOTHER))


def rewritten(request: UpstreamRequest, body: bytes, dropped: Collection[bytes]) -> UpstreamRequest:
    """The client's own request with another body; headers that told of the old one, and `dropped`, are left out."""
    kept = without(request.headers, dropped)
    headers = [*kept, (b"accept-encoding", b"identity"), (b"content-length", b"%d" % len(body))]
    return msgspec.structs.replace(request, content=body, headers=headers)


async def ask(upstream: UpstreamClient, request: UpstreamRequest) -> SummaryAnswer:
    """A summary call's answer. Raises UpstreamFault."""
    async with aclosing(await upstream.send(request)) as reply:
        return _read(reply.status, await tool_loop.body(reply))


def answers_used(
    calls: Sequence[ToolCall], answers: Sequence[tools.ToolAnswer], names: tuple[str, str]
) -> list[ToolUse]:
    """What the outcome says of these answers."""
    return [
        ToolUse(_tool(call, names), answer.result, answer.tokens) for call, answer in zip(calls, answers, strict=True)
    ]


def _tool(call: ToolCall, names: tuple[str, str]) -> tools.Tool:
    """Which of the two it is, whatever it is called in this request."""
    return "grep" if call.name == names[0] else "read_file"


class _Completion(msgspec.Struct):
    """As far as a summary call's reply matters; any of it may be missing or of another kind."""

    choices: list[_Choice] = []
    usage: _Usage | None = None


class _Choice(msgspec.Struct):
    message: _Message


class _Message(msgspec.Struct):
    content: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = 0


def _read(status: int, body: bytes) -> SummaryAnswer:
    if len(body) > SUMMARY_BYTES:
        return SummaryAnswer(status, body)
    try:
        completion = msgspec.json.decode(body, type=_Completion)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return SummaryAnswer(status, body)
    usage = completion.usage or _Usage()
    details = usage.prompt_tokens_details or _Details()
    text = (completion.choices[0].message.content or "") if completion.choices else ""
    return SummaryAnswer(status, body, text, usage.prompt_tokens, usage.completion_tokens, details.cached_tokens or 0)
