"""Who may reach this process, from which pages, and how much of it a client may take.

Through a browser, web pages can reach loopback and use the proxy's own key. Any page may POST text to `127.0.0.1`, and
a page whose host name was rebound to `127.0.0.1` can also read the reply. `Origin` or `Sec-Fetch-Site` reveals the
first and `Host` the second: browsers do not let pages set these headers.

`Bounds` counts the bytes of bodies, their time and the connections, once for each process. Connections register a
deadline, and one sweep a second checks them all, so a request that arrives whole costs no timer.
"""

from __future__ import annotations

import asyncio
import hmac
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Any, Protocol

from starlette.requests import Request

from proxy.errors import Forbidden, ForeignSite, Overloaded, ProxyError, UpstreamFault
from proxy.plan.prices import is_loopback
from proxy.policy import Policy
from proxy.requests.exchange import FORWARDED, RAW
from proxy.settings import Settings
from proxy.stores.guarded import Guarded
from proxy.upstream.client import UpstreamClient, models
from proxy.upstream.headers import Header, Headers

try:
    import resource
except ImportError:  # Windows, which has no such limit
    resource = None  # type: ignore[assignment]

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

SWEEP_SECONDS = 1.0
"""Seconds between two checks of the deadlines, or less if a timeout is short."""

TENANTS_SHARE = 2
"""One tenant's share is the limit for all bodies divided by this."""

CONNECTIONS_SHARE = 0.75
"""Fraction of all file descriptors that client connections may take; upstream and the store need the rest."""

COME_BACK = 1
"""`Retry-After` in seconds when too much happens at once. It is short because requests end all the time."""

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
        known = is_loopback(host) or not {host, host.strip("[]")}.isdisjoint(allowed)
        if not (found and known):
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


def permission(method: str, fields: Mapping[bytes, bytes]) -> Headers | None:
    """Return the headers of the answer to a browser that asks whether a page may send a request;
    None if this is no such question (Fetch, 3.2: CORS-preflight request). `fields` has the headers
    in lower case.

    The question has no key, and its answer gives away nothing: who then has no key is refused, and
    only upstream's own words let the page read the reply. So the answer is always yes.
    """
    asked = fields.get(b"access-control-request-method")
    if method != "OPTIONS" or asked is None or b"origin" not in fields:
        return None
    found = Headers([(b"access-control-allow-origin", b"*"), (b"access-control-allow-methods", asked)])
    if wanted := fields.get(b"access-control-request-headers"):
        found.append((b"access-control-allow-headers", wanted))
    if fields.get(b"access-control-request-private-network") == b"true":
        found.append((b"access-control-allow-private-network", b"true"))
    found.append((b"vary", b"access-control-request-method, access-control-request-headers"))
    return found


