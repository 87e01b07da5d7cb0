"""The dashboard at `/_offload/`: what was sent and what it cost, from rows in a file beside the
log.

Requests end as outcomes. `Dashboard.record` queues each of them for a thread that writes
(`writer`), and the pages read what all workers wrote (`queries`).

The operator sees everything, and the holder of a caller's key what was done for that key. The
operator has the admin token, or without one a link that opens once, which `serve` prints. Nobody is
trusted for where a request comes from: a reverse proxy on this machine looks like a browser on it.
Whoever logs in gets a cookie. It is signed with the admin token, so that all replicas take it, or
with a secret of the dashboard's file.
"""

from __future__ import annotations

import asyncio
import hmac
import re
import secrets
import socket
import sqlite3
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from enum import Enum, auto
from functools import partial
from typing import Any, TypeVar

import msgspec
from msgspec.structs import asdict

from proxy.apps.dashboard.fleet import Fleet
from proxy.apps.dashboard.queries import Reader
from proxy.apps.dashboard.rows import Rows, digest
from proxy.apps.dashboard.writer import Writer, Writing
from proxy.errors import DashboardFault, Overloaded, Unauthorized
from proxy.plan.prices import price_of
from proxy.policies import Policies
from proxy.policies.tenants import identify, retention
from proxy.policy import Policy
from proxy.requests.prepared import Prepared
from proxy.server.access import is_admin
from proxy.settings import Settings
from proxy.stores import Store
from proxy.telemetry.outcome import Outcome

T = TypeVar("T")

VALID = 12 * 3600
VALID_BY_LINK = 30 * 86_400
"""Seconds for which a cookie is valid: one that can be had again with a token or key, and that of
the link."""

MISSING = "the proxy was started without --dashboard FILE, or with --dashboard off"

EVERYWHERE = ("0.0.0.0", "::", "")
"""Hosts that stand for all addresses of a machine."""

AT_ONCE = 4
VIEWERS = 32
"""Queries that one viewer may have under way, and all viewers together."""


class WayIn(Enum):
    """What opens the pages to the operator."""

    TOKEN = auto()
    LINK = auto()
    NONE = auto()
    OFF = auto()


class Viewer(msgspec.Struct, frozen=True):
    """Who looks. `namespace` None: the operator, who sees everything."""

    namespace: str | None = None

    @property
    def operator(self) -> bool:
        return self.namespace is None


