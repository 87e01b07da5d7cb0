"""Finds the tenant of a request by its headers, and says which paths are open to it. Pure."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from urllib.parse import unquote_to_bytes

import msgspec

from proxy.core.policy import Policy, Upstream
from proxy.errors import Unauthorized
from proxy.lru import Lru
from proxy.policies import Policies

Header = tuple[bytes, bytes]

_NAMESPACE = b"offload-namespace-v1"

_CALLER = re.compile(r"-(?:[0-9a-f]{16}|anonymous)$")
"""A namespace's end. No tenant's name ends like this; `proxy.policies` refuses it."""

_AUTHORIZATION = b"authorization"
KEY_HEADERS = (_AUTHORIZATION, b"api-key", b"x-api-key")
"""The headers that carry a client's key: OpenAI's, Azure's, Anthropic's. In this order."""

_PREFIX = rb"(?:/v1|/openai/v1|/openai/deployments/[^/]+)?"
_INFERENCE = re.compile(_PREFIX + rb"/(?:chat/completions|completions|embeddings|responses)")
_MODELS = re.compile(_PREFIX + rb"/models")

CALLERS = 10_000

_DECODINGS = 4
"""A path that is still percent-encoded after so many decodings is refused. Each decoding costs time."""


class Tenant(msgspec.Struct, frozen=True):
    """Whose request it is. `key_header` is the lower-case name of the header that carried the caller's key."""

    policy: Policy
    namespace: str
    anonymous: bool = False
    """The request had no key. All such callers share one namespace."""
    key_header: bytes = _AUTHORIZATION

    @property
    def name(self) -> str:
        """The tenant's name."""
        return self.policy.tenant

    @property
    def lends_key(self) -> bool:
        """Whether some of its requests go upstream with the tenant's key, and not with the caller's own."""
        policy = self.policy
        return policy.upstream.api_key is not None or any(rule.upstream.api_key is not None for rule in policy.rules)

    def credential(self, upstream: Upstream) -> Header | None:
        """The header to put in the place of all the client's credentials; None: the client's own go through.

        The tenant's key goes where the client's stood: an Azure client knows what an Azure upstream reads.
        `upstream` is the one of the policy for the request's model.
        """
        if upstream.api_key is None:
            return None
        key = upstream.api_key.encode("ascii")
        return self.key_header, b"Bearer " + key if self.key_header == _AUTHORIZATION else key


class Callers:
    """Remembers callers: the same ones come all day, and deriving a namespace takes as long as a plan."""

    def __init__(self) -> None:
        self._policies: Policies | None = None
        self._known: Lru[bytes, Tenant] = Lru(CALLERS)

    def identify(self, headers: Sequence[Header], policies: Policies) -> Tenant:
        """Like the function `identify`, but cached."""
        if policies is not self._policies:
            self._policies, self._known = policies, Lru(CALLERS)
        carried = [header for header in headers if header[0].lower() in KEY_HEADERS]
        digest = hashlib.sha256(repr(carried).encode()).digest()  # no key itself is kept
        tenant = self._known.get(digest)
        if tenant is None:
            tenant = identify(carried, policies)
            self._known.put(digest, tenant)
        return tenant


def identify(headers: Iterable[Header], policies: Policies) -> Tenant:
    """The tenant of a request with these headers (raw, in any case).

    Of several keys, the first that a policy names counts, else the first. Raises Unauthorized, whose text says what to
    do.
    """
    candidates = [(header, key, policies.tenant_for_key(key)) for header, key in _keys(headers)]
    if not candidates:
        return _anonymous(policies)
    header, key, policy = next((found for found in candidates if found[2] is not policies.default), candidates[0])
    if policy is None:
        raise Unauthorized(
            "This API key belongs to no tenant of this proxy. Its operator can add the key's SHA-256 to `api_keys` "
            "of a policy, or serve every key with a default.yaml."
        )
    return Tenant(policy, namespace(policy, key), key_header=header)


def namespace(policy: Policy, key: bytes | None) -> str:
    """The namespace of a caller's records: the tenant's name, and a digest that only the key's holder can derive."""
    if policy.share_namespace:
        return policy.tenant
    caller = hmac.digest(key, _NAMESPACE, "sha256").hex()[:16] if key is not None else "anonymous"
    return f"{policy.tenant}-{caller}"


def retention(namespace: str, policies: Policies) -> float | None:
    """How many seconds records of `namespace` are kept. None: forever, as for tenants that no longer have a policy."""
    owners = {namespace, _CALLER.sub("", namespace)}
    return next((policy.retention for policy in policies.all() if policy.tenant in owners), None)


def allowed(path: bytes, policy: Policy, method: str) -> bool:
    """Whether a request for `path` (raw, without the query) may go upstream.

    A path with a dot segment may not. With the client's own key every other path may; with the tenant's key only
    inference, the list of models and the paths in `relay`, because that key also opens other callers' data.
    """
    if _climbs(path):
        return False
    if policy.upstream.api_key is None:
        return True
    if method == "POST" and _INFERENCE.fullmatch(path):
        return True
    if method in ("GET", "HEAD") and _MODELS.fullmatch(path):
        return True
    spellings = {path.decode("latin-1"), path.removeprefix(b"/v1").decode("latin-1")}
    return any(fnmatchcase(spelling, glob) for spelling in spellings for glob in policy.relay)


def _anonymous(policies: Policies) -> Tenant:
    """A caller without a key, as in front of a local model that asks for none."""
    if policies.default is None:
        raise Unauthorized(
            "This proxy serves known API keys only, and the request has none. "
            "Send yours as `Authorization: Bearer KEY`, `api-key: KEY` or `x-api-key: KEY`."
        )
    return Tenant(policies.default, namespace(policies.default, None), anonymous=True)


def _keys(headers: Iterable[Header]) -> Iterator[Header]:
    """The header's lower-case name and the key, for every key in the request, in the order of `KEY_HEADERS`."""
    found = [(name.lower(), value.strip()) for name, value in headers]
    for header in KEY_HEADERS:
        for name, value in found:
            if name == header and (key := _bearer(value) if header == _AUTHORIZATION else value):
                yield header, key


def _bearer(value: bytes) -> bytes:
    """The token of `Bearer TOKEN`. Any other value identifies the caller as well, so it is used whole."""
    scheme, _, token = value.partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else value


def _climbs(path: bytes) -> bool:
    """Whether some server could read a `.` or `..` segment in this path, having decoded it once or more."""
    if b"." not in path and b"%" not in path:
        return False
    for _ in range(_DECODINGS):
        path, encoded = unquote_to_bytes(path), path
        if path == encoded:
            segments = re.split(rb"[/\\]", path)
            return any(segment.partition(b";")[0] in (b".", b"..") for segment in segments)
    return True
