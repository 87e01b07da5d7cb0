"""Has a model write one snapshot: the calls that it takes, and what they cost.

on the conversation, whose prefix is cached ──too long, or refused──> from the originals, in as many
calls as it takes
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from functools import partial
from typing import Protocol

import msgspec
from msgspec.structs import replace

from proxy.dialects import Dialect, refusals
from proxy.errors import OffloadError
from proxy.plan import summary
from proxy.plan.summary import Mentions, Section, SummaryAnswer, Unusable
from proxy.plan.turn import Verdict
from proxy.policies.tenants import Tenant
from proxy.policy import Offload
from proxy.rawjson import encodable
from proxy.requests import relay
from proxy.threads import WorkPool
from proxy.upstream.client import UpstreamClient, UpstreamRequest

UNKNOWN_WINDOW = 64_000
"""Tokens of history for one call if the summary model's window is unknown (most have 128,000)."""

ADDED_TOKENS = 40
"""Tokens of the tags around what is added to a record."""


class Snapshot(msgspec.Struct, frozen=True):
    """The stored record: the text between the tags, its tokens, and the model that wrote it."""

    text: str
    tokens: int
    model: str


class Summarise(Protocol):
    def __call__(self, text: str, *, most: int) -> bytes: ...


class SummaryJob(msgspec.Struct, frozen=True):
    """Everything that is needed to make one snapshot. The request that builds the job may end
    before the job does. Any thread may call the functions that return something at once."""

    tenant: Tenant
    """For whom it is made. Its policy has the size, the bounds and the prices."""
    model: str
    dialect: str
    """The API in which it is asked for."""
    replaced_tokens: int
    window: int | None
    """The context window of the request's upstream; None if unknown."""
    originals: str
    """The path where the whole history can be read."""
    alone: Summarise
    """Returns the body of a call whose whole prompt, history and task, is `text`."""
    history: Callable[[], list[Section]]
    """Returns the originals to record."""
    ask: Callable[[bytes], Awaitable[SummaryAnswer]]
    """Sends one body to the request's own upstream with its credentials."""
    name: str = ""
    """The record's name; empty if there is none."""
    riding: Callable[[str], bytes] | None = None
    """The task → the body of a call on the cached prefix; None if that is impossible, as with
    another model."""
    earlier: str = ""
    """The text of the snapshot that this one replaces; empty if there is none."""
    replaced: Callable[[], list[Mentions]] = list
    """Returns what each text mentions that the snapshot replaces."""
    references: Callable[[], Mapping[str, str]] = dict
    """Returns what each of the stored results is that the snapshot replaces, by path, the newest
    first."""

    @property
    def offload(self) -> Offload:
        return self.tenant.policy.offload

    @property
    def snapshot_tokens(self) -> int:
        return self.offload.compress.snapshot_tokens

    def shares(self, window: int | None) -> tuple[int, int]:
        """Return the tokens of history for one call in this window, and those of its reply."""
        if window is None:
            return UNKNOWN_WINDOW, summary.longest_reply(self.snapshot_tokens)
        return summary.shares(window, self.snapshot_tokens)


