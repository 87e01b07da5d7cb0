"""The reply as the client sees it: a single one, however many rounds it takes.

All events have the first round's `id`, `created`, `model` and `system_fingerprint`. The role is sent once, a blank line
separates the texts of two rounds, and the usage covers all rounds. Streams and whole replies share this code.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Raw

from proxy import rawjson, sse
from proxy.dialects.chat.reply import TEXTS, Chunk, ReplyMessage
from proxy.dialects.chat.tool_calls import PartialCall
from proxy.dialects.usage import UsageLedger
from proxy.dialects.values import Members, object_of, string, text_of

FRAME = ("id", "created", "model", "system_fingerprint")
"""Members that all events of a reply share."""


class ChatClientReply:
    """The reply so far. This class sends events at once; `WholeReply` keeps them for one reply at the end."""

    streamed = True

    def __init__(self, ledger: UsageLedger, wants_usage: bool = True) -> None:
        """`wants_usage`: the client asks for the event with the usage."""
        self.message = ReplyMessage()
        self.calls: Sequence[PartialCall] = ()
        """The calls of the newest round that the client sees."""
        self._ledger = ledger
        self._wants_usage = wants_usage
        self._frame: Members = {}
        self._again = False
        self._joints: set[str] = set()

    @property
    def started(self) -> bool:
        """Whether an id and a role were sent, so that the next events may hold only text."""
        return bool(self._frame) and self.message.has("role")

    @property
    def seen(self) -> bool:
        return bool(self.calls) or not self.message.silent

    def go_on(self) -> None:
        self._again = True
        self._joints = {key for key in TEXTS if self.message.speaks(key)}

    def show(self, chunks: Iterable[Chunk]) -> bytes:
        return b"".join([self._put(chunk) for chunk in chunks if self._adopt(chunk)])

    def close(self, done: bytes) -> bytes:
        return done

    def _put(self, chunk: Chunk) -> bytes:
        return sse.encode(chunk.json(), chunk.name) if chunk.raw is None else chunk.raw

    def _adopt(self, chunk: Chunk) -> bool:
        """Turn the chunk into an event of this reply. Returns whether it holds anything to show."""
        if chunk.choice is None and chunk.usage is not None and not self._wants_usage:
            return False
        if self._again:
            self._join(chunk)
        elif chunk.choice is not None and not self._frame:
            self._frame = {key: chunk.members[key] for key in FRAME if key in chunk.members}
        if chunk.raw is None and chunk.void:
            return False
        self.message.add(chunk.delta)
        return True

    def _join(self, chunk: Chunk) -> None:
        frame = {key: self._frame[key] for key in chunk.members if key in self._frame}
        if frame:
            chunk.put(frame)
        if chunk.usage is not None:
            chunk.put({"usage": self._ledger.total(chunk.usage)})
        if "role" in chunk.delta and self.message.has("role"):
            chunk.put_delta({key: raw for key, raw in chunk.delta.items() if key != "role"})
        for key in tuple(self._joints):
            if text := text_of(chunk.delta.get(key)):
                self._joints.remove(key)
                chunk.put_delta(chunk.delta | {key: string("\n\n" + text)})


class ChatWholeReply(ChatClientReply):
    """A reply that is not a stream: upstream's own bytes if there was only one round without calls of ours."""

    streamed = False

    def __init__(self, ledger: UsageLedger) -> None:
        super().__init__(ledger)
        self._only: bytes | None = None
        self._members: Members = {}
        self._choice: Members = {}
        self._logprobs: dict[str, list[Raw]] = {}

    def close(self, done: bytes) -> bytes:
        if self._only is not None:
            return self._only
        calls = {"tool_calls": Raw(rawjson.array([call.shown() for call in self.calls]))} if self.calls else {}
        message = self.message.members() | calls
        choice = self._choice | {"message": Raw(rawjson.encode(message))}
        if self._logprobs:
            joined = {key: Raw(rawjson.array(tokens)) for key, tokens in self._logprobs.items()}
            choice["logprobs"] = Raw(rawjson.encode(object_of(choice.get("logprobs")) | joined))
        return rawjson.encode(self._members | {"choices": Raw(rawjson.array([rawjson.encode(choice)]))})

    def _put(self, chunk: Chunk) -> bytes:
        self._only = None if self._members else chunk.raw
        if chunk.key == "message" or not self._members:
            self._members |= chunk.members
        elif chunk.usage is not None:
            self._members |= {"usage": chunk.usage}
        self._put_choice(chunk, {} if chunk.choice is None else chunk.choice)
        return b""

    def _put_choice(self, chunk: Chunk, choice: Members) -> None:
        logprobs = object_of(choice.get("logprobs"))
        spoken = ("delta",) if logprobs or "logprobs" not in self._choice else ("delta", "logprobs")
        self._choice |= {key: raw for key, raw in choice.items() if key not in spoken}
        for key, tokens in logprobs.items():
            if rawjson.is_array(tokens):
                self._logprobs.setdefault(key, []).extend(rawjson.elements(tokens))
