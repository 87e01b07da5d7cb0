"""Who may reach this process, from which pages, and how much of it a client may take.

Through a browser, web pages can reach loopback and use the proxy's own key. Any page may POST text
to `127.0.0.1`, and a page whose host name was rebound to `127.0.0.1` can also read the reply.
`Origin` or `Sec-Fetch-Site` reveals the first and `Host` the second: browsers do not let pages set
these headers.

`Bounds` counts the bytes of bodies, their time and the connections, once for each process.
Connections register a deadline, and one sweep a second checks them all, so a request that arrives
whole costs no timer.
"""

from __future__ import annotations

import asyncio
import hmac
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address
from operator import itemgetter
from typing import Any, Protocol

from starlette.requests import Request

from proxy.errors import Forbidden, ForeignSite, Overloaded, ProxyError, UpstreamFault
from proxy.lru import Lru
from proxy.plan.prices import is_loopback
from proxy.policies.tenants import Tenant
from proxy.policy import Policy
from proxy.requests.exchange import FORWARDED, RAW, Account
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
"""Fraction of all file descriptors that client connections may take; upstream and the store need
the rest."""

KNOWN_SHARE = 2
NEW_SHARE = 4
"""One caller of `default.yaml` may take its tenant's share divided by the first number, or by the
second one until upstream has accepted something of it."""

LEAST_PLACES = 4
"""The fewest places of a share. A tenant with fewer places gives all of them."""

UPLOADS_SHARE = 4
"""A tenant's uploads under way may take its places divided by this."""

MOST_CALLERS = 20_000
"""Callers that upstream has accepted something of, and that are remembered."""

SLOW_SECONDS = 1.0
"""Seconds after which a body that is not whole gives up its place to a request without one."""

COME_BACK = 1
"""`Retry-After` in seconds when too much happens at once. It is short because requests end all the
time."""

CheckOrigin = Callable[[Iterable[Header], bytes], None]
"""Raises ForeignSite if a web page in a browser on this machine may have sent these headers and
this target."""

SECONDS = 2.0
"""Seconds for all checks of deep health together, as they run side by side."""

UPSTREAMS = 100
"""Most upstreams that one check asks: policies may name thousands."""


def check_origin(headers: Iterable[Header], target: bytes, allowed: Collection[str]) -> None:
    """Raises ForeignSite if a foreign page may have sent the request.

    `target` is the raw request target; `allowed` has lower-case host names in addition to
    loopback's. A request without `Host` (HTTP/1.0) comes from no browser. A known `Origin`
    outweighs `Sec-Fetch-Site`: to a browser, `localhost` and `127.0.0.1` are two sites.
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
        authority = (
            target.decode("latin-1").lower().partition("://")[2].partition("/")[0].partition("?")[0]
        )
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
    found = Headers(
        [(b"access-control-allow-origin", b"*"), (b"access-control-allow-methods", asked)]
    )
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
    """Return whether this is the admin token; "" is none. Tries are not limited: callers behind an
    ingress share its address and would lock the operator out, and a random token cannot be guessed
    anyway."""
    return bool(admin_token) and hmac.compare_digest(token.encode(), admin_token.encode())


def require_monitor(
    request: Request,
    admin_token: str,
    networks: Sequence[IPv4Network | IPv6Network],
    check_origin: CheckOrigin,
) -> None:
    """Raises Forbidden for all but callers with the admin token, and callers in networks that the
    operator named.

    Being on this machine is no reason: a reverse proxy on it is there as well. Who forwards a
    request is in no network.
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
    """Return whether the store and the upstreams answer now, and a page with each part's fault,
    null if it has none. Nobody's key is sent.

    It is for people and monitors. An orchestrator's probes should use plain `/health` instead:
    without its store a replica still serves requests, so taking it out of service gains nothing.
    """

    async def fault_of(address: str) -> str | None:
        try:
            status = (await models(client, address, (), SECONDS, read=False)).status
        except UpstreamFault as fault:
            return fault.detail or fault.message
        # any other will do, even 401: the server answers
        return f"answered {status}" if status >= 500 else None

    addresses = sorted({upstream.base_url for policy in policies for upstream in policy.upstreams})[
        :UPSTREAMS
    ]
    fault, *faults = await asyncio.gather(store.check(SECONDS), *map(fault_of, addresses))
    healthy = fault is None and not any(faults)
    return healthy, {
        "status": "healthy" if healthy else "degraded",
        "store": {"fault": fault, "breaker": store.state},
        "upstreams": dict(zip(addresses, faults, strict=True)),
    }


