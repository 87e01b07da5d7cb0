"""Puts hidden rounds back into the history that a client sends, whole or shortened."""

from __future__ import annotations

from collections.abc import Sequence, Set
from functools import partial

from msgspec import Raw

from proxy import rawjson
from proxy.dialects import entries
from proxy.dialects.chat.messages import texts, tool_calls
from proxy.dialects.values import NULL, string, text_of
from proxy.plan.history import ToolCall
from proxy.plan.recognition import paired
from proxy.plan.turn import HiddenRound


def said(message: bytes | Raw) -> tuple[str, list[ToolCall]]:
    """Return the text and the calls of a reply. Raises NotJson."""
    return "".join(text for _, text in texts(message)), tool_calls(rawjson.members(message))


def reinserted(hidden: HiddenRound, visible: bytes | Raw) -> list[bytes | Raw]:
    """Return all messages of a turn whose client sends back `visible`, which it may have rewritten."""
    if hidden.instead is None:
        return [*hidden.before, visible]
    answered = {_answered(message) for message in hidden.after}
    _, sent = said(visible)
    wrote = _calls(hidden.instead)
    theirs = [call for call in wrote if call.id not in answered]
    if [call.id for call in theirs] == [call.id for call in sent]:
        return [*hidden.before, hidden.instead, *hidden.after]
    reply = _with_calls_sent(hidden.instead, answered, theirs, sent, visible)
    return [*hidden.before, visible] if reply is None else [*hidden.before, reply, *hidden.after]


def _with_calls_sent(
    instead: bytes, answered: Set[str], theirs: Sequence[ToolCall], sent: Sequence[ToolCall], visible: bytes | Raw
) -> bytes | None:
    """Return the model's reply with only those calls of the client's that it sent back, under its own ids.

    Returns None if that is not possible: a call is unknown, or has the id of a call of ours.
    """
    ids = {one.id: other.id for one, other in paired(tuple(theirs), tuple(sent))}
    if len(ids) != len(sent) or not answered.isdisjoint(ids.values()):
        return None
    members = rawjson.members(instead)
    calls: list[Raw] = []
    for raw in rawjson.elements(members.pop("tool_calls", Raw(b"[]"))):
        call = rawjson.members(raw)
        id = text_of(call.get("id"))
        if id in answered or ids.get(id) == id:
            calls.append(raw)
        elif id in ids:
            calls.append(Raw(rawjson.encode(call | {"id": string(ids[id])})))
    if theirs and not sent:  # its text may name the calls
        members["content"] = rawjson.members(visible).get("content", NULL)
    if not calls:
        return None
    return rawjson.encode(members | {"tool_calls": Raw(rawjson.array(calls))})


def _calls(message: bytes) -> list[ToolCall]:
    return tool_calls(rawjson.members(message))


def _answered(message: bytes) -> str:
    return text_of(rawjson.members(message).get("tool_call_id"))


def _replaced(message: bytes, text: str) -> bytes:
    return rawjson.encode(rawjson.members(message) | {"content": string(text)})


shrunk = partial(entries.shrunk, calls=_calls, answered=_answered, replaced=_replaced)
