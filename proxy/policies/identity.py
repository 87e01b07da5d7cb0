"""Finds who a client is where the policy does not go by its key: by a header, a claim of its token, or the body.

A key that a policy lists vouches for whatever its holder says. Nobody vouches for the callers of default.yaml but
upstream, when it accepts their request. So what upstream does not check must be too long to guess.
"""

from __future__ import annotations

import hmac
from base64 import urlsafe_b64decode
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Raw

from proxy.policies.tenants import KEY_HEADERS, Tenant
from proxy.policy import Identity
from proxy.upstream.headers import Headers

LEAST = 32
"""The fewest characters of a value that neither a listed key nor upstream vouches for; a UUID has 36."""

LONGEST = 16 << 10
"""The most bytes of a member of the body, and of a token, that are looked into."""

_LABEL = "offload-identity-v1"
_OTHER_CREDENTIALS = (*KEY_HEADERS[1:], b"x-goog-api-key", b"cookie")


def known(tenant: Tenant, headers: Headers, members: Mapping[str, Raw] | None = None) -> Tenant | None:
    """Return the tenant with the namespace of the caller's identity, None if the request does not say it.

    `headers` are those that go upstream: it must be able to check what we go by. `members` are the body's.
    """
    by = tenant.policy.identity
    if not by.given or tenant.anonymous:
        return None
    value = _header(by.header, headers) if by.header else _claim(by.jwt, headers) if by.jwt else ""
    if by.body and members is not None:
        value = _member(by.body, members)
    if not value or (len(value) < LEAST and not by.jwt and not tenant.listed):
        return None
    caller = hmac.digest(value.encode("utf-8", "surrogatepass"), f"{_LABEL} {by}".encode(), "sha256").hex()[:16]
    return msgspec.structs.replace(tenant, namespace=f"{tenant.name}-{caller}")


def described(by: Identity, *, listed: bool) -> str:
    """Say by what a policy's clients are known. `listed`: whether it lists their keys."""
    if not by.given:
        return "a client is its key; with another key, it is another client"
    least = "" if listed or by.jwt else f" of at least {LEAST} characters"
    said = f"a client is {by}{least}; without it, its key"
    if listed:
        return said
    return f"{said}. Upstream has to accept it first, and it never opens /grep, /read_file or the dashboard"


def _header(name: str, headers: Headers) -> str:
    """Return the header's value. Upstream may go by another one of several."""
    found = headers.get_all(name.lower().encode())
    return found[0].strip().decode("latin-1") if len(found) == 1 else ""


def _claim(name: str, headers: Headers) -> str:
    """Return a claim of the bearer token, which upstream verifies if it is the request's only credential."""
    [token, *more] = headers.get_all(KEY_HEADERS[0]) or [b""]
    scheme, _, token = token.partition(b" ")
    payload = token.strip().split(b".")[1:2]
    if more or any(map(headers.has, _OTHER_CREDENTIALS)) or scheme.lower() != b"bearer" or not payload:
        return ""
    try:
        return _text(_at(_decoded(urlsafe_b64decode(payload[0] + b"==")), name))
    except ValueError:
        return ""


def _member(path: str, members: Mapping[str, Raw]) -> str:
    first, _, rest = path.partition(".")
    return _text(_at(_decoded(members.get(first, b"null")), rest))


def _at(value: Any, path: str) -> Any:
    """Return what stands at a path, whose names may have dots. A text may be JSON, as in Claude Code's `user_id`."""
    if not path:
        return value
    value = _decoded(value.encode("utf-8", "surrogatepass")) if isinstance(value, str) else value
    if not isinstance(value, dict):
        return None
    ends = [at for at, character in enumerate(path) if character == "."]
    name = next((path[:end] for end in (*ends, len(path)) if path[:end] in value), None)
    return None if name is None else _at(value[name], path[len(name) + 1 :])


def _decoded(raw: bytes | Raw) -> Any:
    try:
        return msgspec.json.decode(raw) if len(memoryview(raw)) <= LONGEST else None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _text(value: Any) -> str:
    said = isinstance(value, str | int) and not isinstance(value, bool)
    return str(value).strip() if said else ""
