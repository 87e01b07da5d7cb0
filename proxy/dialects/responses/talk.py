"""Responses over WebSocket, without the connection: a message becomes a request over HTTP, events become messages.

    response.create ──take──> body of POST /v1/responses ──its events──show──> messages, and what is held for the next

The talk holds the history of its last response, so the client sends only what is new. Source: OpenAI's guide "WebSocket
mode".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import Raw

from proxy import rawjson
from proxy.dialects.responses.request import given, joined
from proxy.errors import ClientFault
from proxy.rawjson import NULL, NotJson, text_of

_ENVELOPE = frozenset(("type", "stream", "stream_id", "generate", "background"))
_FINAL = frozenset(("response.completed", "response.incomplete"))
_LAST = _FINAL | {"response.failed", "error"}


class Talk:
    """What a client and upstream have said on one connection."""

    _id = ""  # of the last response
    _history: Sequence[bytes | Raw] = ()  # the items up to its end
    _asked: Sequence[bytes | Raw] = ()  # the items of the request that is being answered
    _model: Raw = NULL
    _lane: Raw | None = None  # the client's mark for the events of this request
    ended = False
    """Whether the client knows how the request ended."""

    @property
    def size(self) -> int:
        """The bytes of the history that is held."""
        return sum(len(memoryview(item)) for item in self._history)

    def forget(self) -> None:
        """Hold no history. From now on, an id is for upstream to understand."""
        self._id, self._history = "", ()

    def take(self, message: bytes) -> bytes | None:
        """Return the body of the request over HTTP, None if the client wants no reply. Raises ClientFault."""
        self._lane, self.ended = None, False
        try:
            rawjson.check_utf8(message)
            members = rawjson.members(message)
        except NotJson as error:
            raise ClientFault(f"The message is not a JSON object: {error}") from error
        if (name := text_of(members.get("type"))) != "response.create":
            raise ClientFault(f"This proxy takes `response.create` over WebSocket, not {name[:100]!r}")
        self._lane, self._model = members.get("stream_id"), members.get("model", NULL)
        try:
            self._asked = given(members)
        except NotJson as error:
            raise ClientFault(f"`input` is neither a string nor an array that can be read: {error}") from error
        if self._id and text_of(members.get("previous_response_id")) == self._id:
            self._asked = [*self._history, *self._asked]
            del members["previous_response_id"]
            members["input"] = joined(self._asked)
        if bytes(members.get("generate", b"")) == b"false":
            return None
        body: dict[str, Any] = {name: value for name, value in members.items() if name not in _ENVELOPE}
        return rawjson.encode(body | {"stream": True})

    def warm(self, id: str) -> Iterator[str]:
        """Hold what the client told under this id, and return the messages that say so."""
        self._id, self._history = id, self._asked
        for number, (name, status) in enumerate((("created", "in_progress"), ("completed", "completed"))):
            response = {"id": id, "object": "response", "status": status, "model": self._model, "output": []}
            event = {"type": f"response.{name}", "sequence_number": number, "response": response}
            yield self._message(rawjson.encode(event))

    def show(self, event: bytes) -> str:
        """Return an event of the reply as a message. With the last one, the history grows. What is no event of ours
        goes to the client as it came."""
        try:
            members = rawjson.members(event)
            name = text_of(members.get("type"))
            self.ended = self.ended or name in _LAST
            if name in _FINAL:
                response = rawjson.members(members["response"])
                output = rawjson.elements(response["output"])
                self._id, self._history = rawjson.text(response["id"]), [*self._asked, *output]
        except (KeyError, NotJson):
            return event.decode("utf-8", "replace")
        return self._message(event)

    def refuse(self, status: int, body: bytes) -> str:
        """Return the message for a refusal over HTTP."""
        try:
            error: Any = rawjson.members(body).get("error", NULL)
        except NotJson:
            error = {"type": "server_error", "message": body.decode("utf-8", "replace")[:1_000]}
        self.ended = True
        return self._message(rawjson.encode({"type": "error", "status": status, "error": error}))

    def _message(self, event: bytes) -> str:
        marked = event if self._lane is None else b'{"stream_id":%b,%b' % (bytes(self._lane), event[1:])
        return marked.decode("utf-8", "replace")
