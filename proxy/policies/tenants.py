"""Finds the tenant of a request and its caller, and decides which paths it may use. Does no I/O.

A client is known by its key, or where the policy does not go by that, by a header, a claim of its
token, or the body. A key that a policy lists vouches for whatever its holder says. Nobody vouches
for the callers of default.yaml but upstream, when it accepts their request. So what upstream does
not check must be too long to guess.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from base64 import urlsafe_b64decode
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any
from urllib.parse import unquote_to_bytes

import msgspec
from msgspec import Raw

from proxy.dialects.messages import MESSAGES
from proxy.errors import Unauthorized
from proxy.policy import Identity, Policy, Upstream
from proxy.stores import CHECKS
from proxy.upstream.headers import Header, Headers

_NAMESPACE = b"offload-namespace-v1"
_IDENTITY = "offload-identity-v1"

CALLER = re.compile(r"-(?:[0-9a-f]{16}|anonymous)$")
"""The end of one caller's namespace. No tenant's name ends like this, because `proxy.policies`
rejects it."""

CHECKED = 3600.0
"""Seconds after which what a check of the store could not delete goes."""

LEAST = 32
"""The fewest characters of an identity that anybody could write; a UUID has 36. With a listed key,
or in a token, it may be shorter."""

LONGEST = 16 << 10
"""The most bytes of a member of the body, and of a token, that are looked into."""

_AUTHORIZATION = b"authorization"
_X_API_KEY = b"x-api-key"
KEY_HEADERS = (_AUTHORIZATION, b"api-key", _X_API_KEY)
"""The headers that carry a client's key, in order of preference: OpenAI's, Azure's, Anthropic's."""
_OTHER_CREDENTIALS = (
    *KEY_HEADERS[1:],
    b"x-goog-api-key",
    b"x-litellm-api-key",
    b"ocp-apim-subscription-key",
    b"cookie",
)
_NO_CREDENTIALS = re.compile(rb"[^?]*(?:\?(?:(?:api-version|beta)=[\w.-]*&?)*)?")
"""A path and query without a credential, such as Azure's `subscription-key`."""

_PREFIX = rb"(?:/v1|/openai(?:/v1|/deployments/[^/]+)?)?"
_INFERENCE = re.compile(
    _PREFIX + rb"/(?:chat/completions|completions|embeddings|responses(?:/compact)?)"
)
_MESSAGES = re.compile(rb"(?:/v1)*/messages(?:/count_tokens)?")
"""Anthropic's, whose clients append `/v1` even to a base URL that has it."""
_MODELS = re.compile(_PREFIX + rb"/models")

_DECODINGS = 4
"""A path still percent-encoded after this many decodings is refused, because each decoding costs
time."""


class Policies(msgspec.Struct, frozen=True):
    """One set of policies. `default` applies to keys that no file names. If it is None, they are
    refused."""

    default: Policy | None
    named: tuple[Policy, ...]
    by_digest: Mapping[bytes, Policy]
    """Policies by the SHA-256 of the client's key."""
    warnings: tuple[str, ...] = ()
    """What is written in the files without an effect, each with its file and line."""

    def __repr__(self) -> str:
        return f"Policies({', '.join(policy.tenant for policy in self.all())})"

    def all(self) -> tuple[Policy, ...]:
        return self.named if self.default is None else (self.default, *self.named)

    def tenant_for_key(self, key: bytes | None) -> Policy | None:
        """Return the policy of this key, else the default policy. None means that the caller is
        refused."""
        if key is None:
            return self.default
        # A table lookup is safe without a constant-time comparison. Its timing can only reveal
        # something about the digest, which no caller can steer towards that of a key. And Python
        # compares bytes only after a hash with a random seed has matched.
        return self.by_digest.get(hashlib.sha256(key).digest(), self.default)


