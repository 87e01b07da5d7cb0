"""Chat completions, `POST .../chat/completions`, as an implementation of the protocol `proxy.dialects.Dialect`."""

from __future__ import annotations

import re
from collections.abc import Collection

from proxy.dialects.base import BaseDialect
from proxy.dialects.chat import errors, hidden, messages, render, summary
from proxy.dialects.chat.reply import ChatTurn
from proxy.dialects.chat.request import parse, shape
from proxy.dialects.chat.round_request import ChatRoundRequest

_OWN = re.compile(rb"/chat/completions(?:/|\Z)")


class ChatDialect(BaseDialect):
    """Refers each method to the module of this folder that implements it. The protocol documents the methods."""

    name = "chat"
    turns = ChatTurn
    requests = ChatRoundRequest

    parse = staticmethod(parse)

    read = staticmethod(messages.read)
    texts = staticmethod(messages.texts)
    replace = staticmethod(messages.with_texts)
    reply_meaning = staticmethod(messages.reply_meaning)
    sections = staticmethod(render.sections)
    with_snapshot = staticmethod(render.with_snapshot)
    joined = staticmethod(render.joined)
    marked = staticmethod(messages.marked)
    said = staticmethod(hidden.said)
    reinserted = staticmethod(hidden.reinserted)
    shrunk = staticmethod(hidden.shrunk)

    summary_request = staticmethod(summary.alone)
    summary_on_prefix = staticmethod(summary.on_prefix)
    summary_answer = staticmethod(summary.answer)

    shape = staticmethod(shape)
    error_body = staticmethod(errors.body)
    error_event = staticmethod(errors.event)

    are_paired = staticmethod(messages.are_paired)
    """Checks records that are older than the other dialects; not part of the protocol."""

    def serves(self, method: str, path: bytes) -> bool:
        return method == "POST" and path.endswith(b"/chat/completions")

    def owns(self, path: bytes, names: Collection[bytes]) -> bool:
        return _OWN.search(path) is not None


CHAT = ChatDialect()
