"""What all requests of one process share, how it begins and how it ends.

`Process` makes everything once, from the settings. `App` (beside this) asks it for what a request
needs, and parts get it when they are made.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from proxy.dialects import DIALECTS, Dialect
from proxy.errors import UserMistake
from proxy.policies import Policies, PolicyLoader
from proxy.policies.tenants import retention
from proxy.release import install
from proxy.requests.cache import MessageCache
from proxy.requests.exchange import Exchange
from proxy.requests.handler import Chat
from proxy.requests.prepared import Prepared
from proxy.requests.references import KeptReplies
from proxy.requests.relay import Relay
from proxy.requests.rounds import Services
from proxy.requests.summaries import Summaries
from proxy.requests.windows import Known
from proxy.server.access import SECONDS, check_origin, deep_health
from proxy.server.parts import Handler, Part
from proxy.settings import Settings
from proxy.stores import expires_by_itself, open_store, sweep_always
from proxy.stores.guarded import Guarded
from proxy.telemetry import logs
from proxy.telemetry.metrics import Metrics
from proxy.telemetry.outcome import Outcome
from proxy.threads import Background, WorkPool, running
from proxy.tokens import Tokens, counter
from proxy.upstream.client import UpstreamClient
from proxy.upstream.headers import Header

if TYPE_CHECKING:
    from proxy.telemetry.otel import OpenTelemetry  # of an extra

logger = logging.getLogger(__name__)

BACKGROUND = 1_000
"""Most background tasks, such as writing originals, that run at once."""

STORE_SECONDS = 15.0
"""Seconds between two checks of the store, as between two readings of the metrics."""

LEAST_GRACE = 1.0
"""Seconds that background tasks get to end when the requests have used up the drain timeout."""

MakePart = Callable[["Process"], Part]


class Process:
    """Everything that the requests of one process share. Nothing is opened yet.

    Raises UserMistake if settings or policies cannot be used.
    """

    def __init__(self, settings: Settings, parts: Iterable[MakePart] = ()) -> None:
        self.settings = settings
        named = {urlsplit(settings.replica_url).hostname or ""} if settings.replica_url else set()
        self._allowed_hosts = {*settings.allowed_hosts, *named}
        self.metrics = Metrics()
        self._book = PolicyLoader(
            settings.policies,
            settings.environment,
            settings.upstream,
            self.metrics.reloaded,
            settings.built_in,
        )
        self._ledger = logs.Recorder(logs.requests, self.metrics.record)
        self.flush = self._ledger.flush
        """Writes the metrics and log lines of the requests so far."""
        self.traces = _opentelemetry(settings)
        self._background = Background(BACKGROUND)
        self._threads = WorkPool("work")
        self._store = self._guarded_store()
        self._upstream = UpstreamClient(settings, self.traces.call if self.traces else None)
        self._reader = MessageCache(Tokens(), self._threads)
        self._caches = {"store": lambda: self._store.memory.size, **self._reader.caches()}
        for cache, size in self._caches.items():
            self.metrics.watch_cache(cache, size)
        self._known = Known(self._upstream, self._background, self._threads, self.metrics.learned)
        self._summaries = Summaries(self._store, self._reader, self._threads, self.record)
        self.relay = Relay(settings, self._upstream, self.record)
        self.services = Services(
            settings=settings,
            upstream=self._upstream,
            relay=self.relay,
            store=self._store,
            reader=self._reader,
            summaries=self._summaries,
            background=self._background,
            threads=self._threads,
            known=self._known,
            sink=self.record,
        )
        self.chats: dict[Dialect, Handler] = {
            dialect: Chat(self.services, dialect) for dialect in DIALECTS
        }
        self.kept_replies: Handler = KeptReplies(self.services)
        self._ending_since: float | None = None
        self.hangs = False
        """Whether something hung when the process ended; the log names it."""
        self.parts: Sequence[Part] = [make(self) for make in parts]

    def _guarded_store(self) -> Guarded:
        store = open_store(
            self.settings.store, self._retention, lambda key: self._store.damaged(key)
        )
        warn = logs.Limited(logger)
        guarded = Guarded(
            store,
            warn=warn,
            retention=self._retention,
            count_damaged=self.metrics.damaged,
            count_unanswered=self.metrics.unanswered,
            full=self._make_room,
        )
        self.metrics.watch_store(lambda: guarded.state)
        return guarded

    # -- what requests and parts ask for --

    def policies(self) -> Policies:
        """Return the policies in force."""
        return self._book.current

    def record(
        self, outcome: Outcome, prepared: Prepared | None = None, client: Exchange | None = None
    ) -> None:
        """Record how a request has ended, and show it to every part: a chat with what was made of
        it and its client."""
        if self.traces:
            self.traces.note(outcome)
        self._ledger.record(outcome)
        for part in self.parts:
            with logs.beside(
                logger, f"showing request {outcome.request_id} to {type(part).__name__}"
            ):
                part.watch(outcome, prepared, client)

    def check_origin(self, headers: Iterable[Header], target: bytes) -> None:
        """Raises ForeignSite if a web page in a browser on this machine may have sent this."""
        check_origin(headers, target, self._allowed_hosts)

    async def health(self) -> tuple[bool, Mapping[str, Any]]:
        """Return whether the store and the upstreams answer now, and a page with their faults."""
        return await deep_health(self._store, self._upstream, self.policies().all())

    async def state(self, namespaces: Collection[str]) -> Mapping[str, Any]:
        """Return the state of this process, with the windows that upstreams have shown to these
        namespaces."""
        _, page = await self.health()
        policies = [
            {
                "tenant": policy.tenant,
                "upstream": policy.upstream.base_url,
                "mode": policy.offload.mode,
                "max_total_tokens": policy.offload.max_total_tokens,
                "holdout": policy.offload.holdout,
                "retention": policy.retention,
                "rules": [rule.model for rule in policy.rules],
            }
            for policy in self.policies().all()
        ]
        return {
            **page,
            "caches": {name: size() for name, size in self._caches.items()},
            "policies": policies,
            "reload": self._book.last,
            "windows": self._known.learned(namespaces),
        }

    def _make_room(self) -> None:
        """Ask every part to give up what the store could do without."""
        for part in self.parts:
            with logs.beside(logger, f"making room in {type(part).__name__}"):
                part.room_is_short()

    def _retention(self, namespace: str) -> float | None:
        return retention(namespace, self.policies())

    # -- its life --

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Open everything for the block, and close it in the opposite order."""
        async with AsyncExitStack() as held:
            counter()
            if self.traces:
                held.callback(self.traces.close)
            held.callback(self.flush)
            held.push_async_callback(self._close_store)
            await held.enter_async_context(running(self._watch_store()))
            held.callback(self._threads.close)
            await held.enter_async_context(self._upstream)
            for part in self.parts:
                await held.enter_async_context(part.running())
            held.push_async_callback(self._finish)
            await held.enter_async_context(running(self._book.watch()))
            if not expires_by_itself(self.settings.store):
                warn = logs.Limited(logger)
                swept = self.metrics.swept
                sweeping = sweep_always(self._store.store, self._retention, warn=warn, swept=swept)
                await held.enter_async_context(running(sweeping))
            yield

    def ending(self) -> None:
        """Start the drain timeout of requests and background tasks, because the process must
        end."""
        self._ending_since = time.monotonic()

    def cut(self) -> None:
        """Leave background tasks only the least grace."""
        self._ending_since = -math.inf

    async def _finish(self) -> None:
        """Wait for background tasks to end, for all of them within the same time."""
        left = max(self._drain_left(), LEAST_GRACE)
        await asyncio.gather(self._summaries.close(left), self._background.close(left))

    async def _watch_store(self) -> None:
        """Ask the store now and then, for the metrics: few requests do, and a worker may have
        none."""
        while True:
            self.metrics.sample()  # until the first one, a gauge says 0
            await asyncio.sleep(STORE_SECONDS)
            await self._store.check(SECONDS)

    async def _close_store(self) -> None:
        self.hangs = not await self._store.close(self._drain_left())

    def _drain_left(self) -> float:
        """Seconds that are left of the drain timeout."""
        since = self._ending_since
        seconds = self.settings.drain_timeout
        return seconds if since is None else max(seconds - (time.monotonic() - since), 0.0)


def _opentelemetry(settings: Settings) -> OpenTelemetry | None:
    """Return it if one of its variables names an endpoint. To import it takes a quarter of a
    second. Raises UserMistake."""
    variables = settings.environment
    named = any(variables.get(f"OTEL_EXPORTER_OTLP_{kind}ENDPOINT") for kind in ("", "TRACES_"))
    if not named or variables.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    try:
        from proxy.telemetry.otel import OpenTelemetry

        return OpenTelemetry(variables)
    except ModuleNotFoundError:
        logger.warning("OTEL_… is set, and nothing is exported without: %s", install("otel"))
        return None
    except ValueError as error:  # in one of its many variables
        raise UserMistake(f"OTEL_…: {error}") from error