class Tenant(msgspec.Struct, frozen=True, dict=True):
    """The tenant and caller of a request. `key_header` is the lower-case name of the header with
    the caller's key."""

    policy: Policy
    namespace: str
    anonymous: bool = False
    """The request had no key. All such callers share one namespace."""
    listed: bool = False
    """A policy lists the caller's key."""
    key_header: bytes = _AUTHORIZATION

    @property
    def name(self) -> str:
        return self.policy.tenant

    @cached_property
    def lends_key(self) -> bool:
        """Whether some requests go upstream with the tenant's key instead of the caller's own."""
        return any(upstream.api_key is not None for upstream in self.policy.upstreams)

    def for_api(self, name: str) -> Tenant:
        policy = self.policy.for_api(name)
        return self if policy is self.policy else msgspec.structs.replace(self, policy=policy)

    def credential(self, upstream: Upstream, *, anthropic: bool = False) -> Header | None:
        """Return the header that replaces all the client's credentials, or None to pass those on.

        The tenant's key goes into the header that carried the client's key, because an Azure client
        uses the header that an Azure upstream reads. Anthropic reads keys from one header only, so
        a request for its API has that one. `upstream` is the policy's upstream for the request's
        model.
        """
        if upstream.api_key is None:
            return None
        key = upstream.api_key.encode("ascii")
        header = _X_API_KEY if anthropic else self.key_header
        return header, b"Bearer " + key if header == _AUTHORIZATION else key


def identify(headers: Iterable[Header], policies: Policies) -> Tenant:
    """Return the tenant of a request with these headers (raw, in any case).

    If there are several keys, use the first that a policy names, else the first. Raises
    Unauthorized, with advice in its text, if no policy applies.
    """
    given = [
        (lower, value.strip()) for name, value in headers if (lower := name.lower()) in KEY_HEADERS
    ]
    candidates = []
    for header in KEY_HEADERS:
        for name, value in given:
            key = value
            # a value without `Bearer` also identifies the caller, so it counts as a whole
            if header == _AUTHORIZATION:
                scheme, _, token = value.partition(b" ")
                key = token.strip() if scheme.lower() == b"bearer" else value
            if name == header and key:
                candidates.append((header, key, policies.tenant_for_key(key)))
    if not candidates:  # for example, in front of a local model that needs none
        if policies.default is None:
            raise Unauthorized(
                "This proxy serves known API keys only, and the request has none. "
                "Send yours as `Authorization: Bearer KEY`, `api-key: KEY` or `x-api-key: KEY`."
            )
        return Tenant(policies.default, namespace(policies.default, None), anonymous=True)
    header, key, policy = next(
        (found for found in candidates if found[2] is not policies.default), candidates[0]
    )
    if policy is None:
        raise Unauthorized(
            "This API key belongs to no tenant of this proxy. Its operator can add the key's SHA-256 to `api_keys` "
            "of a policy, or serve every key with a default.yaml."
        )
    return Tenant(
        policy, namespace(policy, key), listed=policy is not policies.default, key_header=header
    )


def namespace(policy: Policy, key: bytes | None) -> str:
    """Return a caller's namespace for records: the tenant's name and a digest that only the key's
    holder can derive."""
    if policy.share_namespace:
        return policy.tenant
    caller = hmac.digest(key, _NAMESPACE, "sha256").hex()[:16] if key is not None else "anonymous"
    return f"{policy.tenant}-{caller}"


def tenant_of(namespace: str) -> str:
    return CALLER.sub("", namespace)


def policy_of(namespace: str, policies: Policies) -> Policy | None:
    """Return the policy of a namespace's tenant, or None if it is gone."""
    owners = {namespace, tenant_of(namespace)}
    return next((policy for policy in policies.all() if policy.tenant in owners), None)


def retention(namespace: str, policies: Policies) -> float | None:
    """Return for how many seconds to keep a namespace's records. None means for ever, also if its
    policy is gone."""
    if namespace == CHECKS:
        return CHECKED
    policy = policy_of(namespace, policies)
    return policy.retention if policy else None


