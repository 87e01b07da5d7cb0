"""The ASGI application: checks the caller, and hands the request to chat, relay, an operation or one of our routes.

Starlette serves our own routes. Proxied requests bypass its router: matching patterns would cost time and give nothing.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, nullcontext
from ipaddress import ip_network
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from proxy.apps import operations
from proxy.apps.capture import Captures
from proxy.apps.dashboard import Dashboard, pages
from proxy.apps.operations import Operations
from proxy.dialects import DIALECTS, Dialect, for_request, owner_of
from proxy.dialects.chat import CHAT
from proxy.dialects.responses import RESPONSES
from proxy.errors import (
    ClientFault,
    Fault,
    Forbidden,
    ForeignSite,
    Overloaded,
    ProxyError,
    UserMistake,
)
from proxy.plan.prices import is_loopback
from proxy.policies import PolicyLoader
from proxy.policies.tenants import KEY_HEADERS, Tenant, allowed, identified, identify, retention
from proxy.policy import Policy
from proxy.requests.cache import MessageCache
from proxy.requests.exchange import ClientGone, Exchange
from proxy.requests.handler import Chat
from proxy.requests.prepared import Prepared
from proxy.requests.references import KeptReplies
from proxy.requests.relay import GATHERED, Relay
from proxy.requests.rounds import Services, Spending
from proxy.requests.summaries import Summaries
from proxy.requests.windows import Known
from proxy.server.access import COME_BACK, SECONDS, check_origin, deep_health, permission, require_monitor
from proxy.settings import Settings
from proxy.stores import expires_by_itself, open_store, sweep_always
from proxy.stores.guarded import Guarded
from proxy.telemetry import logs
from proxy.telemetry.metrics import Metrics
from proxy.telemetry.outcome import Kind, Outcome
from proxy.threads import Background, WorkPool, running
from proxy.tokens import Tokens, counter
from proxy.upstream.client import UpstreamClient
from proxy.upstream.headers import Header

if TYPE_CHECKING:
    from proxy.telemetry.otel import OpenTelemetry  # of an extra

logger = logging.getLogger(__name__)

_OURS = frozenset((b"/health", b"/metrics", b"/openapi.json", b"/_offload"))
_RESERVED = b"/_offload/"

BACKGROUND = 1_000
"""Most background tasks, such as writing originals, that run at once."""

UPLOADS_SHARE = 4
"""A tenant's uploads, whose bodies are too large to collect, may take its number of places divided by this."""

STORE_SECONDS = 15.0
"""Seconds between two checks of the store, as between two readings of the metrics."""

LEAST_GRACE = 1.0
"""Seconds that background tasks get to end when the requests have used up the drain timeout."""


Handler = Callable[[Exchange, Tenant], Awaitable[None]]
"""Serves an admitted request: replies and records one outcome, or raises ProxyError or ClientGone before either."""


