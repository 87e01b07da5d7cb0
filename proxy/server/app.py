"""The ASGI application: checks the caller, and hands the request to chat, relay, a part's door or a
page.

Starlette serves the pages. Proxied requests bypass its router: matching patterns would cost time
and give nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from contextlib import nullcontext, suppress
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from proxy.dialects import Dialect, for_request, owner_of
from proxy.dialects.responses import RESPONSES
from proxy.errors import ClientFault, Fault, Forbidden, ForeignSite, Overloaded, ProxyError
from proxy.plan.prices import is_loopback
from proxy.policies.tenants import Tenant, allowed, identified, identify
from proxy.requests.exchange import ClientGone, Exchange
from proxy.requests.relay import GATHERED
from proxy.server.access import COME_BACK, Shares, permission
from proxy.server.monitor import Monitor
from proxy.server.parts import Door, Handler
from proxy.server.process import MakePart, Process
from proxy.settings import Settings
from proxy.telemetry.outcome import Kind

logger = logging.getLogger(__name__)

_RESERVED = b"/_offload/"
"""Paths below this are never upstream's."""


STRANGER = (
    "This proxy serves only the command that started it, at an address that nobody else has. Start your own: "
    "offload-proxy run -- COMMAND, or offload-proxy serve."
)


class App:
    """The application of one process, with these parts. Nothing is opened yet.

    Raises UserMistake if settings or policies cannot be used.
    """

    def __init__(self, settings: Settings, parts: Iterable[MakePart] = ()) -> None:
        self.process = Process(settings, (Monitor, *parts))
        self._on_loopback = is_loopback(settings.host)
        self._body_limit = settings.body_limit
        self._below = settings.below.encode()
        self._shares = Shares()
        self._serving: set[asyncio.Task[Any]] = set()
        routes = [page for part in self.process.parts for page in part.pages]
        self._fixed = {_RESERVED[:-1], *(route.path.encode() for route in routes)}
        """Paths of pages."""
        self._pages = Starlette(
            routes=routes,
            lifespan=lambda _: self.process.running(),
            exception_handlers=dict.fromkeys(
                (HTTPException, ProxyError, Exception), _in_openais_shape
            ),
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._pages(scope, receive, send)
            return
        client = Exchange(scope, receive, send)
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            await self._guarded(client)
        finally:
            self._serving.discard(task)
            client.close()

    def cut(self) -> None:
        """End the requests under way, as the server does when the drain timeout is over, and leave
        background tasks only the least grace."""
        self.process.cut()
        for task in self._serving:
            task.cancel()

    async def _guarded(self, client: Exchange) -> None:
        """The outermost edge: whatever fails, the client gets a whole reply or sees that the reply
        was cut off."""
        try:
            await self._routed(client)
        except ForeignSite as error:
            await client.fail(error)
        except asyncio.CancelledError:
            # Only the server cancels: the drain timeout is over, or a second signal came. No caller
            # is left to see it.
            await _apologise(
                client, Overloaded("The proxy is shutting down", retry_after=COME_BACK)
            )
        except Exception:
            logger.exception("a bug, at request %s", client.request_id)
            await _apologise(
                client, ProxyError(f"The proxy failed at this request ({client.request_id})")
            )

    async def _routed(self, client: Exchange) -> None:
        if self._below and not client.enter(self._below) and not self._open_to_all(client.path):
            client.path = client.path.replace(self._below, b"/*")  # it is shown in the log
            await client.fail(Forbidden(STRANGER))
            self.process.record(client.completed(client.outcome(Kind.REFUSED), Fault.CLIENT))
            return
        path = client.path
        dialect = for_request(client.method, path)
        door = None if dialect else self._door(path)
        if dialect:
            client.api = client.dialect = dialect.name
            client.fault_body = dialect.error_body
        elif door:
            client.api = door.api
            client.fault_body = door.fault_body
        elif owner := owner_of(path, client.fields):
            client.api = owner.name
            client.fault_body = owner.error_body
        if door is None and self._is_page(client):
            if path.startswith(_RESERVED):
                self.process.check_origin(client.headers, client.written_target)
            with suppress(ClientGone):
                await self._pages(client.scope, client.message, client.send)
            return
        traces = self.process.traces
        known = dialect is not None
        method = client.method
        shown = client.shown_path
        headers = client.headers
        with traces.request(method, shown, headers, known=known) if traces else nullcontext():
            await self._admit(client, dialect, door)

    def _open_to_all(self, path: bytes) -> bool:
        """Whether a path is that of the dashboard's pages, which ask for a login themselves."""
        return path.startswith(_RESERVED) and self._door(path) is None

    def _door(self, path: bytes) -> Door | None:
        return next((door for part in self.process.parts if (door := part.door(path))), None)

    def _is_page(self, client: Exchange) -> bool:
        """Whoever types the proxy's address wants a page. Programs ask upstream for `/`."""
        if client.path.startswith(_RESERVED):
            return True
        typed = client.method in ("GET", "HEAD") and b"text/html" in client.fields.get(
            b"accept", b""
        )
        return client.path in self._fixed and (client.path != b"/" or typed)

    async def _admit(self, client: Exchange, dialect: Dialect | None, door: Door | None) -> None:
        tenant = None
        relay = self.process.relay
        try:
            if door is None and await self._permit(client):
                return
            tenant = self._tenant(client, door)
            handler = self._handler(client, tenant, dialect, door)
            client.admit(self._shares.accounts(tenant))
            with self.process.metrics.in_flight():
                whole = await client.gather(GATHERED if handler is relay else self._body_limit)
                if handler is relay and not whole:
                    client.admit(self._shares.uploads(tenant))
                await handler(client, tenant)
            if client.sent is not None and client.status == 200:
                self._shares.accept(tenant)
        except (ProxyError, ClientGone) as error:
            fault = Fault.CLIENT_GONE
            if isinstance(error, ProxyError):
                fault = Fault.OVERLOADED if isinstance(error, Overloaded) else Fault.CLIENT
                await _apologise(client, error)
            known = (tenant.name, tenant.namespace) if tenant else ()
            self.process.record(client.completed(client.outcome(Kind.REFUSED, *known), fault))

    async def _permit(self, client: Exchange) -> bool:
        """Answer a browser that asks whether a page may send a request to an API. Returns False for
        other requests."""
        answer = permission(client.method, client.fields)
        if answer is None:
            return False
        if self._on_loopback:
            self.process.check_origin(client.headers.only((b"host",)), client.written_target)
        await client.start(204, answer)
        await client.finish()
        self.process.record(client.completed(client.outcome(Kind.RELAY)))
        return True

    def _handler(
        self, client: Exchange, tenant: Tenant, dialect: Dialect | None, door: Door | None
    ) -> Handler:
        """Return the handler of this request. Raises ClientFault if there is none."""
        if door:
            return door.answer
        if not allowed(client.path, tenant.policy, client.method):
            raise Forbidden(
                "This path is not relayed: it has dot segments, or everyone who shares this proxy's key could reach "
                "each other's data there. The operator can open it with `relay` in the policy."
            )
        if dialect:
            return self.process.chats[dialect]
        return (
            self.process.kept_replies
            if RESPONSES.kept_id(client.method, client.path)
            else self.process.relay
        )

    def _tenant(self, client: Exchange, door: Door | None) -> Tenant:
        """Return the tenant of this request. Raises ClientFault if the caller may not use the
        proxy."""
        tenant = identify(client.headers, self.process.policies()).for_api(client.api)
        if tenant.listed:
            tenant = identified(tenant, client.headers) or tenant
        if door:
            door.check(tenant)  # before the host, as another host would not help without a key
        if self._on_loopback and (tenant.anonymous or tenant.lends_key):
            self.process.check_origin(client.headers, client.written_target)
        return tenant


async def _in_openais_shape(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        fault = ClientFault(error.detail)
        return Response(
            fault.body(), error.status_code, error.headers, media_type="application/json"
        )
    # Any error but a ProxyError is a bug. Starlette raises it again, and the outermost edge logs
    # it.
    said = (
        error if isinstance(error, ProxyError) else ProxyError("The proxy failed at this request")
    )
    return Response(said.body(), said.status, media_type="application/json")


async def _apologise(client: Exchange, error: ProxyError) -> None:
    """Reply with the error, or end with it the stream that has begun."""
    if client.gone:
        return
    await (client.break_off(error) if client.status else client.fail(error))
