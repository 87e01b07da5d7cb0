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
from ipaddress import IPv6Address, ip_address, ip_network
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

_AUTHORITY = re.compile(r"(?P<host>\[[0-9a-f:.]+\]|[^\[\]:@/?#\s]+)(?::[0-9]*)?")
"""Host and port (RFC 3986, 3.2), in lower case. Browsers never send user information in it."""

_ORIGIN = re.compile(rf"[a-z][a-z0-9+.-]*://{_AUTHORITY.pattern}")
"""RFC 6454, 6.2. `null`, the origin of sandboxed frames and local files, does not match."""


_TELLING = frozenset((b"host", b"origin", b"sec-fetch-site"))
"""The headers that reveal a foreign page."""


def check_origin(headers: Iterable[Header], target: bytes, allowed: Collection[str]) -> None:
    """Raises ForeignSite if a foreign page may have sent the request.

    `target` is the raw request target; `allowed` has lower-case host names in addition to loopback's. A request
    without `Host` (HTTP/1.0) comes from no browser. A known `Origin` outweighs `Sec-Fetch-Site`: to a browser,
    `localhost` and `127.0.0.1` are two sites.
    """
    telling = [(lower, value) for name, value in headers if (lower := name.lower()) in _TELLING]
    said = [(name, value.decode("latin-1").strip().lower()) for name, value in telling]
    hosts = [value for name, value in said if name == b"host"]
    if b"://" in target.partition(b"?")[0]:
        hosts.append(target.decode("latin-1").lower().partition("://")[2].partition("/")[0].partition("?")[0])
    for host in hosts:
        if not _is_known(_AUTHORITY.fullmatch(host), allowed):
            raise ForeignSite(f"This proxy does not serve the host {_shown(host)}. {_HINT}")
    origins = [value for name, value in said if name == b"origin"]
    for origin in origins:
        if not _is_known(_ORIGIN.fullmatch(origin), allowed):
            raise ForeignSite(f"This proxy does not serve pages of the origin {_shown(origin)}. {_HINT}")
    if not origins and (b"sec-fetch-site", "cross-site") in said:
        raise ForeignSite(f"This proxy does not serve pages of other sites. {_HINT}")


_HINT = (
    "The operator can allow a host name, such as host.docker.internal or that of a web page, with "
    "--allowed-hosts NAME,NAME or OFFLOAD_ALLOWED_HOSTS."
)


def _is_known(found: re.Match[str] | None, allowed: Collection[str]) -> bool:
    if found is None:
        return False
    host = found["host"].removesuffix(".")
    return is_loopback(host) or host in allowed or host.removeprefix("[").removesuffix("]") in allowed


def _shown(text: str) -> str:
    return ascii(text[:_LONGEST])


_LONGEST = 100
"""Most characters of the caller's text that an error repeats."""


class Monitors:
    """Who may read metrics and deep health: callers with the admin token, and callers in networks that the operator
    named. Being on this machine is no reason: a reverse proxy on it is there as well.

    `check_origin` raises ForeignSite if a web page in a browser on this machine may have sent the request.
    """

    def __init__(
        self, admin_token: str | None, networks: Iterable[str], check_origin: Callable[[Iterable[Header], bytes], None]
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
            self._check_origin(request.headers.raw, request.scope["extensions"][RAW].target)
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


async def _in_openais_shape(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        fault = ClientFault(error.detail)
        return Response(fault.body(), error.status_code, error.headers, media_type="application/json")
    # Any error but a ProxyError is a bug. Starlette raises it again, and the outermost edge logs it.
    said = error if isinstance(error, ProxyError) else ProxyError("The proxy failed at this request")
    return Response(said.body(), said.status, media_type="application/json")


SECONDS = 2.0
"""Seconds for all checks together, as they run side by side."""

UPSTREAMS = 100
"""Most upstreams that one check asks: policies may name thousands."""


class DeepHealth:
    """Checks for people and monitors whether the store and the upstreams answer now, without sending anybody's key.

    An orchestrator's probes should use plain `/health` instead: without its store a replica still serves requests, so
    taking it out of service gains nothing.
    """

    def __init__(self, store: Guarded, client: UpstreamClient) -> None:
        self._store = store
        self._client = client

    async def check(self, policies: Iterable[Policy]) -> tuple[bool, Mapping[str, Any]]:
        """Return whether everything answers, and a page with each part's fault, null for a part that answers."""
        addresses = sorted({upstream.base_url for policy in policies for upstream in policy.upstreams})[:UPSTREAMS]
        fault, *faults = await asyncio.gather(self._store.check(SECONDS), *map(self._upstream_fault, addresses))
        healthy = fault is None and not any(faults)
        return healthy, {
            "status": "healthy" if healthy else "degraded",
            "store": {"fault": fault, "breaker": self._store.state},
            "upstreams": dict(zip(addresses, faults, strict=True)),
        }

    async def _upstream_fault(self, address: str) -> str | None:
        """Any status below 500 is fine, even 401: the server answers, and we sent no key."""
        try:
            status = (await models(self._client, address, (), SECONDS, read=False)).status
        except UpstreamFault as fault:
            return fault.detail or fault.message
        return f"answered {status}" if status >= 500 else None