class Spent(msgspec.Struct):
    """The cost of all calls for one snapshot."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    calls: int = 0

    def add(self, answer: SummaryAnswer) -> None:
        self.calls += 1
        self.prompt_tokens += answer.prompt_tokens
        self.completion_tokens += answer.completion_tokens
        self.cached_tokens += answer.cached_tokens


class Failed(OffloadError):
    """There is no usable snapshot; the text gives the reason."""


class Refused(Failed):
    """Upstream refused a call for its form."""


class TooLong(Exception):
    """A call has too many tokens. `window` is the context window that upstream named, if it did."""

    def __init__(self, window: int | None) -> None:
        super().__init__("upstream says that it is too long")
        self.window = window


async def write(
    job: SummaryJob, spent: Spent, count: Callable[[str, str], int], threads: WorkPool
) -> Snapshot:
    """Return the snapshot. `count` takes a text and a model.

    Raises Failed, UpstreamFault, Overloaded and TimeoutError; `spent` has the cost up to that
    point.
    """
    writing = _Writing(job, spent, lambda text: count(text, job.model), threads)
    async with asyncio.timeout(job.tenant.policy.upstream.idle_timeout):
        return await writing.run(partial(_completed, job, await writing.text(), writing.count))


class _Writing:
    """One snapshot in the making. All work on texts is done in a thread, because it grows with the
    conversation."""

    def __init__(
        self, job: SummaryJob, spent: Spent, count: Callable[[str], int], threads: WorkPool
    ) -> None:
        self._job = job
        self._spent = spent
        self.count = count
        self.run = partial(threads.run, job.tenant.namespace)
        self._left = job.offload.compress.max_calls
        self._fault = ""
        """Why the last answer could not be used. The next call tells the model."""

    async def text(self) -> str:
        """Return the record from calls on the prefix that upstream has cached, or else from the
        originals."""
        job = self._job
        limit = job.offload.compress.group_token_threshold or job.shares(job.window)[0]
        if (riding := job.riding) is not None:
            try:
                while True:
                    if (text := await self._asked(riding)) is not None:
                        return text
            except TooLong as error:
                limit = self._within(limit, error)
            except Refused:
                pass
        return await self._from_originals(limit)

    async def _from_originals(self, limit: int) -> str:
        """Record as much history per call as fits. Each call updates the record so far.

        A failed try costs a call. The remaining history is then shortened to fit into the remaining
        calls.
        """
        job = self._job
        made_so_far = summary.written(self._job.earlier)
        most = job.shares(job.window)[1]
        rest = await self.run(job.history)

        def body(task: str) -> bytes:
            return job.alone(summary.fenced(summary.originals(group), made_so_far, task), most=most)

        while True:
            limit = max(limit, summary.LEAST_HISTORY)
            fit = partial(
                summary.fitted, rest, limit, self._calls_left(), self.count, job.originals
            )
            group, *behind = await self.run(fit)
            try:
                made = await self._asked(body)
            except TooLong as error:
                if limit <= summary.LEAST_HISTORY:
                    raise Failed(
                        f"{limit} tokens of history are still too long for {job.model}"
                    ) from error
                limit = self._within(limit // 2, error)
                continue
            if made is not None:
                made_so_far = made
                rest = [turn for turns in behind for turn in turns]
                if not rest:
                    return made_so_far

    def _within(self, limit: int, error: TooLong) -> int:
        """Return the limit, or what the window takes that upstream named."""
        return min(limit, self._job.shares(error.window)[0]) if error.window else limit

    def _calls_left(self) -> int:
        """Return how many more calls are allowed. Raises Failed if there are none."""
        if not self._left:
            raise Failed(f"no usable record within {self._job.offload.compress.max_calls} calls")
        return self._left

    async def _asked(self, body: Callable[[str], bytes]) -> str | None:
        """Return the record from one call, whose `body` is made of its task; None if another call
        is needed.

        Raises UpstreamFault, TooLong, and Failed if no call is left or the second answer in a row
        cannot be used.
        """
        job = self._job
        self._left = self._calls_left() - 1
        task = summary.task(job.snapshot_tokens, job.offload.store_dir, self._fault)
        answer = await job.ask(await self.run(partial(body, task)))
        self._spent.add(answer)
        if answer.too_long:
            raise TooLong(answer.window)
        if answer.status != 200 or answer.refused:
            raise (Refused if answer.refused else Failed)(f"upstream answered {answer.status}")
        accept = partial(
            summary.accept,
            answer.text,
            job.snapshot_tokens,
            job.replaced_tokens,
            self.count,
            finished=answer.finished,
            originals=job.originals,
        )
        try:
            text = await self.run(accept)
        except Unusable as error:
            if self._fault or not self._left:
                raise Failed(f"the model's answer cannot be used: {error}") from error
            self._fault = str(error)
            return None
        self._fault = ""
        return text


def _completed(job: SummaryJob, text: str, count: Callable[[str], int]) -> Snapshot:
    """Return the record with the references and the exact details that it replaces, and smaller
    than those.

    References do not count against `snapshot_tokens`, but take no more than another so many.
    Details take what the model left of it, or a quarter.
    """
    used = count(text)
    room = job.replaced_tokens - used - ADDED_TOKENS
    about = job.references()
    lines = summary.fitting(
        (f"{path}: {what}" for path, what in about.items()), min(job.snapshot_tokens, room), count
    )
    room -= count("\n".join(lines))
    room = min(max(job.snapshot_tokens - used, job.snapshot_tokens // 4), room)
    details = summary.details(job.replaced(), text, room, count)
    whole = encodable(summary.completed(text, details, lines))
    return Snapshot(whole, count(whole), encodable(job.model))


# -- one call --------------------------------------------------------------------------------------


async def ask(
    upstream: UpstreamClient, request: UpstreamRequest, dialect: Dialect
) -> SummaryAnswer:
    """Send a summary call and return the answer. Raises UpstreamFault."""
    answer = await _answer(upstream, request, dialect)
    if answer.again is None or not isinstance(request.content, bytes):
        return answer
    return await _answer(upstream, relay.rewritten(request, answer.again(request.content)), dialect)


async def _answer(
    upstream: UpstreamClient, request: UpstreamRequest, dialect: Dialect
) -> SummaryAnswer:
    async with aclosing(await upstream.send(request)) as reply:
        said = await relay.body(reply)
        answer = dialect.summary_answer(reply.status, said)
        if answer.text or answer.too_long or (reply.status == 200 and not refusals.is_error(said)):
            return answer
        return replace(answer, refused=dialect.complaint(reply.status, said) is not Verdict.FINAL)
