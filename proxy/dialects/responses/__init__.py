"""Responses, `POST .../responses`, as an implementation of the protocol `proxy.dialects.Dialect`."""

from __future__ import annotations

import re
from collections.abc import Collection
from urllib.parse import unquote

from msgspec import Raw

from proxy.dialects.base import BaseDialect
from proxy.dialects.responses import errors, items, render, request, summary
from proxy.dialects.responses.reply import ResponsesTurn
from proxy.dialects.responses.request import shape
from proxy.dialects.responses.round_request import ResponsesRoundRequest

_OWN = re.compile(rb"/responses(?:/|\Z)")
_KEPT = re.compile(rb".*/responses/([^/]+)")


class ResponsesDialect(BaseDialect):
    """Refers each method to the module of this folder that implements it. The protocol documents the methods."""

    name = "responses"
    turns = ResponsesTurn
    requests = ResponsesRoundRequest

    parse = staticmethod(request.parse)
    continued = staticmethod(request.continued)

    read = staticmethod(items.read)
    texts = staticmethod(items.texts)
    replace = staticmethod(items.with_texts)
    reply_meaning = staticmethod(items.reply_meaning)
    sections = staticmethod(render.sections)
    with_snapshot = staticmethod(render.with_snapshot)
    marked = staticmethod(items.marked)
    said = staticmethod(render.said)
    reinserted = staticmethod(render.reinserted)
    shrunk = staticmethod(render.shrunk)

    summary_request = staticmethod(summary.alone)
    summary_on_prefix = staticmethod(summary.on_prefix)
    summary_answer = staticmethod(summary.answer)

    shape = staticmethod(shape)
    error_body = staticmethod(errors.body)
    error_event = staticmethod(errors.event)

    def joined(self, entries: list[bytes | Raw]) -> list[bytes | Raw]:
        return entries  # this API takes user messages in a row

    def serves(self, method: str, path: bytes) -> bool:
        return method == "POST" and path.endswith(b"/responses")

    def kept(self, method: str, path: bytes) -> str:
        """Return the id of the reply that a request shows or deletes where upstream keeps it; empty for others."""
        found = _KEPT.fullmatch(path) if method in ("GET", "DELETE") else None
        return unquote(found[1].decode("latin-1")) if found else ""

    def owns(self, path: bytes, names: Collection[bytes]) -> bool:
        return _OWN.search(path) is not None


RESPONSES = ResponsesDialect()