class App:
    """The application of one process, and everything that its requests share. Nothing is opened yet.

    Raises UserMistake if settings or policies cannot be used.
    """

    def __init__(self, settings: Settings) -> None:
        own = {urlsplit(settings.replica_url).hostname or ""} if settings.replica_url else set()
        self._allowed_hosts = {*settings.allowed_hosts, *own}
        self._on_loopback = is_loopback(settings.host)
        self._metrics = Metrics()
        self._book = PolicyLoader(settings.policies, settings.environment, settings.upstream, self._metrics.reloaded)
        self._dashboard = Dashboard(settings, lambda: self._book.current, self._state)
        self._shows_requests = settings.dashboard
        shown = (self._dashboard.record,) if settings.dashboard else ()
        self._ledger = logs.Recorder(logs.requests, self._metrics.record, *shown)
        self._otel = _opentelemetry(settings)
        self.flush = self._ledger.flush
        """Writes the metrics and log lines of the requests so far."""
        self._record = self._otel.noting(self._ledger.record) if self._otel else self._ledger.record
        self._store_url = settings.store
        store = open_store(settings.store, self._retention, lambda key: self._store.damaged(key))
        self._store = Guarded(
            store, warn=logs.Limited(logger), retention=self._retention, count_damaged=self._metrics.damaged
        )
        self._metrics.watch_store(lambda: self._store.state)
        self._upstream = UpstreamClient(settings, self._otel.call if self._otel else None)
        self._relay = Relay(settings, self._upstream, self._record)
        self._background = Background(BACKGROUND)
        self._threads = WorkPool("work")
        self._reader = MessageCache(Tokens(), self._threads)
        self._caches = {"store": lambda: self._store.memory.size, **self._reader.caches()}
        for cache, size in self._caches.items():
            self._metrics.watch_cache(cache, size)
        self._known = Known(self._upstream, self._background, self._threads, self._metrics.learned)
        self._summaries = Summaries(self._store, self._reader, self._threads, self._record)
        self._captures = Captures(settings, lambda: self._book.current)
        services = Services(
            settings=settings,
            upstream=self._upstream,
            relay=self._relay,
            store=self._store,
            reader=self._reader,
            summaries=self._summaries,
            background=self._background,
            threads=self._threads,
            known=self._known,
            sink=self._record,
            verifying=Spending(),
            watch=self._watch,
        )
        self._chats: dict[Dialect, Handler] = {dialect: Chat(services, dialect) for dialect in DIALECTS}
        self._kept = KeptReplies(services)
        self._operations = Operations(services)
        self._drain, self._body_limit = settings.drain_timeout, settings.body_limit
        self._ending_since: float | None = None
        self.hangs = False
        """Whether something hung when the process ended; the log names it."""
        self._serving: set[asyncio.Task[Any]] = set()
        self._taken: Counter[tuple[str, str]] = Counter()
        """Places of each tenant that are taken, by kind."""
        self._own = self._routes(settings)

    def _routes(self, settings: Settings) -> Starlette:
        """Return the application of our own routes."""
        networks, access = [*map(ip_network, settings.monitor_networks)], self._dashboard.access

        async def open_dashboard(request: Request) -> Response:
            return RedirectResponse("/_offload/")

        async def health(request: Request) -> Response:
            if request.query_params.get("deep", "0") in ("", "0", "false"):
                return JSONResponse({"status": "healthy"})
            require_monitor(request, access, networks, self._check_origin)
            healthy, page = await deep_health(self._store, self._upstream, self._book.current.all())
            return JSONResponse(page, 200 if healthy else 503)

        async def show_metrics(request: Request) -> Response:
            require_monitor(request, access, networks, self._check_origin)
            self._ledger.flush()
            kind, page = await asyncio.to_thread(self._metrics.render)
            return Response(page, media_type=kind)

        async def describe(request: Request) -> Response:
            return Response(operations.description(), media_type="application/json")

        own = {"/": open_dashboard, "/health": health, "/metrics": show_metrics, "/openapi.json": describe}
        return Starlette(
            routes=[*(Route(path, handler) for path, handler in own.items()), *pages.routes(self._dashboard)],
            lifespan=self._lifespan,
            exception_handlers=dict.fromkeys((HTTPException, ProxyError, Exception), _in_openais_shape),
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            client = Exchange(scope, receive, send)
            task = asyncio.current_task()
            assert task is not None
            self._serving.add(task)
            try:
                await self._guarded(client)
            finally:
                self._serving.discard(task)
                client.close()
        else:
            await self._own(scope, receive, send)

    async def _guarded(self, client: Exchange) -> None:
        """The outermost edge: whatever fails, the client gets a whole reply or sees that the reply was cut off."""
        path = client.path
        if dialect := for_request(client.method, path):
            client.api = client.dialect = dialect.name
            client.fault_body = dialect.error_body
        elif operations.serves(path) and path != operations.MCP:
            client.api, client.fault_body = CHAT.name, operations.refusal()
        elif owner := owner_of(path, client.fields):
            client.api, client.fault_body = owner.name, owner.error_body
        # Whoever types the proxy's address wants the dashboard. Programs ask upstream for `/`.
        typed = path == b"/" and client.method in ("GET", "HEAD") and b"text/html" in client.fields.get(b"accept", b"")
        try:
            if typed or path in _OURS or (path.startswith(_RESERVED) and path != operations.MCP):
                if path.startswith(_RESERVED):
                    self._check_origin(client.headers, client.written_target)
                await self._own(client.scope, client.receive, client.send)
                return
            shown, headers, known = client.shown_path, client.headers, dialect is not None
            with self._otel.request(client.method, shown, headers, known=known) if self._otel else nullcontext():
                await self._admit(client, dialect)
        except ForeignSite as error:
            await client.fail(error)
        except asyncio.CancelledError:
            # Only the server cancels: the drain timeout is over, or a second signal came. No caller is left to see it.
            await _apologise(client, Overloaded("The proxy is shutting down", retry_after=COME_BACK))
        except Exception:
            logger.exception("a bug, at request %s", client.request_id)
            await _apologise(client, ProxyError(f"The proxy failed at this request ({client.request_id})"))

    async def _admit(self, client: Exchange, dialect: Dialect | None) -> None:
        tenant = None
        try:
            if await self._permit(client):
                return
            tenant = self._tenant(client)
            handler = self._handler(client, tenant, dialect)
            client.charge(tenant.name)
            with self._metrics.in_flight():
                whole = await client.gather(GATHERED if handler is self._relay else self._body_limit)
                most = tenant.policy.limits.concurrent_requests
                shares = {"requests": most}
                if handler is self._relay and not whole:
                    # They are forwarded while they arrive: slow senders cannot shut out the tenant's other requests.
                    shares["uploads"] = max(1, most // UPLOADS_SHARE)
                with self._place(tenant.policy, **shares):
                    await handler(client, tenant)
        except (ProxyError, ClientGone) as error:
            fault = Fault.CLIENT_GONE
            if isinstance(error, ProxyError):
                fault = Fault.OVERLOADED if isinstance(error, Overloaded) else Fault.CLIENT
                await _apologise(client, error)
            known = (tenant.name, tenant.namespace) if tenant else ()
            self._record(client.completed(client.outcome(Kind.REFUSED, *known), fault))

    async def _permit(self, client: Exchange) -> bool:
        """Answer a browser that asks whether a page may send a request to an API. Returns False if this is none."""
        answer = permission(client.method, client.fields)
        if answer is None or operations.serves(client.path):
            return False
        if self._on_loopback:
            self._check_origin(client.headers.only((b"host",)), client.written_target)
        await client.start(204, answer)
        await client.finish()
        self._record(client.completed(client.outcome(Kind.RELAY)))
        return True

    @contextmanager
    def _place(self, policy: Policy, **shares: int) -> Iterator[None]:
        """Hold a place among the tenant's requests or uploads: each has so many in this process. Raises
        Overloaded if all are taken."""
        taken = [(policy.tenant, kind) for kind in shares]
        for place in taken:
            if self._taken[place] >= (most := shares[place[1]]):
                text = f"More than {most} {place[1]} at once (from `limits.concurrent_requests`); try again"
                raise Overloaded(text, retry_after=COME_BACK)
        self._taken.update(taken)
        try:
            yield
        finally:
            self._taken.subtract(taken)

    def _handler(self, client: Exchange, tenant: Tenant, dialect: Dialect | None) -> Handler:
        """Return the handler of this request. Raises ClientFault if there is none."""
        if dialect is None and operations.serves(client.path):
            return self._operations.mcp if client.path == operations.MCP else self._operations
        if not allowed(client.path, tenant.policy, client.method):
            raise Forbidden(
                "This path is not relayed: it has dot segments, or everyone who shares this proxy's key could reach "
                "each other's data there. The operator can open it with `relay` in the policy."
            )
        if dialect:
            return self._chats[dialect]
        return self._kept if RESPONSES.kept(client.method, client.path) else self._relay

    def _tenant(self, client: Exchange) -> Tenant:
        """Return the tenant of this request. Raises ClientFault if the caller may not use the proxy."""
        keys = [header for header in client.scope["headers"] if header[0] in KEY_HEADERS]
        tenant = identify(keys, self._book.current).for_api(client.api)
        if tenant.listed:
            tenant = identified(tenant, client.headers) or tenant
        if operations.serves(client.path):
            operations.check_caller(tenant)  # before the host, as another host would not help without a key
        if self._on_loopback and (tenant.anonymous or tenant.lends_key):
            self._check_origin(client.headers, client.written_target)
        return tenant

    def _check_origin(self, headers: Iterable[Header], target: bytes) -> None:
        """Raises ForeignSite if a web page in a browser on this machine may have sent this."""
        check_origin(headers, target, self._allowed_hosts)

    def ending(self) -> None:
        """Start the drain timeout of requests and background tasks, because the process must end."""
        self._ending_since = time.monotonic()

    def cut(self) -> None:
        """End the requests under way, as the server does when the drain timeout is over, and leave background tasks
        only the least grace."""
        self._ending_since = -math.inf
        for task in self._serving:
            task.cancel()

    def _watch(self, outcome: Outcome, prepared: Prepared) -> None:
        """Keep what dashboard and captures show of a chat request."""
        if self._shows_requests:
            self._dashboard.watch(outcome.request_id, prepared)
        self._captures.take(outcome, prepared.tenant.policy, prepared.request)

    def _retention(self, namespace: str) -> float | None:
        return retention(namespace, self._book.current)

    async def _state(self, namespaces: Collection[str]) -> Mapping[str, Any]:
        """Return the state of this process, with the windows that upstreams have shown to these namespaces."""
        _, page = await deep_health(self._store, self._upstream, self._book.current.all())
        book = self._book
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
            for policy in book.current.all()
        ]
        return {
            **page,
            "caches": {name: size() for name, size in self._caches.items()},
            "policies": policies,
            "reload": book.last,
            "windows": self._known.learned(namespaces),
        }

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        async with AsyncExitStack() as held:
            counter()
            self._dashboard.start()
            held.callback(self._dashboard.close)
            if self._otel:
                held.callback(self._otel.close)
            held.callback(self._ledger.flush)
            held.push_async_callback(self._close_store)
            await held.enter_async_context(running(self._watch_store()))
            held.callback(self._threads.close)
            await held.enter_async_context(self._upstream)
            held.push_async_callback(self._finish)
            await held.enter_async_context(running(self._book.watch()))
            self._captures.start()
            held.callback(self._captures.close)
            exchange = self._dashboard.exchange(self._store.store, logs.Limited(logger))
            await held.enter_async_context(running(exchange))
            if not expires_by_itself(self._store_url):
                warn, swept = logs.Limited(logger), self._metrics.swept
                sweeping = sweep_always(self._store.store, self._retention, warn=warn, swept=swept)
                await held.enter_async_context(running(sweeping))
            yield

    async def _finish(self) -> None:
        """Wait for background tasks to end, for all of them within the same time."""
        left = max(self._drain_left(), LEAST_GRACE)
        await asyncio.gather(self._summaries.close(left), self._background.close(left))

    async def _watch_store(self) -> None:
        """Ask the store now and then, for the metrics: few requests do, and a worker may have none."""
        while True:
            self._metrics.sample()  # until the first one, a gauge says 0
            await asyncio.sleep(STORE_SECONDS)
            await self._store.check(SECONDS)

    async def _close_store(self) -> None:
        self.hangs = not await self._store.close(self._drain_left())

    def _drain_left(self) -> float:
        """Seconds that are left of the drain timeout."""
        since = self._ending_since
        return self._drain if since is None else max(self._drain - (time.monotonic() - since), 0.0)


def _opentelemetry(settings: Settings) -> OpenTelemetry | None:
    """Return it if one of its variables names an endpoint. To import it takes a quarter of a second. Raises
    UserMistake."""
    variables = settings.environment
    named = any(variables.get(f"OTEL_EXPORTER_OTLP_{kind}ENDPOINT") for kind in ("", "TRACES_"))
    if not named or variables.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    try:
        from proxy.telemetry.otel import OpenTelemetry

        return OpenTelemetry(variables)
    except ModuleNotFoundError:
        logger.warning("OTEL_… is set, and nothing is exported without: pip install 'offload-proxy[otel]'")
        return None
    except ValueError as error:  # in one of its many variables
        raise UserMistake(f"OTEL_…: {error}") from error


async def _in_openais_shape(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        fault = ClientFault(error.detail)
        return Response(fault.body(), error.status_code, error.headers, media_type="application/json")
    # Any error but a ProxyError is a bug. Starlette raises it again, and the outermost edge logs it.
    said = error if isinstance(error, ProxyError) else ProxyError("The proxy failed at this request")
    return Response(said.body(), said.status, media_type="application/json")


async def _apologise(client: Exchange, error: ProxyError) -> None:
    """Reply with the error, or end with it the stream that has begun."""
    if client.gone:
        return
    await (client.break_off(error) if client.status else client.fail(error))