class Dashboard:
    """The dashboard of one process. Without `settings.dashboard` it records nothing, and its pages
    say so.

    `health` returns the state of this process, with what it believes of the upstreams of some
    namespaces.
    """

    def __init__(
        self,
        settings: Settings,
        policies: Callable[[], Policies],
        health: Callable[[Collection[str]], Awaitable[Mapping[str, Any]]],
    ) -> None:
        self._settings = settings
        self._policies = policies
        self._health = health
        self._writer: Writer | None = None
        if (path := settings.dashboard) is not None:
            kept = settings.dashboard_content
            size = settings.dashboard_limit
            self._writer = Writer(
                path, size, lambda name: retention(name, policies()), content=kept
            )
        self._operators, self._viewers = (
            ThreadPoolExecutor(1, "dashboard-reader") for _ in range(2)
        )
        self._waiting = Counter[str]()  # queries under way, by namespace
        self.access = Access(
            settings.admin_token, lambda: self._writer.secret if self._writer else b""
        )
        self.replica = f"{socket.gethostname()}:{settings.port}"
        """What the pages call this replica."""

    # -- what requests call --

    def record(self, outcome: Outcome, attempt: Prepared | None = None) -> None:
        """Queue a row for a request. Takes a few microseconds, and never fails."""
        if self._writer is not None:
            self._writer.record(outcome, attempt)

    # -- its life --

    def start(self) -> None:
        if self._writer is not None:
            self._writer.start()

    def close(self) -> None:
        """Write what waits. Queries that run end by themselves."""
        for pool in (self._operators, self._viewers):
            pool.shutdown(wait=False, cancel_futures=True)
        if self._writer is not None:
            self._writer.close()

    async def exchange(self, store: Store, warn: Callable[[str, str], None]) -> None:
        """Exchange sums with the other replicas that use this store, until cancelled."""
        settings = self._settings
        path = self._settings.dashboard
        if path is not None and not self.state()["off"]:
            host = settings.host if settings.host not in EVERYWHERE else socket.gethostname()
            url = (
                settings.replica_url
                or f"http://{f'[{host}]' if ':' in host else host}:{settings.port}"
            )
            upstreams = {
                one.base_url for policy in self._policies().all() for one in policy.upstreams
            }
            rows = partial(Rows, path, settings.dashboard_limit)
            await Fleet(rows, store, self.replica, url, warn, upstreams=upstreams).run()

    # -- what pages call --

    def state(self) -> dict[str, Any]:
        """Return how the writing goes."""
        state = self._writer.state if self._writer else Writing(off=True, fault=MISSING)
        return {**asdict(state), "file": str(self._settings.dashboard) if self._writer else None}

    async def health(self) -> Mapping[str, Any]:
        """Return the state of this process, and how the writing goes."""
        state = self.state()
        namespaces = list[str]()
        try:
            namespaces = await self.read(Reader.namespaces, Viewer())
        except DashboardFault as fault:
            state["fault"] = state["fault"] or str(fault)
        return {"dashboard": state, **await self._health(namespaces)}

    async def read(self, query: Callable[[Reader], T], viewer: Viewer) -> T:
        """Run a query in a thread. Viewers wait for each other, and the operator for none of them.
        Raises DashboardFault, and Overloaded if too many wait."""
        state = self.state()
        path = self._settings.dashboard
        who = viewer.namespace or ""
        if state["off"] or path is None:
            raise DashboardFault(state["fault"])
        if who and (self._waiting[who] >= AT_ONCE or self._waiting.total() >= VIEWERS):
            raise Overloaded("Too many viewers at once; try again")

        def run() -> T:
            with closing(Reader(path, viewer.namespace)) as reader:
                return query(reader)

        self._waiting[who] += bool(who)
        try:
            pool = self._operators if viewer.operator else self._viewers
            return await asyncio.get_running_loop().run_in_executor(pool, run)
        except RuntimeError as error:
            raise DashboardFault("The process ends") from error
        finally:
            self._waiting[who] -= bool(who)
            self._waiting += Counter()  # drops those that are at 0

    async def opens(self, code: str) -> bool:
        """Return whether this is the code of a link that was printed and never used."""
        return await asyncio.to_thread(use_link, self._settings, code)

    async def way_in(self) -> WayIn:
        if self.access.token:
            return WayIn.TOKEN
        if self.state()["off"]:
            return WayIn.OFF
        waits = await asyncio.to_thread(waits_for_link, self._settings)
        return WayIn.LINK if waits else WayIn.NONE

    async def owner(self, key: str) -> Viewer:
        """Return whom a caller's key lets in. Raises Unauthorized and DashboardFault."""
        tenant = identify([(b"authorization", b"Bearer " + key.encode())], self._policies())
        if tenant.anonymous or (
            tenant.policy.share_namespace and tenant.policy is self._policies().default
        ):
            raise Unauthorized(
                "This key is not listed in a policy, and its tenant's callers share one namespace."
            )
        viewer = Viewer(tenant.namespace)
        if not await self.read(Reader.any, viewer):
            raise Unauthorized("Nothing is kept of this key's requests.")
        return viewer

    def shows_content(self, tenant: str) -> bool:
        """Whether texts may be shown now, whatever the file has."""
        policy = self._policy(tenant)
        return self._settings.dashboard_content and policy is not None and policy.dashboard_content

    def price(self, tenant: str, model: str) -> float | None:
        """Return the money for a million plain input tokens, if the tenant's policy or the price
        list says; None, too, where they cost nothing."""
        policy = self._policy(tenant)
        if policy is None:
            return price_of("", model).input_price
        parts = (one.for_model(model) for one in (policy, *policy.by_api.values()))
        return next(filter(None, (part.offload.input_price for part in parts)), None)

    def _policy(self, tenant: str) -> Policy | None:
        return next((one for one in self._policies().all() if one.tenant == tenant), None)


