"""Responses over WebSocket, without the connection: a message becomes a request over HTTP, events become messages.

    response.create ──take──> body of POST /v1/responses ──its events──show──> messages, and what is held for the next

The talk holds the history of each lane's last response, so the client sends only what is new. Source: OpenAI's guide
"WebSocket mode".
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from msgspec import Raw

from proxy import rawjson
from proxy.dialects.responses.items import lasts
from proxy.dialects.responses.reply import DONE
from proxy.dialects.responses.request import COMPACTIONS, given, joined, kind, stores
from proxy.errors import ClientFault
from proxy.rawjson import NULL, NotJson, elements_of, text_of

LANES = 32
"""Most lanes whose histories are held. Each message looks at all of them, so the oldest ones are dropped."""

_ENVELOPE = frozenset(("type", "stream", "stream_id", "generate", "background"))
_FINAL = frozenset(("response.completed", "response.incomplete"))
_LAST = _FINAL | {"response.failed", "error"}


class Talk:
    """What a client and upstream have said on one connection."""

    ended = False
    """Whether the client knows how the request ended."""

    def __init__(self) -> None:
        self._held: dict[bytes, tuple[str, list[bytes]]] = {}  # the id and all items, by lane
        self._asked: list[bytes] | None = []  # what led to this response; None if only upstream knows
        self._said: list[Raw] = []  # the items of this response that have ended
        self._stored = True  # whether upstream keeps them
        self._model: Raw = NULL
        self._lane: Raw | None = None  # the client's mark for the events of this request

    @property
    def size(self) -> int:
        """The bytes of the histories that are held."""
        return sum(len(id) + sum(map(len, history)) for id, history in self._held.values())

    def forget(self) -> None:
        """Hold no history. From now on, an id is for upstream to understand."""
        self._held.clear()

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
        self._said, self._stored = [], stores(members)
        try:
            asked = [*map(bytes, given(members))]  # slices would keep the whole message, with its tools
        except NotJson as error:
            raise ClientFault(f"`input` is neither a string nor an array that can be read: {error}") from error
        previous = text_of(members.get("previous_response_id"))
        held = next((history for id, history in self._held.values() if id == previous), None)
        if held is not None:
            asked = [*held, *asked]
            del members["previous_response_id"]
            members["input"] = joined(asked)
        elsewhere = (members.get(name) for name in ("previous_response_id", "conversation"))
        self._asked = asked if all(map(rawjson.is_null, elsewhere)) else None
        if bytes(members.get("generate", b"")) == b"false":
            return None
        body: dict[str, Any] = {name: value for name, value in members.items() if name not in _ENVELOPE}
        return rawjson.encode(body | {"stream": True})

    def warm(self, id: str) -> Iterator[str]:
        """Hold what the client told under this id, and return the messages that say so."""
        self._hold(id)
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
            if name == DONE:
                self._said.append(members["item"])
            if name in _FINAL:
                response = rawjson.members(members["response"])
                said = elements_of(response.get("output")) or self._said  # ChatGPT's backend lists none
                self._hold(text_of(response.get("id")), [item for item in said if self._stored or lasts(item)])
        except (KeyError, NotJson):
            return event.decode("utf-8", "replace")
        return self._message(event)

    def _hold(self, id: str, items: Iterable[bytes | Raw] = ()) -> None:
        """Hold the history of this lane up to the end of the reply with these items, under this id. If only upstream
        knows how it began, the id is for upstream to understand. A compaction stands for all before it."""
        lane = bytes(self._lane or b"")
        self._held.pop(lane, None)
        if id and self._asked is not None:
            said = [*map(bytes, items)]
            compactions = [at for at, item in enumerate(said) if kind(item).type in COMPACTIONS]
            self._held[lane] = id, said[compactions[-1] :] if compactions else [*self._asked, *said]
        if len(self._held) > LANES:
            del self._held[next(iter(self._held))]

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
