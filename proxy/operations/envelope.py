"""What every operation replies, whatever happened."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec
from msgspec import Raw

from proxy.core import rawjson
from proxy.errors import ProxyError


class OperationReply(msgspec.Struct, frozen=True):
    """The envelope's content. Messages are JSON already and stay as they are."""

    answer: str
    messages: list[bytes | Raw] = []
    metadata: Mapping[str, Any] = {}

    def body(self) -> bytes:
        """As it is sent."""
        return _envelope(True, self.answer, self.messages, self.metadata)


def refusal(messages: Iterable[bytes | Raw] = ()) -> Callable[[ProxyError], bytes]:
    """How an error reads: its reason in `answer`, and the caller's own messages, so that nobody can lose any."""
    own = list(messages)
    return lambda error: _envelope(False, error.message, own, {"error": error.code or error.kind})


def _envelope(success: bool, answer: str, messages: Iterable[bytes | Raw], metadata: Mapping[str, Any]) -> bytes:
    """Each member on its own: some hold raw JSON, some hold text that is only valid once it is escaped."""
    members = (
        b'"success":' + rawjson.encode(success),
        b'"answer":' + rawjson.encode(answer),
        b'"messages":' + rawjson.array(messages),
        b'"metadata":' + rawjson.encode(metadata),
    )
    return b"{" + b",".join(members) + b"}"
