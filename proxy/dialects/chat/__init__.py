"""Chat completions, `POST .../chat/completions`."""

from __future__ import annotations

import re

from proxy.dialects.base import Dialect
from proxy.dialects.chat import request
from proxy.dialects.chat.reply import ChatTurn, error_event


class ChatDialect(Dialect):
    """Refers each method to the module of this folder that implements it."""

    name = request.NAME
    path = re.compile(rb".*/chat/completions")
    own = re.compile(rb"/chat/completions(?:/|\Z)")
    turns = ChatTurn
    requests = request.ChatRoundRequest

    parsed = staticmethod(request.parse)
    read = staticmethod(request.read)
    texts = staticmethod(request.texts)
    replace = staticmethod(request.with_texts)
    said = staticmethod(request.said)
    answered = staticmethod(request.answered)
    marked = staticmethod(request.marked)
    sections = staticmethod(request.sections)
    with_snapshot = staticmethod(request.with_snapshot)
    joined = staticmethod(request.joined)
    summary_request = staticmethod(request.summary_request)
    summary_on_prefix = staticmethod(request.summary_on_prefix)
    summary_answer = staticmethod(request.summary_answer)
    error_event = staticmethod(error_event)


CHAT = ChatDialect()
