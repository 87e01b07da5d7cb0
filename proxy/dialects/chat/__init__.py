"""Chat completions, `POST .../chat/completions`."""

from __future__ import annotations

import re

from proxy.dialects.base import Dialect
from proxy.dialects.chat import messages, request
from proxy.dialects.chat.reply import ChatTurn, error_event


class ChatDialect(Dialect):
    """Refers each method to the module of this folder that implements it."""

    name = messages.NAME
    path = re.compile(rb".*/chat/completions")
    own = re.compile(rb"/chat/completions(?:/|\Z)")
    turns = ChatTurn
    requests = request.ChatRoundRequest

    parsed = staticmethod(request.parse)
    read = staticmethod(messages.read)
    texts = staticmethod(messages.texts)
    replace = staticmethod(messages.with_texts)
    said = staticmethod(messages.said)
    answered = staticmethod(messages.answered)
    marked = staticmethod(messages.marked)
    sections = staticmethod(messages.sections)
    with_snapshot = staticmethod(messages.with_snapshot)
    joined = staticmethod(messages.joined)
    summary_request = staticmethod(messages.summary_request)
    summary_on_prefix = staticmethod(messages.summary_on_prefix)
    summary_answer = staticmethod(messages.summary_answer)
    error_event = staticmethod(error_event)


CHAT = ChatDialect()
