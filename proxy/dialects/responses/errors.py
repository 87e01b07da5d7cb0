"""The proxy's own errors in the shape that clients of the Responses API know."""

from __future__ import annotations

from proxy import rawjson, sse
from proxy.dialects.values import NULL, object_of, on_one_line
from proxy.errors import ProxyError


def body(fault: ProxyError) -> bytes:
    """The body of an error reply."""
    return fault.body()


def event(fault: ProxyError, said: bytes = b"", number: int = 0) -> bytes:
    """Return the event that ends a stream: upstream's own error if it has this API's shape, else the fault.

    `number` is the event's place in the stream. The documented event has the error's members itself, and the SDKs read
    them from `error`, as upstream writes it, so both are there.
    """
    error = object_of(on_one_line(said).get("error")) or rawjson.members(rawjson.members(body(fault))["error"])
    known = {name: error.get(name, NULL) for name in ("code", "message", "param")}
    members = {"type": "error", "sequence_number": number, **known, "error": error}
    return sse.encode(rawjson.encode(members), b"error")
