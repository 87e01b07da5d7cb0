"""The envelope of every operation's reply, on success and on failure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec
from msgspec import Raw

from proxy.core import rawjson
from proxy.errors import ProxyError


class OperationReply(msgspec.Struct, frozen=True):
    """The content of a successful reply. Messages are raw JSON and keep their bytes."""

    answer: str
    messages: list[bytes | Raw] = []
    metadata: Mapping[str, Any] = {}

    def body(self) -> bytes:
        """The body of the HTTP reply."""
        return _envelope(True, self.answer, self.messages, self.metadata)


def refusal(messages: Iterable[bytes | Raw] = ()) -> Callable[[ProxyError], bytes]:
    """Return a function that takes an error and returns a body with the reason and the caller's own messages.

    The messages are included so that a failed call cannot lose them.
    """
    own = list(messages)
    return lambda error: _envelope(False, error.message, own, {"error": error.code or error.kind})


def _envelope(success: bool, answer: str, messages: Iterable[bytes | Raw], metadata: Mapping[str, Any]) -> bytes:
    """Encode each member separately, because some are raw JSON and others are text that must be escaped."""
    members = (
        b'"success":' + rawjson.encode(success),
        b'"answer":' + rawjson.encode(answer),
        b'"messages":' + rawjson.array(messages),
        b'"metadata":' + rawjson.encode(metadata),
    )
    return b"{" + b",".join(members) + b"}"
