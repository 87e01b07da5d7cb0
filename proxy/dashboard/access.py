"""Who may see what: the operator everything, and the holder of a caller's key what was done for that key.

The operator is on this machine, or has the admin token. Others log in through a form, and get a cookie that is signed
with a secret of the dashboard's file. So it is valid in every worker, and no longer once the admin token changes.
"""

from __future__ import annotations

import hmac
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error as BadBase64
from collections.abc import Callable
from hashlib import sha256

import msgspec

COOKIE = "offload_session"

VALID = 12 * 3600
"""Seconds for which a cookie is valid."""

LONGEST = 1_000
"""Most characters of a cookie."""

_DIGEST = 32


class Viewer(msgspec.Struct, frozen=True):
    """Who looks. `namespace` None: the operator, who sees everything."""

    namespace: str | None = None
    until: float = float("inf")
    """When the cookie ends, in seconds since the epoch."""

    @property
    def operator(self) -> bool:
        return self.namespace is None


class Access:
    """Compares tokens, and makes and reads cookies. `secret` returns the file's random bytes, empty without a file."""

    def __init__(
        self, admin_token: str | None, secret: Callable[[], bytes], clock: Callable[[], float] = time.time
    ) -> None:
        self._token = admin_token
        self._secret = secret
        self._clock = clock

    @property
    def has_token(self) -> bool:
        """Whether there is an admin token at all."""
        return bool(self._token)

    def is_admin(self, token: str) -> bool:
        """Return whether this is the admin token. Tries are not limited: callers behind an ingress share its address
        and would lock the operator out, and a random token cannot be guessed anyway."""
        return bool(self._token) and hmac.compare_digest(token.encode(), (self._token or "").encode())

    def cookie(self, namespace: str | None) -> str | None:
        """Return a new cookie's value, or None if the dashboard has no file."""
        key = self._key()
        if key is None:
            return None
        said = msgspec.msgpack.encode((int(self._clock()) + VALID, namespace))
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
        return Viewer(namespace, until) if self._clock() < until else None

    def _key(self) -> bytes | None:
        secret = self._secret()
        return hmac.digest(secret, sha256((self._token or "").encode()).digest(), "sha256") if secret else None
