"""Finds the tenant of a request from its headers, and decides which paths it may use. Does no I/O."""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from functools import cached_property
from urllib.parse import unquote_to_bytes

import msgspec

from proxy.dialects.messages import MESSAGES
from proxy.errors import Unauthorized
from proxy.policies import Policies
from proxy.policy import Policy, Upstream

Header = tuple[bytes, bytes]

_NAMESPACE = b"offload-namespace-v1"

_CALLER = re.compile(r"-(?:[0-9a-f]{16}|anonymous)$")
"""The end of one caller's namespace. No tenant's name ends like this, because `proxy.policies` rejects it."""

_AUTHORIZATION = b"authorization"
_X_API_KEY = b"x-api-key"
KEY_HEADERS = (_AUTHORIZATION, b"api-key", _X_API_KEY)
"""The headers that carry a client's key, in order of preference: OpenAI's, Azure's, Anthropic's."""

_PREFIX = rb"(?:/v1|/openai(?:/v1|/deployments/[^/]+)?)?"
_INFERENCE = re.compile(_PREFIX + rb"/(?:chat/completions|completions|embeddings|responses(?:/compact)?)")
_MESSAGES = re.compile(rb"(?:/v1)*/messages(?:/count_tokens)?")
"""Anthropic's, whose clients append `/v1` even to a base URL that has it."""
_MODELS = re.compile(_PREFIX + rb"/models")

_DECODINGS = 4
"""A path still percent-encoded after this many decodings is refused, because each decoding costs time."""


class Tenant(msgspec.Struct, frozen=True, dict=True):
    """The tenant and caller of a request. `key_header` is the lower-case name of the header with the caller's key."""

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

        The tenant's key goes into the header that carried the client's key, because an Azure client uses the header
        that an Azure upstream reads. Anthropic reads keys from one header only, so a request for its API has that one.
        `upstream` is the policy's upstream for the request's model.
        """
        if upstream.api_key is None:
            return None
        key = upstream.api_key.encode("ascii")
        header = _X_API_KEY if anthropic else self.key_header
        return header, b"Bearer " + key if header == _AUTHORIZATION else key


def identify(headers: Iterable[Header], policies: Policies) -> Tenant:
    """Return the tenant of a request with these headers (raw, in any case).

    If there are several keys, use the first that a policy names, else the first. Raises Unauthorized, with advice in
    its text, if no policy applies.
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
    return Tenant(policy, namespace(policy, key), listed=policy is not policies.default, key_header=header)


def namespace(policy: Policy, key: bytes | None) -> str:
    """Return a caller's namespace for records: the tenant's name and a digest that only the key's holder can derive."""
    if policy.share_namespace:
        return policy.tenant
    caller = hmac.digest(key, _NAMESPACE, "sha256").hex()[:16] if key is not None else "anonymous"
    return f"{policy.tenant}-{caller}"


def tenant_of(namespace: str) -> str:
    return _CALLER.sub("", namespace)


def retention(namespace: str, policies: Policies) -> float | None:
    """Return for how many seconds to keep a namespace's records. None means for ever, also if its policy is gone."""
    owners = {namespace, tenant_of(namespace)}
    return next((policy.retention for policy in policies.all() if policy.tenant in owners), None)


def allowed(path: bytes, policy: Policy, method: str) -> bool:
    """Return whether a request for `path` (raw, without the query) may go upstream.

    A path with a dot segment may not. With the client's own key, every other path may. With the tenant's key, only
    inference, the list of models and the paths in `relay` may, because that key also gives access to other callers'
    data.
    """
    if _climbs(path):
        return False
    if policy.upstream.api_key is None:
        return True
    if method == "POST" and any(paths.fullmatch(path) for paths in (_INFERENCE, _MESSAGES, MESSAGES.vertex)):
        return True
    if method in ("GET", "HEAD") and _MODELS.fullmatch(path):
        return True
    spellings = {path.decode("latin-1"), path.removeprefix(b"/v1").decode("latin-1")}
    return any(fnmatchcase(spelling, glob) for spelling in spellings for glob in policy.relay)


def _anonymous(policies: Policies) -> Tenant:
    """Return the tenant of a caller without a key, for example of a local model that needs none."""
    if policies.default is None:
        raise Unauthorized(
            "This proxy serves known API keys only, and the request has none. "
            "Send yours as `Authorization: Bearer KEY`, `api-key: KEY` or `x-api-key: KEY`."
        )
    return Tenant(policies.default, namespace(policies.default, None), anonymous=True)


def _keys(headers: Iterable[Header]) -> Iterator[Header]:
    """Yield the header's lower-case name and the key for every key in the request, in the order of `KEY_HEADERS`."""
    found = [(name.lower(), value.strip()) for name, value in headers]
    for header in KEY_HEADERS:
        for name, value in found:
            if name == header and (key := _bearer(value) if header == _AUTHORIZATION else value):
                yield header, key


def _bearer(value: bytes) -> bytes:
    """Return the token of `Bearer TOKEN`. Any other value also identifies the caller, so it is returned whole."""
    scheme, _, token = value.partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else value


def _climbs(path: bytes) -> bool:
    """Return whether a server that decodes this path, once or more, could find a `.` or `..` segment in it."""
    if b"." not in path and b"%" not in path:
        return False
    for _ in range(_DECODINGS):
        path, encoded = unquote_to_bytes(path), path
        if path == encoded:
            segments = re.split(rb"[/\\]", path)
            return any(segment.partition(b";")[0] in (b".", b"..") for segment in segments)
    return True
