"""The proxy's own errors in the shape that clients of OpenAI's API know."""

from __future__ import annotations

import msgspec

from proxy.core import rawjson, sse
from proxy.core.rawjson import NotJson
from proxy.errors import ProxyError


def body(fault: ProxyError) -> bytes:
    """The body of an error reply."""
    return fault.body()


def event(fault: ProxyError, said: bytes = b"") -> bytes:
    """Return the event that ends a stream: upstream's own error if it has this API's shape, else the fault."""
    try:
        known = bool(said) and not rawjson.is_null(rawjson.members(said).get("error"))
        return sse.encode(msgspec.json.format(said, indent=-1) if known else body(fault))
    except (NotJson, msgspec.MsgspecError):
        return sse.encode(body(fault))
