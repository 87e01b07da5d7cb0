"""Decodes the most common event, one that holds nothing but text, much faster than `reply` does."""

from __future__ import annotations

import msgspec


class PlainDelta(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    role: str | None = None
    content: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: None = None
    function_call: None = None


class _PlainChoice(msgspec.Struct, gc=False):
    delta: PlainDelta
    finish_reason: None = None


class _Plain(msgspec.Struct, gc=False):
    """An event that holds nothing but text. Events that this type rejects are parsed in full."""

    choices: tuple[_PlainChoice]
    usage: None = None
    error: None = None


_plain = msgspec.json.Decoder(_Plain)


def plain_delta(data: bytes) -> PlainDelta | None:
    """Return the texts of an event, or None if it holds anything else."""
    try:
        return _plain.decode(data).choices[0].delta
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