def bearer(headers: Mapping[str, str]) -> str:
    """Return the token that a request carries, or ""."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def is_admin(admin_token: str, token: str) -> bool:
    """Return whether this is the admin token; "" is none. Tries are not limited: callers behind an ingress share its
    address and would lock the operator out, and a random token cannot be guessed anyway."""
    return bool(admin_token) and hmac.compare_digest(token.encode(), admin_token.encode())


def require_monitor(
    request: Request, admin_token: str, networks: Sequence[IPv4Network | IPv6Network], check_origin: CheckOrigin
) -> None:
    """Raises Forbidden for all but callers with the admin token, and callers in networks that the operator named.

    Being on this machine is no reason: a reverse proxy on it is there as well. Who forwards a request is in no network.
    """
    if is_admin(admin_token, bearer(request.headers)):
        return
    names = request.headers.keys()
    forwarded = any(name.encode() in FORWARDED or name.startswith("x-forwarded-") for name in names)
    if request.client is not None and not forwarded:
        address = ip_address(request.client.host)
        address = (address.ipv4_mapped if isinstance(address, IPv6Address) else None) or address
        if address.is_loopback:
            check_origin(request.headers.raw, request.scope["extensions"][RAW].target)
        if any(address in network for network in networks):
            return
    raise Forbidden(
        "This needs OFFLOAD_ADMIN_TOKEN as bearer token, or --monitor-networks with the network of the caller"
    )


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


# -- bounds --


class TenantPlaces:
    """How many requests and uploads of each tenant are under way in this process."""

    def __init__(self) -> None:
        self._taken: Counter[tuple[str, str]] = Counter()

    @contextmanager
    def held(self, policy: Policy, **shares: int) -> Iterator[None]:
        """Hold a place among the tenant's `requests` or `uploads`, of which there are so many. Raises Overloaded if all
        are taken."""
        places = [(policy.tenant, kind) for kind in shares]
        for place in places:
            most = shares[place[1]]
            if self._taken[place] >= most:
                text = f"More than {most} {place[1]} at once (from `limits.concurrent_requests`); try again"
                raise Overloaded(text, retry_after=COME_BACK)
        self._taken.update(places)
        try:
            yield
        finally:
            self._taken.subtract(places)


class Waiting(Protocol):
    """A connection: `protocol.BoundedProtocol`, which imports this module."""

    def expire(self) -> None: ...
    def refuse(self, error: ProxyError) -> None: ...
    def unfinished(self) -> Inflow | None: ...
    def idle(self) -> bool: ...


class Bounds:
    """Counts the bytes of one process's request bodies and its connections, and keeps their deadlines."""

    def __init__(self, settings: Settings, warn: Callable[[str, str], None]) -> None:
        self.head_seconds = settings.head_timeout
        self.body_seconds = settings.body_timeout
        self.limit = settings.buffered_limit
        self.warn = warn
        self.deadlines: dict[Waiting, float] = {}
        """Deadlines on the loop's clock."""
        self.held = 0
        """Bytes of all bodies, including those whose tenant is not known yet."""
        self._of: Counter[str] = Counter()
        """Bytes held for each tenant."""
        self._connections = 0
        self._most_connections = resource.getrlimit(resource.RLIMIT_NOFILE)[0] * CONNECTIONS_SHARE if resource else -1
        self._sweep_seconds = min(SWEEP_SECONDS, self.head_seconds / 4, self.body_seconds / 4)
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start checking the deadlines in this loop."""
        if self._loop is loop:
            return
        self._loop = loop

        def sweep() -> None:
            now = loop.time()
            for connection in [one for one, deadline in self.deadlines.items() if deadline <= now]:
                self.deadlines.pop(connection, None)
                connection.expire()
            loop.call_later(self._sweep_seconds, sweep)

        loop.call_later(self._sweep_seconds, sweep)

    def opened(self) -> None:
        """Count a new connection. If there are too many, close the one that has been idle for longest.

        Otherwise, clients that open connections and send nothing could keep everybody else out.
        """
        self._connections += 1
        if not 0 <= self._most_connections < self._connections:
            return
        if oldest := next((connection for connection in self.deadlines if connection.idle()), None):
            del self.deadlines[oldest]
            oldest.expire()

    def closed(self) -> None:
        self._connections -= 1

    def charge(self, tenant: str, size: int) -> None:
        """Charge bytes that are already held to a tenant. Raises Overloaded if they exceed its share."""
        share = self.limit // TENANTS_SHARE
        if self._of[tenant] + size > share:
            self._make_room(tenant)
            if self._of[tenant] + size > share:
                raise _full(share, "this tenant's requests")
        self._of[tenant] += size

    def hold(self, tenant: str | None, size: int) -> None:
        """Count bytes that have arrived, before they are kept. Raises Overloaded if there is no room for them."""
        if self.held + size > self.limit:
            self._make_room(None)
            if self.held + size > self.limit:
                raise _full(self.limit, "all requests")
        if tenant is not None:
            self.charge(tenant, size)
        self.held += size

    def release(self, tenant: str | None, size: int) -> None:
        self.held -= size
        if tenant is not None:
            self._of[tenant] -= size

    def _make_room(self, tenant: str | None) -> None:
        """Give up a tenant's bodies, or everybody's, that have been arriving for longer than a body may pause.

        Otherwise, clients that send a byte now and then and never finish could shut everybody else out.
        """
        assert self._loop is not None
        latest = self._loop.time() - self.body_seconds
        for connection in tuple(self.deadlines):
            body = connection.unfinished()
            if body and body.began < latest and tenant in (None, body.tenant):
                body.let_go()
                text = f"The body was not whole within {self.body_seconds:g} seconds, and others need its room; "
                connection.refuse(Overloaded(f"{text}try again", retry_after=COME_BACK))


def _full(limit: int, whose: str) -> Overloaded:
    text = f"The bodies of {whose} would take more than {limit} bytes (from --buffered-limit); try again"
    return Overloaded(text, retry_after=COME_BACK)


class Presence:
    """Whether the client of a connection is still there."""

    def __init__(self) -> None:
        self._watching: set[Callable[[], object]] = set()
        self._left = False

    def watch(self, left: Callable[[], object]) -> Callable[[], object]:
        """Call `left` when the client hangs up, or soon if it already has. Returns a function that cancels this."""
        self._watching.add(left)
        if self._left:
            asyncio.get_running_loop().call_soon(self.leave)
        return lambda: self._watching.discard(left)

    def leave(self) -> None:
        """Tell whoever watches that the client has hung up."""
        self._left = True
        for left in tuple(self._watching):
            left()


class Inflow:
    """One request as it comes in, and the bytes that it holds. The methods are those of `exchange.Incoming`."""

    def __init__(self, bounds: Bounds, presence: Presence | None = None, target: bytes = b"") -> None:
        self.target = target
        self.fault: ProxyError | None = None
        self.tenant: str | None = None
        self.began = asyncio.get_running_loop().time()
        self.watch = (presence or Presence()).watch
        self._bounds = bounds
        self._held = 0

    def charge(self, tenant: str) -> None:
        self._bounds.charge(tenant, self._held)
        self.tenant = tenant

    def hold(self, size: int) -> None:
        self._bounds.hold(self.tenant, size)
        self._held += size

    def release(self, size: int) -> None:
        size = min(size, self._held)
        self._held -= size
        self._bounds.release(self.tenant, size)

    def let_go(self) -> None:
        self.release(self._held)
