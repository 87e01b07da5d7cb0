"""The proxy's own errors in the shape that clients of the Messages API know."""

from __future__ import annotations

from proxy import rawjson, sse
from proxy.dialects.values import object_of, on_one_line
from proxy.errors import ProxyError

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
OTHER_REQUEST, OTHER = "invalid_request_error", "api_error"
"""What every other error of the client, and every other error, is called."""


def body(fault: ProxyError) -> bytes:
    """The body of an error reply. `code` is ours, as in the other APIs."""
    kind = TYPES.get(fault.status, OTHER_REQUEST if fault.status < 500 else OTHER)
    code = {} if fault.code is None else {"code": fault.code}
    return rawjson.encode({"type": "error", "error": {"type": kind, "message": fault.message, **code}})


def event(fault: ProxyError, said: bytes = b"") -> bytes:
    """The event that ends a stream: upstream's own error if it has this API's shape, else the fault."""
    members = on_one_line(said)
    return sse.encode(rawjson.encode(members) if object_of(members.get("error")) else body(fault), b"error")
