"""The proxy's own routes: health, metrics, the description of the operations, and the dashboard's."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from ipaddress import IPv6Address, ip_address, ip_network
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from proxy import operations
from proxy.errors import ClientFault, Forbidden, ProxyError
from proxy.requests.exchange import FORWARDED, Exchange

if TYPE_CHECKING:
    from starlette.types import Lifespan, Message


class Monitors:
    """Who may read metrics and deep health: callers with the admin token, and callers in networks that the operator
    named. Being on this machine is no reason: a reverse proxy on it is there as well.

    `check_origin` raises ForeignSite if a web page in a browser on this machine may have sent the request.
    """

    def __init__(
        self, admin_token: str | None, networks: Iterable[str], check_origin: Callable[[Exchange], None]
    ) -> None:
        self._token = admin_token
        self._networks = [*map(ip_network, networks)]
        self._check_origin = check_origin

    def require(self, request: Request) -> None:
        """Raises Forbidden for all others."""
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self._token and hmac.compare_digest(given.encode(), self._token.encode()):
            return
        if not self._named(request):
            raise Forbidden(
                "This needs OFFLOAD_ADMIN_TOKEN as bearer token, or --monitor-networks with the network of the caller"
            )

    def _named(self, request: Request) -> bool:
        """Whether the caller is in one of the networks, and no proxy that says that it forwards a request."""
        names = request.headers.keys()
        forwarded = any(name.encode() in FORWARDED or name.startswith("x-forwarded-") for name in names)
        if request.client is None or forwarded:
            return False
        address = ip_address(request.client.host)
        mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
        if address.is_loopback:
            self._check_origin(Exchange(request.scope, request.receive, _unheard))
        return any((mapped or address) in network for network in self._networks)


def own_routes(
    monitors: Monitors,
    deep_health: Callable[[], Awaitable[tuple[bool, Mapping[str, Any]]]],
    metrics: Callable[[], Awaitable[tuple[str, bytes]]],
    others: Sequence[BaseRoute],
    lifespan: Lifespan[Starlette],
) -> Starlette:
    """Return the application that serves our own routes and the `others`."""

    async def health(request: Request) -> Response:
        if request.query_params.get("deep", "0") in ("", "0", "false"):
            return JSONResponse({"status": "healthy"})
        monitors.require(request)
        healthy, page = await deep_health()
        return JSONResponse(page, 200 if healthy else 503)

    async def open_dashboard(request: Request) -> Response:
        return RedirectResponse("/_offload/")

    async def describe(request: Request) -> Response:
        return Response(operations.description(), media_type="application/json")

    async def show_metrics(request: Request) -> Response:
        monitors.require(request)
        kind, page = await metrics()
        return Response(page, media_type=kind)

    return Starlette(
        routes=[
            Route("/", open_dashboard),
            Route("/health", health),
            Route("/metrics", show_metrics),
            Route("/openapi.json", describe),
            *others,
        ],
        lifespan=lifespan,
        exception_handlers=dict.fromkeys((HTTPException, ProxyError, Exception), _in_openais_shape),
    )


async def _unheard(_: Message) -> None:
    """An ASGI `send` that drops the message: an Exchange needs one even if nobody replies."""


async def _in_openais_shape(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        fault = ClientFault(error.detail)
        return Response(fault.body(), error.status_code, error.headers, media_type="application/json")
    # Any error but a ProxyError is a bug. Starlette raises it again, and the outermost edge logs it.
    said = error if isinstance(error, ProxyError) else ProxyError("The proxy failed at this request")
    return Response(said.body(), said.status, media_type="application/json")