def allowed(path: bytes, policy: Policy, method: str) -> bool:
    """Return whether a request for `path` (raw, without the query) may go upstream.

    A path with a dot segment may not. With the client's own key, every other path may. With the
    tenant's key, only inference, the list of models and the paths in `relay` may, because that key
    also gives access to other callers' data.
    """
    if _climbs(path):
        return False
    if policy.upstream.api_key is None:
        return True
    plain = path.removesuffix(b"/")
    if method == "POST" and any(
        paths.fullmatch(plain) for paths in (_INFERENCE, _MESSAGES, MESSAGES.vertex)
    ):
        return True
    if method in ("GET", "HEAD") and _MODELS.fullmatch(plain):
        return True
    spellings = {path.decode("latin-1"), path.removeprefix(b"/v1").decode("latin-1")}
    return any(fnmatchcase(spelling, glob) for spelling in spellings for glob in policy.relay)


def _climbs(path: bytes) -> bool:
    """Return whether a server that decodes this path, once or more, could find a `.` or `..`
    segment in it."""
    if b"." not in path and b"%" not in path:
        return False
    for _ in range(_DECODINGS):
        encoded = path
        path = unquote_to_bytes(encoded)
        if path == encoded:
            segments = re.split(rb"[/\\]", path)
            return any(segment.partition(b";")[0] in (b".", b"..") for segment in segments)
    return True


# -- by what else a client is known --


def identified(
    tenant: Tenant, headers: Headers, members: Mapping[str, Raw] | None = None, target: bytes = b""
) -> Tenant | None:
    """Return the tenant with the namespace of the caller's identity, None if the request does not
    say it.

    `headers` are those that go upstream: it must be able to check what we go by. `members` are the
    body's.
    """
    by = tenant.policy.identity
    value = ""
    if not by.given or tenant.anonymous:
        return None
    if by.header:
        # Several are one value (RFC 9110, 5.3): a second one makes nobody another client, or the
        # key itself.
        given = map(bytes.strip, headers.get_all(by.header.lower().encode()))
        value = b", ".join(filter(None, given)).decode("utf-8", "surrogateescape")
    elif by.jwt and _NO_CREDENTIALS.fullmatch(target):
        value = _claim(by.jwt, headers)
    elif by.body and members is not None:
        first, _, rest = by.body.partition(".")
        value = _text(_at(_decoded(members.get(first, b"null")), rest))
    found = namespace_as(tenant, value)
    return msgspec.structs.replace(tenant, namespace=found) if found else None


def namespace_as(tenant: Tenant, value: str) -> str | None:
    """Return the namespace of a caller whose identity has this value; None if callers are not known
    by such a value."""
    by = tenant.policy.identity
    said = value.encode("utf-8", "surrogatepass")
    if not by.given or not value or (len(value) < LEAST and not by.jwt and not tenant.listed):
        return None
    return f"{tenant.name}-{hmac.digest(said, f'{_IDENTITY} {by}'.encode(), 'sha256').hex()[:16]}"


def described(by: Identity, *, listed: bool) -> str:
    """Say by what a policy's clients are known. `listed`: whether it lists their keys."""
    if not by.given:
        return "a client is its key; with another key, it is another client"
    least = "" if listed or by.jwt else f" of at least {LEAST} characters"
    said = f"a client is {by}{least}; without it, its key"
    if listed:
        return said
    return f"{said}. Upstream has to accept it first, and it never opens /grep, /read_file or the dashboard"


def _claim(name: str, headers: Headers) -> str:
    """Return a claim of the bearer token, which upstream verifies if it is the request's only
    credential."""
    [token, *more] = headers.get_all(KEY_HEADERS[0]) or [b""]
    scheme, _, token = token.partition(b" ")
    payload = token.strip().split(b".")[1:2]
    if (
        more
        or any(map(headers.has, _OTHER_CREDENTIALS))
        or scheme.lower() != b"bearer"
        or not payload
    ):
        return ""
    try:
        return _text(_at(_decoded(urlsafe_b64decode(payload[0] + b"==")), name))
    except ValueError:
        return ""


def _at(value: Any, path: str) -> Any:
    """Return what stands at a path, whose names may have dots. A text may be JSON, as in Claude
    Code's `user_id`."""
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
