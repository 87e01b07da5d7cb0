"""Captures whole requests for `offload-proxy replay`, as records of the store that go first when
room is short.

A request is captured if the operator gave captures room, the tenant's policy agrees, and upstream
answered it. Its record `NAMESPACE/captures/TIME-ID.jsonl` has the request's body and the numbers
that upstream billed; of the headers, only `anthropic-beta` is captured, so no key is. The proxy
never reads it. Requests hand their body over and go on. One task writes, and drops what the store
refuses or cannot keep up with.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from typing import NamedTuple

import msgspec

from proxy.dialects.messages import MESSAGES
from proxy.dialects.usage import Reported
from proxy.errors import ProxyError, StoreFull
from proxy.plan.turn import Request
from proxy.policies.tenants import tenant_of
from proxy.policy import Policy
from proxy.requests.exchange import Exchange
from proxy.requests.prepared import Prepared
from proxy.server.parts import Part
from proxy.server.process import Process
from proxy.stores import Entry, Store, namespace_of, unhurried
from proxy.telemetry.logs import Limited, beside, event
from proxy.telemetry.outcome import Basis, Kind, Outcome
from proxy.threads import nobody_waits, running

logger = logging.getLogger(__name__)

KIND = "captures"
"""The middle of a capture's key. Nothing else in the proxy reads records of this kind."""

LEAST = 16 << 10
"""Bytes that a capture counts as at least, so that there are never more than a listing can hold."""

SHARE = 8
"""The store is listed again when this part of the limit has been written."""

WAITING = 64 << 20
"""Bytes of bodies that wait to be written."""

CLOSING = 0.5
"""Seconds at the end for what still waits."""


def line(outcome: Outcome, body: bytes, when: float, beta: str = "") -> bytes:
    """Return a capture: one line of JSON, which is the client's body with something around it.
    `beta` names what the client wants beyond its API."""
    about: dict[str, object] = {
        "custom_id": outcome.request_id,
        "time": datetime.fromtimestamp(when, UTC).isoformat(timespec="milliseconds"),
        "tenant": outcome.tenant,
        "namespace": outcome.namespace,
        "method": outcome.method,
        "url": outcome.path,
    }
    as_sent = outcome.kind in (Kind.UNTOUCHED, Kind.OBSERVED)
    if as_sent and outcome.usage is Basis.BILLED:
        about["usage"] = Reported(
            outcome.prompt_tokens, outcome.completion_tokens, outcome.cached_tokens
        )
    if beta:
        about["beta"] = beta
    # in JSON, these are never part of a string
    body = body.replace(b"\n", b" ").replace(b"\r", b" ")
    return msgspec.json.encode(about)[:-1] + b',"body":' + body + b"}\n"


async def captured(store: Store, namespace: str | None) -> list[str]:
    """Return the keys of a store's captures, or of one namespace's, the oldest first. Raises
    StoreFault."""
    async with aclosing(store.list(f"{namespace}/{KIND}/" if namespace else "")) as entries:
        found = [entry async for entry in entries if _is_capture(entry)]
    return [entry.key for entry in sorted(found, key=_name)]


class _Waiting(NamedTuple):
    """A request that has yet to be written, and when it ended."""

    outcome: Outcome
    body: bytes
    when: float
    beta: str


