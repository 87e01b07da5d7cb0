"""The proxy's own routes and who may reach them: health, metrics, the operations' description, the dashboard.

Through a browser, web pages can reach loopback and use the proxy's own key. Any page may POST text to `127.0.0.1`, and
a page whose host name was rebound to `127.0.0.1` can also read the reply. `Origin` or `Sec-Fetch-Site` reveals the
first and `Host` the second: browsers do not let pages set these headers.
"""

from __future__ import annotations

import asyncio
import hmac
import re
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from proxy import operations
from proxy.errors import ClientFault, Forbidden, ForeignSite, ProxyError, UpstreamFault
from proxy.plan.prices import is_loopback
from proxy.policy import Policy
from proxy.requests.exchange import FORWARDED, RAW
from proxy.stores.guarded import Guarded
from proxy.upstream.client import UpstreamClient, models
from proxy.upstream.headers import Header

if TYPE_CHECKING:
    from starlette.types import Lifespan

    from proxy.settings import Settings

_AUTHORITY = re.compile(r"(?P<host>\[[0-9a-f:.]+\]|[^\[\]:@/?#\s]+)(?::[0-9]*)?")
"""Host and port (RFC 3986, 3.2), in lower case. Browsers never send user information in it."""

_ORIGIN = re.compile(rf"[a-z][a-z0-9+.-]*://{_AUTHORITY.pattern}")
"""RFC 6454, 6.2. `null`, the origin of sandboxed frames and local files, does not match."""

_TELLING = frozenset((b"host", b"origin", b"sec-fetch-site"))
"""The headers that reveal a foreign page."""

_LONGEST = 100
"""Most characters of the caller's text that an error repeats."""

_HINT = (
    "The operator can allow a host name, such as host.docker.internal or that of a web page, with "
    "--allowed-hosts NAME,NAME or OFFLOAD_ALLOWED_HOSTS."
)

CheckOrigin = Callable[[Iterable[Header], bytes], None]
"""Raises ForeignSite if a web page in a browser on this machine may have sent these headers and this target."""

SECONDS = 2.0
"""Seconds for all checks of deep health together, as they run side by side."""

UPSTREAMS = 100
"""Most upstreams that one check asks: policies may name thousands."""


def check_origin(headers: Iterable[Header], target: bytes, allowed: Collection[str]) -> None:
    """Raises ForeignSite if a foreign page may have sent the request.

    `target` is the raw request target; `allowed` has lower-case host names in addition to loopback's. A request
    without `Host` (HTTP/1.0) comes from no browser. A known `Origin` outweighs `Sec-Fetch-Site`: to a browser,
    `localhost` and `127.0.0.1` are two sites.
    """

    def check(said: str, form: re.Pattern[str], what: str) -> None:
        found = form.fullmatch(said)
        host = found["host"].removesuffix(".") if found else ""
        if not found or not (
            is_loopback(host) or host in allowed or host.removeprefix("[").removesuffix("]") in allowed
        ):
            raise ForeignSite(f"This proxy does not serve {what} {said[:_LONGEST]!a}. {_HINT}")

    telling = [(lower, value) for name, value in headers if (lower := name.lower()) in _TELLING]
    said = [(name, value.decode("latin-1").strip().lower()) for name, value in telling]
    for name, value in said:
        if name == b"host":
            check(value, _AUTHORITY, "the host")
    if b"://" in target.partition(b"?")[0]:
        authority = target.decode("latin-1").lower().partition("://")[2].partition("/")[0].partition("?")[0]
        check(authority, _AUTHORITY, "the host")
    origins = [value for name, value in said if name == b"origin"]
    for origin in origins:
        check(origin, _ORIGIN, "pages of the origin")
    if not origins and (b"sec-fetch-site", "cross-site") in said:
        raise ForeignSite(f"This proxy does not serve pages of other sites. {_HINT}")


def require_monitor(
    request: Request, token: str | None, networks: Sequence[IPv4Network | IPv6Network], check_origin: CheckOrigin
) -> None:
    """Raises Forbidden for all but callers with the admin token, and callers in networks that the operator named.

    Being on this machine is no reason: a reverse proxy on it is there as well. Who forwards a request is in no network.
    """
    given = request.headers.get("authorization", "").removeprefix("Bearer ")
    if token and hmac.compare_digest(given.encode(), token.encode()):
        return
    names = request.headers.keys()
    forwarded = any(name.encode() in FORWARDED or name.startswith("x-forwarded-") for name in names)
    if request.client is not None and not forwarded:
        address = ip_address(request.client.host)
        mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
        if address.is_loopback:
            check_origin(request.headers.raw, request.scope["extensions"][RAW].target)
        if any((mapped or address) in network for network in networks):
            return
    raise Forbidden(
        "This needs OFFLOAD_ADMIN_TOKEN as bearer token, or --monitor-networks with the network of the caller"
    )


def own_routes(
    settings: Settings,
    check_origin: CheckOrigin,
    deep_health: Callable[[], Awaitable[tuple[bool, Mapping[str, Any]]]],
    metrics: Callable[[], Awaitable[tuple[str, bytes]]],
    others: Sequence[BaseRoute],
    lifespan: Lifespan[Starlette],
) -> Starlette:
    """Return the application that serves our own routes and the `others`."""
    networks = [*map(ip_network, settings.monitor_networks)]

    async def open_dashboard(request: Request) -> Response:
        return RedirectResponse("/_offload/")

    async def health(request: Request) -> Response:
        if request.query_params.get("deep", "0") in ("", "0", "false"):
            return JSONResponse({"status": "healthy"})
        require_monitor(request, settings.admin_token, networks, check_origin)
        healthy, page = await deep_health()
        return JSONResponse(page, 200 if healthy else 503)

    async def show_metrics(request: Request) -> Response:
        require_monitor(request, settings.admin_token, networks, check_origin)
        kind, page = await metrics()
        return Response(page, media_type=kind)

    async def describe(request: Request) -> Response:
        return Response(operations.description(), media_type="application/json")

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


async def _in_openais_shape(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        fault = ClientFault(error.detail)
        return Response(fault.body(), error.status_code, error.headers, media_type="application/json")
    # Any error but a ProxyError is a bug. Starlette raises it again, and the outermost edge logs it.
    said = error if isinstance(error, ProxyError) else ProxyError("The proxy failed at this request")
    return Response(said.body(), said.status, media_type="application/json")


async def deep_health(
    store: Guarded, client: UpstreamClient, policies: Iterable[Policy]
) -> tuple[bool, Mapping[str, Any]]:
    """Return whether the store and the upstreams answer now, and a page with each part's fault, null if it has none.
    Nobody's key is sent.

    It is for people and monitors. An orchestrator's probes should use plain `/health` instead: without its store a
    replica still serves requests, so taking it out of service gains nothing.
    """

    async def fault_of(address: str) -> str | None:
        try:
            status = (await models(client, address, (), SECONDS, read=False)).status
        except UpstreamFault as fault:
            return fault.detail or fault.message
        return f"answered {status}" if status >= 500 else None  # any other will do, even 401: the server answers

    addresses = sorted({upstream.base_url for policy in policies for upstream in policy.upstreams})[:UPSTREAMS]
    fault, *faults = await asyncio.gather(store.check(SECONDS), *map(fault_of, addresses))
    healthy = fault is None and not any(faults)
    return healthy, {
        "status": "healthy" if healthy else "degraded",
        "store": {"fault": fault, "breaker": store.state},
        "upstreams": dict(zip(addresses, faults, strict=True)),
    }
