"""Errors of ours in the shape that clients of OpenAI's API know."""

from __future__ import annotations

import msgspec

from proxy.core import rawjson, sse
from proxy.core.rawjson import NotJson
from proxy.errors import ProxyError


def body(fault: ProxyError) -> bytes:
    """The body of an error reply."""
    return fault.body()


def event(fault: ProxyError, said: bytes = b"") -> bytes:
    """The event that ends a stream: upstream's own words where they are an error of this API, else the fault."""
    try:
        known = bool(said) and not rawjson.is_null(rawjson.members(said).get("error"))
        return sse.encode(msgspec.json.format(said, indent=-1) if known else body(fault))
    except (NotJson, msgspec.MsgspecError):
        return sse.encode(body(fault))
