"""Messages, `POST .../messages`."""

from __future__ import annotations

import re

from proxy.dialects.base import Dialect
from proxy.dialects.messages import blocks, render, reply, request
from proxy.plan.compacting import Compacting
from proxy.plan.turn import Request

PATH = rb"(?:(?:/[^/]+)*/v1|)/messages"
"""Other APIs have paths that end alike, such as `/v1/threads/ID/messages`."""
VERTEX = rb"(?:/v1)?/projects/[^/]+/locations/[^/]+/publishers/anthropic/models/"
"""The beginning of Vertex's paths. They name the model, which the body does not."""


class MessagesDialect(Dialect):
    """Refers each method to the module of this folder that implements it."""

    name = blocks.NAME
    takes = blocks.MEDIA
    turns = reply.MessagesTurn
    requests = request.MessagesRoundRequest
    path = re.compile(PATH + rb"|" + VERTEX + rb"(?!count-tokens:)[^/:]+:(?:rawP|streamRawP)redict")
    vertex = re.compile(VERTEX + rb"[^/:]+:(?:rawP|streamRawP)redict")
    """Vertex's paths, those that count tokens among them."""
    own = re.compile(rb"(?:/v1|^)/messages(?:/|\Z)")
    version_header = b"anthropic-version"
    signs = (b'"system":', b'"stop_sequences":', b'"input_schema":', b'"tool_use_id":', b'"anthropic_version":')
    """What a body has, and one of chat, which has messages as well, has not."""

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

    uncompacted = staticmethod(render.uncompacted)
    references = staticmethod(render.references)
    restored = staticmethod(render.restored)
    compacted = staticmethod(render.compacted)

    counting: Dialect
    """The one of requests that only ask how many tokens they have."""

    def compaction_asked(self, path: bytes, request: Request) -> Compacting | None:
        return render.compaction_asked(path, request)

    def target(self, target: bytes) -> bytes:
        return target.replace(b":streamRawPredict", b":rawPredict")


class CountingDialect(MessagesDialect):
    """`POST .../messages/count_tokens`, which takes what would be sent."""

    path = re.compile(PATH + rb"/count_tokens|" + VERTEX + rb"count-tokens:rawPredict")
    counts = True

    def compaction_asked(self, path: bytes, request: Request) -> Compacting | None:
        kind = render.compaction_asked(path, request)
        return None if kind is Compacting.WHOLE else kind


MESSAGES = MessagesDialect()
MESSAGES.counting = CountingDialect()
