"""The proxy's own errors in the shape that clients of OpenAI's API know."""

from __future__ import annotations

from proxy import rawjson, sse
from proxy.dialects.values import on_one_line
from proxy.errors import ProxyError


def body(fault: ProxyError) -> bytes:
    """The body of an error reply."""
    return fault.body()


def event(fault: ProxyError, said: bytes = b"") -> bytes:
    """Return the event that ends a stream: upstream's own error if it has this API's shape, else the fault."""
    members = on_one_line(said)
    return sse.encode(body(fault) if rawjson.is_null(members.get("error")) else rawjson.encode(members))