class Captures(Part):
    """Takes the requests of one process, if `--capture` gives them room."""

    def __init__(self, process: Process, clock: Callable[[], float] = time.time) -> None:
        self._limit = process.settings.capture
        self._room = self._limit - self._limit // SHARE
        self._policies = process.policies
        self._store = process.services.store.store
        self._threads = process.services.threads
        self._clock = clock
        self._warn = Limited(logger)
        self._queue: asyncio.Queue[_Waiting | None] = asyncio.Queue()
        """None: there is nothing to write, but room to make."""
        self._bytes = 0
        """Bytes of bodies in the queue."""
        self._written = self._limit
        """Bytes written since the store was listed. The first capture lists it."""
        self._short = False
        """Whether the store has no room for other records."""

    def watch(self, outcome: Outcome, prepared: Prepared | None, client: Exchange | None) -> None:
        if prepared is not None:
            beta = b",".join(client.headers.get_all(MESSAGES.beta_header)) if client else b""
            self.take(outcome, prepared.tenant.policy, prepared.request, beta)

    def take(
        self, outcome: Outcome, policy: Policy, chat: Request | None, beta: bytes = b""
    ) -> None:
        """Capture an answered request if its tenant's policy agrees. It is written later, or
        dropped."""
        if not self._limit or chat is None or not policy.capture:
            return
        if outcome.status != 200 or outcome.kind is Kind.RELAY:
            return
        if self._bytes + len(chat.body) > WAITING:
            self._warn("slow", "requests are not captured: the store does not keep up")
            return
        self._bytes += len(chat.body)
        self._queue.put_nowait(_Waiting(outcome, chat.body, self._clock(), beta.decode("latin-1")))

    def room_is_short(self) -> None:
        """Delete half of all captures. Others need the room more."""
        if self._limit and not self._short:
            self._short = True
            self._queue.put_nowait(None)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Write what waits, and at the end what still waits, if that is soon done."""
        if self._limit:
            event(
                logger,
                "requests are captured, with all that they contain, of tenants whose policy has `capture: true`",
                logging.WARNING,
                bytes=self._limit,
                tenants=[policy.tenant for policy in self._policies().all() if policy.capture],
            )
        async with running(self._work()):
            yield
            with suppress(TimeoutError):
                async with asyncio.timeout(CLOSING):
                    await self._queue.join()

    async def _work(self) -> None:
        with nobody_waits():
            while True:
                waiting = await self._queue.get()
                with beside(logger, "capturing requests"):
                    await self._do(waiting)
                self._bytes -= len(waiting.body) if waiting else 0
                self._queue.task_done()

    async def _do(self, waiting: _Waiting | None) -> None:
        """Make room if it is short, and then write a request."""
        try:
            if self._short:
                await self._halve()
            if waiting:
                await self._write(*waiting)
        except ProxyError as fault:
            self._warn("store", f"requests are not captured: {fault.message}")

    async def _halve(self) -> None:
        try:
            await self._delete_oldest(lambda now: now // 2)
        finally:
            self._short = False

    async def _write(self, outcome: Outcome, body: bytes, when: float, beta: str) -> None:
        namespace = outcome.namespace
        value = await self._threads.run(namespace, partial(line, outcome, body, when, beta))
        size = max(len(value), LEAST)
        if size > self._room:
            self._warn("large", "a request is not captured: it is too large for --capture")
            return
        if self._written + size > self._limit // SHARE:
            await self._delete_oldest(lambda now: self._room - size)
            self._written = 0
        self._written += size
        name = f"{datetime.fromtimestamp(when, UTC):%Y%m%dT%H%M%S.%f}-{uuid.uuid4().hex[:8]}.jsonl"
        try:
            await self._store.put(f"{namespace}/{KIND}/{name}", value, sync=False)
        except StoreFull:
            self.room_is_short()
            raise

    async def _delete_oldest(self, most: Callable[[int], int]) -> None:
        """Delete the oldest captures of whichever tenant has most, until there are no more than
        `most` says of the bytes that there are now."""
        entries: dict[str, list[Entry]] = {}
        async with aclosing(unhurried(self._store)) as listing:
            async for entry in listing:
                if _is_capture(entry):
                    entries.setdefault(tenant_of(namespace_of(entry.key)), []).append(entry)
        waiting = {tenant: deque(sorted(ones, key=_name)) for tenant, ones in entries.items()}
        sizes = Counter({tenant: sum(map(_size, ones)) for tenant, ones in entries.items()})
        bound = most(sizes.total())
        old: list[str] = []
        while sizes.total() > bound:
            tenant = max(sizes, key=sizes.__getitem__)
            oldest = waiting[tenant].popleft()
            sizes[tenant] -= _size(oldest)
            old.append(oldest.key)
        await self._store.delete(*old)


def _is_capture(entry: Entry) -> bool:
    return entry.key.split("/")[1] == KIND


def _name(entry: Entry) -> str:
    """Return a capture's name, which begins with its time."""
    return entry.key.rpartition("/")[2]


def _size(entry: Entry) -> int:
    return max(entry.size, LEAST)