class Access:
    """Compares tokens, and makes and reads cookies. `secret` returns the file's random bytes, empty
    without a file."""

    def __init__(
        self,
        admin_token: str | None,
        secret: Callable[[], bytes],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.token = admin_token or ""
        self._secret = secret
        self._clock = clock

    @property
    def cookie_name(self) -> str:
        """Another one for each file whose secret signs: to browsers, all ports of a host are one
        site, and one proxy's login would end that of another. It says nothing of the token, because
        who logs out gets it, too."""
        secret = b"" if self.token else self._secret()
        return f"offload_session_{hmac.digest(secret, b'name', 'sha256')[:4].hex()}"

    def is_admin(self, token: str) -> bool:
        """Return whether this is the admin token."""
        return is_admin(self.token, token)

    def cookie(self, viewer: Viewer, valid: float = VALID) -> str:
        """Return a new cookie's value. Raises DashboardFault if there is neither a token nor a file
        to sign it."""
        said = msgspec.msgpack.encode((int(self._clock() + valid), viewer.namespace))
        if not (signature := self._signature(said)):
            raise DashboardFault("The dashboard's file is not open yet: try again")
        return urlsafe_b64encode(signature + said).decode()

    def viewer(self, cookie: str) -> Viewer | None:
        """Return whom a cookie names, or None if it is not ours or no longer valid."""
        try:
            raw = urlsafe_b64decode(cookie.encode())
        except ValueError:
            return None
        signature = raw[:32]
        said = raw[32:]
        if not said or not hmac.compare_digest(signature, self._signature(said)):
            return None
        until, namespace = msgspec.msgpack.decode(said, type=tuple[int, str | None])
        return Viewer(namespace) if self._clock() < until else None

    def _signature(self, said: bytes) -> bytes:
        """Return 32 bytes; none if there is nothing to sign with."""
        secret = self.token.encode() or self._secret()
        return hmac.digest(secret, b"dashboard " + said, "sha256") if secret else b""


def invitation(settings: Settings, address: str) -> str:
    """Return a line for whoever starts the proxy, with a link that opens the dashboard once; "" if
    there is none. No browser may name an address that stands for all of a machine's."""
    reached = settings.replica_url or re.sub(r"//(0\.0\.0\.0|\[::\])", "//localhost", address)
    link = new_link(settings, reached.rstrip("/"))
    return f"the dashboard opens, once, at {link}" if link else ""


def new_link(settings: Settings, address: str) -> str | None:
    """Return a link that opens the dashboard once, or None if there is no file, or a token to log
    in with. It replaces the last one."""
    code = secrets.token_urlsafe(24)
    made = _updates(settings, "link = ?", digest(code))
    return f"{address}/_offload/login?once={code}" if made else None


def use_link(settings: Settings, code: str) -> bool:
    """Return whether this code was printed and never used. It cannot be used again."""
    return _updates(settings, "link = NULL WHERE link = ?", digest(code))


def waits_for_link(settings: Settings) -> bool:
    """Return whether a link was printed that nobody has used."""
    return _updates(settings, "link = link WHERE link IS NOT NULL")


def _updates(settings: Settings, change: str, *values: bytes) -> bool:
    """Return whether there was a link to change; False if links open nothing, or if the dashboard
    is off, which says why."""
    if settings.dashboard is None or settings.admin_token:
        return False
    try:
        with closing(Rows(settings.dashboard, settings.dashboard_limit)) as rows:
            return rows.connection.execute(f"UPDATE secret SET {change}", values).rowcount == 1
    except (DashboardFault, sqlite3.Error):
        return False
