"""Responses, `POST .../responses`."""

from __future__ import annotations

import re
from urllib.parse import unquote

from proxy.dialects.base import Dialect
from proxy.dialects.responses import items, render, reply, request
from proxy.dialects.responses.talk import Talk

_KEPT = re.compile(rb".*/responses/([^/]+)")


class ResponsesDialect(Dialect):
    """Refers each method to the module of this folder that implements it."""

    name = items.NAME
    takes = items.MEDIA
    turns = reply.ResponsesTurn
    requests = request.ResponsesRoundRequest
    talk = Talk
    path = re.compile(rb".*/responses(?:/compact)?")
    own = re.compile(rb"/responses(?:/|\Z)")

    parsed = staticmethod(request.parse)
    continued = staticmethod(request.continued)
    read = staticmethod(items.read)
    texts = staticmethod(items.texts)
    replace = staticmethod(items.with_texts)
    said = staticmethod(items.said)
    answered = staticmethod(items.answered)
    marked = staticmethod(items.marked)
    written = staticmethod(render.written)
    sections = staticmethod(render.sections)
    with_snapshot = staticmethod(render.with_snapshot)
    summary_request = staticmethod(render.summary_request)
    summary_on_prefix = staticmethod(render.summary_on_prefix)
    summary_answer = staticmethod(render.summary_answer)
    error_event = staticmethod(reply.error_event)

    compaction_asked = staticmethod(render.compaction_asked)
    target = staticmethod(render.target)
    uncompacted = staticmethod(render.uncompacted)
    references = staticmethod(render.references)
    restored = staticmethod(render.restored)
    compacted = staticmethod(render.compacted)

    def kept(self, method: str, path: bytes) -> str:
        """Return the id of the reply that a request shows or deletes where upstream keeps it; empty for others."""
        found = _KEPT.fullmatch(path) if method in ("GET", "DELETE") else None
        return unquote(found[1].decode("latin-1")) if found else ""


RESPONSES = ResponsesDialect()
