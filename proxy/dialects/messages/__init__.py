"""Messages, `POST .../messages`, as an implementation of the protocol `proxy.dialects.Dialect`."""

from __future__ import annotations

import re
from collections.abc import Collection

from proxy.dialects.base import BaseDialect
from proxy.dialects.messages import blocks, errors, render, request, summary
from proxy.dialects.messages.reply import MessagesTurn
from proxy.dialects.messages.request import complaint, forgiving, shape
from proxy.dialects.messages.round_request import MessagesRoundRequest

_PATH = re.compile(rb"(?:/[^/]+)*/v1/messages|/messages")
"""Other APIs have paths that end alike, such as `/v1/threads/ID/messages`."""
_COUNT = b"/count_tokens"
_OWN = re.compile(rb"(?:/v1|^)/messages(?:/|\Z)")


class MessagesDialect(BaseDialect):
    """Refers each method to the module of this folder that implements it. The protocol documents the methods."""

    name = "messages"
    turns = MessagesTurn
    requests = MessagesRoundRequest
    version_header = b"anthropic-version"
    """A header that every request for this API has, also those for models and files."""

    def __init__(self, *, counts: bool = False) -> None:
        """`counts`: it serves `POST .../messages/count_tokens`, which takes what would be sent."""
        self.counts = counts

    recognises = staticmethod(request.recognises)
    parse = staticmethod(request.parse)

    read = staticmethod(blocks.read)
    texts = staticmethod(blocks.texts)
    replace = staticmethod(blocks.with_texts)
    reply_meaning = staticmethod(blocks.reply_meaning)
    sections = staticmethod(render.sections)
    with_snapshot = staticmethod(render.with_snapshot)
    joined = staticmethod(render.joined)
    marked = staticmethod(blocks.marked)
    said = staticmethod(render.said)
    reinserted = staticmethod(render.reinserted)
    shrunk = staticmethod(render.shrunk)

    summary_request = staticmethod(summary.alone)
    summary_on_prefix = staticmethod(summary.on_prefix)
    summary_answer = staticmethod(summary.answer)

    complaint = staticmethod(complaint)
    forgiving = staticmethod(forgiving)
    shape = staticmethod(shape)
    error_body = staticmethod(errors.body)
    error_event = staticmethod(errors.event)

    def serves(self, method: str, path: bytes) -> bool:
        asked = path.removesuffix(_COUNT) if self.counts else path
        return method == "POST" and self.counts == (asked != path) and _PATH.fullmatch(asked) is not None

    def owns(self, path: bytes, names: Collection[bytes]) -> bool:
        return _OWN.search(path) is not None or self.version_header in names

    @property
    def counting(self) -> MessagesDialect:
        """The dialect of requests that only ask how many tokens they have."""
        return MessagesDialect(counts=True)


MESSAGES = MessagesDialect()
