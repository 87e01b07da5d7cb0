"""Messages, `POST .../messages`."""

from __future__ import annotations

import re
from collections.abc import Collection

from proxy.dialects.base import Dialect
from proxy.dialects.messages import blocks, compaction, render, reply, request
from proxy.plan.compacting import Compacting
from proxy.plan.turn import Request

_PATH = re.compile(rb"(?:/[^/]+)*/v1/messages|/messages")
"""Other APIs have paths that end alike, such as `/v1/threads/ID/messages`."""
_COUNT = b"/count_tokens"
_OWN = re.compile(rb"(?:/v1|^)/messages(?:/|\Z)")


class MessagesDialect(Dialect):
    """Refers each method to the module of this folder that implements it."""

    name = blocks.NAME
    takes = blocks.MEDIA
    turns = reply.MessagesTurn
    requests = request.MessagesRoundRequest
    deciding = (("output_format",), ("output_config", "format"), ("thinking",), ("tool_choice",))
    version_header = b"anthropic-version"
    """A header that every request for this API has, also those for models and files."""

    def __init__(self, *, counts: bool = False) -> None:
        """`counts`: it serves `POST .../messages/count_tokens`, which takes what would be sent."""
        self.counts = counts

    recognises = staticmethod(request.recognises)
    parsed = staticmethod(request.parse)
    complaint = staticmethod(request.complaint)
    forgiving = staticmethod(request.forgiving)
    read = staticmethod(blocks.read)
    texts = staticmethod(blocks.texts)
    replace = staticmethod(blocks.with_texts)
    said = staticmethod(blocks.said)
    answered = staticmethod(blocks.answered)
    marked = staticmethod(blocks.marked)
    written = staticmethod(render.written)
    sections = staticmethod(render.sections)
    with_snapshot = staticmethod(render.with_snapshot)
    joined = staticmethod(render.joined)
    summary_request = staticmethod(render.summary_request)
    summary_on_prefix = staticmethod(render.summary_on_prefix)
    summary_answer = staticmethod(render.summary_answer)
    error_body = staticmethod(reply.error_body)
    error_event = staticmethod(reply.error_event)

    uncompacted = staticmethod(compaction.without)
    references = staticmethod(compaction.references)
    restored = staticmethod(compaction.restored)
    compacted = staticmethod(compaction.reply)

    def compaction_asked(self, path: bytes, request: Request) -> Compacting | None:
        kind = compaction.asked(path, request)
        return None if self.counts and kind is Compacting.WHOLE else kind

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
