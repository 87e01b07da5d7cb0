"""Puts hidden rounds back into the history that a client sends, whole or shortened."""

from __future__ import annotations

from functools import partial

from msgspec import Raw

from proxy.core import rawjson
from proxy.core.history import ToolCall
from proxy.core.turn import HiddenRound
from proxy.dialects import shrinking
from proxy.dialects.chat.messages import tool_calls
from proxy.dialects.values import string, text_of


def reinserted(hidden: HiddenRound, visible: bytes | Raw) -> list[bytes | Raw]:
    """Return all messages of a turn whose client saw `visible`."""
    return [*hidden.before, visible if hidden.instead is None else hidden.instead, *hidden.after]


def _calls(message: bytes) -> list[ToolCall]:
    return tool_calls(rawjson.members(message))


def _answered(message: bytes) -> str:
    return text_of(rawjson.members(message).get("tool_call_id"))


def _replaced(message: bytes, text: str) -> bytes:
    return rawjson.encode(rawjson.members(message) | {"content": string(text)})


shrunk = partial(shrinking.shrunk, calls=_calls, answered=_answered, replaced=_replaced)