# -- bounds --


class Shares:
    """How much of this process each caller may take. Nobody but upstream knows the keys of
    `default.yaml`'s callers, so one that upstream has accepted nothing of has a small share, and so
    have all of these together."""

    def __init__(self) -> None:
        self._accepted: Lru[str, bool] = Lru(MOST_CALLERS, MOST_CALLERS)

    def accept(self, tenant: Tenant) -> None:
        """Note that upstream has accepted a request of this caller."""
        if not tenant.listed:
            self._accepted.put(tenant.namespace, True, 1)

    def accounts(self, tenant: Tenant) -> list[Account]:
        """Return the accounts of a caller's requests."""
        most = tenant.policy.limits.concurrent_requests
        found = [Account(tenant.name, "this tenant's requests", most, TENANTS_SHARE)]
        if tenant.listed:
            return found
        known = self._accepted.get(tenant.namespace) is not None
        own = KNOWN_SHARE if known else NEW_SHARE
        part = TENANTS_SHARE * own
        found.append(
            Account(f"{tenant.namespace}/one", "one caller's requests", _share(most, own), part)
        )
        if not known:
            whose = "all requests of callers that upstream has accepted none of"
            found.append(Account(f"{tenant.name}/new", whose, _share(most, 2), TENANTS_SHARE * 2))
        return found

    @staticmethod
    def uploads(tenant: Tenant) -> list[Account]:
        """Return the account of uploads, which are forwarded while they arrive: slow senders cannot
        shut out the tenant's other requests."""
        most = max(1, tenant.policy.limits.concurrent_requests // UPLOADS_SHARE)
        return [Account(f"{tenant.name}/uploads", "this tenant's uploads", most)]


def _share(most: int, part: int) -> int:
    """Return a caller's places: some at least, however few its tenant has."""
    return max(min(most, LEAST_PLACES), most // part)


class Waiting(Protocol):
    """A connection: `protocol.BoundedProtocol`, which imports this module."""

    def expire(self) -> None: ...
    def refuse(self, error: ProxyError) -> None: ...
    def evict(self, error: ProxyError) -> None: ...
    def unfinished(self) -> Inflow | None: ...
    def idle(self) -> bool: ...


class Bounds:
    """Counts the bytes of one process's request bodies and its connections, and keeps their
    deadlines."""

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
        """Bytes held for each account."""
        self._places: Counter[str] = Counter()
        """Requests under way of each account."""
        self._none_slow: dict[str, float] = {}
        """Account without a free place → the time until which none of its bodies can be a slow
        one."""
        self._connections = 0
        self._most_connections = (
            resource.getrlimit(resource.RLIMIT_NOFILE)[0] * CONNECTIONS_SHARE if resource else -1
        )
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

    def opened(self, newcomer: Waiting) -> None:
        """Count a new connection. If there are too many, close the one that has been idle for
        longest, or else refuse the body that has been arriving for longest, or else the newcomer.

        Otherwise, clients that open connections and send little could keep everybody else out.
        """
        self._connections += 1
        if not 0 <= self._most_connections < self._connections:
            return
        if oldest := next((connection for connection in self.deadlines if connection.idle()), None):
            del self.deadlines[oldest]
            oldest.expire()
            return
        most = int(self._most_connections)
        text = f"More than {most} connections at once (three quarters of the file descriptors, `ulimit -n`); try again"
        self.warn("connections", text)
        (self._longest_arriving() or newcomer).evict(Overloaded(text, retry_after=COME_BACK))

    def _longest_arriving(self) -> Waiting | None:
        """Return the connection whose body has been arriving for longest."""
        found = [
            (body.began, connection)
            for connection in self.deadlines
            if (body := connection.unfinished())
        ]
        return min(found, key=itemgetter(0))[1] if found else None

    def _slow(self, account: str) -> Waiting | None:
        """Return the connection of this account whose body has been arriving for longest, if that
        is not forwarded and slow."""
        assert self._loop is not None
        now = self._loop.time()
        if now < self._none_slow.get(account, now):
            return None
        arriving = [
            (body.began, connection)
            for connection in self.deadlines
            if (body := connection.unfinished()) and account in body.names and not body.forwarded
        ]
        began, longest = min(arriving, key=itemgetter(0), default=(now, None))
        if began + SLOW_SECONDS < now:
            return longest
        self._none_slow[account] = began + SLOW_SECONDS
        return None

    def closed(self) -> None:
        self._connections -= 1

    def enter(self, account: Account) -> None:
        """Take a place, if need be that of the body that has been arriving for longest. Raises
        Overloaded if there is no slow one."""
        if self._places[account.name] >= account.places:
            text = f"{account.whose} are more than {account.places} at once (from `limits.concurrent_requests`)"
            error = Overloaded(f"{text[0].upper()}{text[1:]}; try again", retry_after=COME_BACK)
            slow = self._slow(account.name)
            if slow is None:
                raise error
            slow.refuse(error)
        self._places[account.name] += 1

    def leave(self, account: Account) -> None:
        self._places[account.name] -= 1
        if not self._places[account.name]:
            del self._places[account.name]
            self._none_slow.pop(account.name, None)

    def charge(self, account: Account, size: int, own: int = 0) -> None:
        """Charge bytes to an account, of a request that has charged `own` bytes already. Raises
        Overloaded if they exceed its share. One request at a time has room in each, so that a
        caller can show upstream what it has."""
        if not account.part:
            return
        share = self.limit // account.part
        name = account.name
        alone = account.part > TENANTS_SHARE

        def exceeds() -> bool:
            return self._of[name] + size > share and not (alone and self._of[name] == own)

        if exceeds():
            self._make_room(name)
            if exceeds():
                raise _full(share, account.whose)
        self._of[name] += size

    def discharge(self, account: Account, size: int) -> None:
        if account.part:
            self._of[account.name] -= size
            if not self._of[account.name]:
                del self._of[account.name]

    def hold(self, size: int) -> None:
        """Count bytes that have arrived, before they are kept. Raises Overloaded if there is no
        room for them."""
        if self.held + size > self.limit:
            self._make_room(None)
            if self.held + size > self.limit:
                raise _full(self.limit, "all requests")
        self.held += size

    def release(self, size: int) -> None:
        self.held -= size

    def _make_room(self, account: str | None) -> None:
        """Give up an account's bodies, or everybody's, that have been arriving for longer than a
        body may pause.

        Otherwise, clients that send a byte now and then and never finish could shut everybody else
        out.
        """
        assert self._loop is not None
        latest = self._loop.time() - self.body_seconds
        for connection in tuple(self.deadlines):
            body = connection.unfinished()
            if body and body.began < latest and account in (None, *body.names):
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
        """Call `left` when the client hangs up, or soon if it already has. Returns a function that
        cancels this."""
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
    """One request as it comes in, and the bytes that it holds. The methods are those of
    `exchange.Incoming`."""

    def __init__(
        self, bounds: Bounds, presence: Presence | None = None, target: bytes = b""
    ) -> None:
        self.target = target
        self.fault: ProxyError | None = None
        self.began = asyncio.get_running_loop().time()
        self.watch = (presence or Presence()).watch
        self._bounds = bounds
        self._accounts: list[Account] = []
        self._held = 0

    @property
    def names(self) -> list[str]:
        """The names of its accounts."""
        return [account.name for account in self._accounts]

    @property
    def forwarded(self) -> bool:
        """Whether the body goes upstream while it arrives."""
        return any(not account.part for account in self._accounts)

    def admit(self, accounts: Sequence[Account]) -> None:
        for account in accounts:
            self._bounds.enter(account)
            try:
                self._bounds.charge(account, self._held)
            except Overloaded:
                self._bounds.leave(account)
                raise
            self._accounts.append(account)

    def hold(self, size: int) -> None:
        self._bounds.hold(size)
        charged: list[Account] = []
        try:
            for account in self._accounts:
                self._bounds.charge(account, size, self._held)
                charged.append(account)
        except Overloaded:
            for account in charged:
                self._bounds.discharge(account, size)
            self._bounds.release(size)
            raise
        self._held += size

    def release(self, size: int) -> None:
        size = min(size, self._held)
        self._held -= size
        self._bounds.release(size)
        for account in self._accounts:
            self._bounds.discharge(account, size)

    def let_go(self) -> None:
        self.release(self._held)
        accounts = self._accounts
        self._accounts = []
        for account in accounts:
            self._bounds.leave(account)
