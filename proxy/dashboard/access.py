"""Who may see what: the operator everything, and the holder of a caller's key what was done for that key.

The operator has the admin token, or without one a link that opens once, which `serve` prints. Nobody is trusted for
where a request comes from: a reverse proxy on this machine looks like a browser on it. Whoever logs in gets a cookie.
It is signed with the admin token, so that all replicas take it, or with a secret of the dashboard's file.
"""

from __future__ import annotations

import hmac
import secrets
import sqlite3
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error as BadBase64
from collections.abc import Callable
from contextlib import closing
from hashlib import sha256
from typing import TYPE_CHECKING

import msgspec

from proxy.dashboard.rows import Rows
from proxy.errors import DashboardFault

if TYPE_CHECKING:
    from proxy.settings import Settings

COOKIE = "offload_session"

VALID, VALID_BY_LINK = 12 * 3600, 30 * 86_400
"""Seconds for which a cookie is valid: one that can be had again with a token or key, and that of the link."""

LONGEST = 1_000
"""Most characters of a cookie."""

_DIGEST = 32


class Viewer(msgspec.Struct, frozen=True):
    """Who looks. `namespace` None: the operator, who sees everything."""

    namespace: str | None = None

    @property
    def operator(self) -> bool:
        return self.namespace is None


class Access:
    """Compares tokens, and makes and reads cookies. `secret` returns the file's random bytes, empty without a file."""

    def __init__(
        self, admin_token: str | None, secret: Callable[[], bytes], clock: Callable[[], float] = time.time
    ) -> None:
        self._token = admin_token or ""
        self._secret = secret
        self._clock = clock

    @property
    def has_token(self) -> bool:
        """Whether there is an admin token at all."""
        return bool(self._token)

    def is_admin(self, token: str) -> bool:
        """Return whether this is the admin token. Tries are not limited: callers behind an ingress share its address
        and would lock the operator out, and a random token cannot be guessed anyway."""
        return bool(self._token) and hmac.compare_digest(token.encode(), self._token.encode())

    def cookie(self, namespace: str | None, valid: float = VALID) -> str | None:
        """Return a new cookie's value, or None if there is neither a token nor a file."""
        key = self._key()
        if key is None:
            return None
        said = msgspec.msgpack.encode((int(self._clock() + valid), namespace))
        return urlsafe_b64encode(hmac.digest(key, said, "sha256") + said).decode()

    def viewer(self, cookie: str) -> Viewer | None:
        """Return whom a cookie names, or None if it is not ours or no longer valid."""
        key = self._key()
        if key is None or not cookie or len(cookie) > LONGEST:
            return None
        try:
            raw = urlsafe_b64decode(cookie.encode())
        except (BadBase64, ValueError):
            return None
        signature, said = raw[:_DIGEST], raw[_DIGEST:]
        if not hmac.compare_digest(signature, hmac.digest(key, said, "sha256")):
            return None
        until, namespace = msgspec.msgpack.decode(said, type=tuple[int, str | None])
        return Viewer(namespace) if self._clock() < until else None

    def _key(self) -> bytes | None:
        secret = b"token " + self._token.encode() if self._token else self._secret()
        return hmac.digest(sha256(secret).digest(), b"dashboard", "sha256") if secret else None


def new_link(settings: Settings, address: str) -> str | None:
    """Return a link that opens the dashboard once, or None if there is no file, or a token to log in with. It replaces
    the last one."""
    code = secrets.token_urlsafe(24)
    made = _on_links(settings, lambda rows: rows.set_link(code))
    return f"{address}/_offload/login?once={code}" if made else None


def use_link(settings: Settings, code: str) -> bool:
    """Return whether this code was printed and never used. It cannot be used again."""
    return _on_links(settings, lambda rows: rows.use_link(code))


def _on_links(settings: Settings, work: Callable[[Rows], bool]) -> bool:
    """Return what `work` returns; False if links open nothing, or if the dashboard is off, which says why."""
    if settings.dashboard is None or settings.admin_token:
        return False
    try:
        with closing(Rows(settings.dashboard, settings.dashboard_limit)) as rows:
            return work(rows)
    except (DashboardFault, sqlite3.Error):
        return False
