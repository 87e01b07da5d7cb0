"""The envelope of every operation's reply, on success and on failure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import msgspec
from msgspec import Raw

from proxy import rawjson
from proxy.errors import ProxyError

PIECE = 1 << 20
"""Characters that are encoded at a time, because encoding holds the interpreter: a millisecond each."""


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
        (b'{"success":', rawjson.encode(success), b',"answer":'),
        _encoded(answer),
        (b',"messages":', rawjson.array(messages), b',"metadata":'),
        _encoded(metadata),
        (b"}",),
    )
    return b"".join(chain.from_iterable(members))


def _encoded(value: Any) -> Iterator[bytes]:
    """Yield the JSON of a value. Long texts stand alone or in mappings, and come in pieces."""
    if isinstance(value, str):
        yield b'"'
        for at in range(0, len(value), PIECE):
            yield rawjson.encode(value[at : at + PIECE])[1:-1]
        yield b'"'
    elif isinstance(value, Mapping):
        for place, (key, item) in enumerate(value.items()):
            yield (b"," if place else b"{") + rawjson.encode(key) + b":"
            yield from _encoded(item)
        yield b"}" if value else b"{}"
    else:
        yield rawjson.encode(value)
