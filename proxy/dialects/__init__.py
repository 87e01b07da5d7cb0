"""What the proxy needs to know of an API, and which APIs it knows.

A dialect is one folder in this package. It says how its API writes history, tools, replies and errors. It is pure, and
no other part of the proxy names a field of its API. Nothing is ever translated from one API into another: unknown
fields, encrypted reasoning and signatures survive only because untouched entries keep their bytes.

An *entry* is the unit of history that the plan counts in. In chat completions it is a message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from msgspec import Raw

from proxy.core.history import Count, Message, Reading, ToolCall
from proxy.core.policy import SnapshotRole
from proxy.core.request import Request
from proxy.core.sse import ServerSentEvent
from proxy.core.summary import Section, SummaryAnswer
from proxy.core.turn import HiddenRound, State, Usage
from proxy.dialects.chat import CHAT
from proxy.errors import ProxyError

Entry = bytes | Raw
"""One entry of a history as JSON."""


class Turn(Protocol):
    """One request of a client: as many rounds with upstream as it takes, and one reply. It does no I/O.

    While `state` is READY, send `request()`. Feed the reply to `receive` or `receive_whole`, then call `end()`. While
    `state` is CALLING, pass the results of `calls` to `answer`. Once it is DONE, store `hidden` and send `close()`.
    A call in the wrong state raises WrongState.
    """

    @property
    def state(self) -> State: ...

    @property
    def rounds(self) -> int:
        """Hidden rounds so far."""

    @property
    def streams(self) -> bool:
        """Whether the client asked for a stream."""

    @property
    def over(self) -> bool:
        """Whether the round's reply has said that it is complete, so that nothing more needs to be received."""

    @property
    def calls(self) -> list[ToolCall]:
        """The calls of our tools to answer now."""

    @property
    def hidden(self) -> HiddenRound | None:
        """What has to be stored once the turn is DONE; None where the client has seen everything."""

    @property
    def visible(self) -> tuple[str, list[ToolCall]]:
        """The text and the calls that the client has seen."""

    @property
    def mixed(self) -> bool:
        """Whether calls of ours were answered beside calls that the client answers."""

    @property
    def spent(self) -> Usage: ...

    def request(self) -> bytes:
        """The body of the next round's request."""

    def receive(self, event: ServerSentEvent) -> bytes:
        """Take one event of a stream; returns the bytes for the client. Raises Broken."""

    def receive_whole(self, body: bytes) -> bytes:
        """Take a reply that is not a stream; returns the bytes for the client. Raises Broken."""

    def end(self) -> bytes:
        """The round's reply has ended; returns the bytes for the client. Raises Broken if it stopped in our call."""

    def answer(self, answers: Sequence[str]) -> None:
        """Take the results of `calls`, in the same order."""

    def reword(self, text: str) -> None:
        """Prepare the round to be sent once more with `text` for our tools' results: they did not fit."""

    def close(self) -> bytes:
        """The last bytes of the client's reply; the whole reply where it is not a stream."""

    def is_overflow(self, status: int, body: bytes) -> bool:
        """As the dialect's method of this name, for a refused round."""

    def error_event(self, fault: ProxyError, said: bytes = b"") -> bytes:
        """As the dialect's method of this name, for a stream that cannot be finished."""


class Dialect(Protocol):
    """One API. All methods are pure functions of their arguments."""

    @property
    def name(self) -> str:
        """The name of the dialect's folder."""

    def serves(self, method: str, path: bytes) -> bool:
        """Whether a request with this method and path (without its query) asks this API for a reply of a model."""

    # -- a request --

    def parse(self, body: bytes) -> Request:
        """Look into a decompressed body. Raises Unplannable for a body that is not a request of this API."""

    def turn(self, request: Request, entries: Sequence[Entry], tools: Sequence[bytes], max_rounds: int) -> Turn:
        """A turn that sends `entries` instead of the request's own and adds our `tools`.

        `tools` are JSON objects with `name`, `description` and `parameters`. Everything else goes as the client sent
        it. After `max_rounds` hidden rounds, no call of ours is answered.
        """

    # -- an entry --

    def read(self, entry: Entry, reading: Reading, count: Count) -> Message:
        """Measure an entry: role, meaning, tokens, texts that can be moved, calls, answers. Raises Unplannable.

        The meaning is part of record keys. Two dialects must never give the same one, or a record of one API would
        be put into requests of the other. Chat came first and begins with nothing; others begin with their name.
        """

    def texts(self, entry: Entry) -> list[tuple[int | None, str]]:
        """The entry's texts, each with the place by which `replace` finds it again. Raises NotJson."""

    def replace(self, entry: Entry, texts: Mapping[int | None, str]) -> bytes:
        """The entry with the texts at these places replaced. All other members keep their bytes."""

    def sections(self, entry: Entry, index: int, message: Message, tool: str) -> list[Section]:
        """The entry in readable form, for the file of originals. Raises NotJson.

        `index` is the entry's place in the history, and `tool` the name of the tool whose result it is, or empty.
        """

    def with_snapshot(self, entries: list[Entry], leading: int, block: str, role: SnapshotRole) -> list[Entry]:
        """The entries with the snapshot's text `block` added where `role` wants it.

        `leading`: with how many system messages the entries begin.
        """

    def reinserted(self, hidden: HiddenRound, visible: Entry, shrunk: bool) -> list[Entry]:
        """A hidden round together with the reply that the client saw, in the order in which they were said.

        `shrunk`: replace the answers of our tools by a line that says how to get them again.
        """

    def reply_meaning(self, text: str, calls: Sequence[ToolCall]) -> bytes:
        """The `Message.meaning` that a reply with this text and these calls has when the client sends it back."""

    # -- a summary --

    def summary_request(self, text: str, model: str, request: Request | None = None, most: int = 0) -> bytes:
        """The body of a summary call whose only input is `text`.

        From `request` it takes over who asks. If `request` is for the same model, it also takes over how to cache and
        how to reason, and allows the reply `most` tokens where the client set a limit.
        """

    def summary_on_prefix(
        self, text: str, request: Request, entries: Sequence[Entry], tools: Sequence[bytes], most: int, end: int
    ) -> bytes:
        """The body of a summary call that continues `entries`, which upstream has cached, with the task `text`.

        `end` says where in the client's history the entries end: a cache breakpoint that the client set after it is
        set on the task. `tools` and `most` are as above; the model may call none of the tools.
        """

    def summary_answer(self, status: int, body: bytes) -> SummaryAnswer:
        """The reply to a summary call. Any body is taken; one that cannot be read has no text."""

    # -- refusals and errors --

    def may_be_overflow(self, status: int) -> bool:
        """Whether a reply of this status may say that the request is too long, so that it is worth reading."""

    def is_overflow(self, status: int, body: bytes) -> bool:
        """Whether this refusal means that the request has too many tokens."""

    def window(self, body: bytes) -> int | None:
        """The context window, in tokens, that such a refusal names; None where it names none."""

    def refuses_additions(self, status: int, body: bytes) -> bool:
        """Whether this refusal complains about something that we added to the request."""

    def error_body(self, fault: ProxyError) -> bytes:
        """The body of an error reply of our own."""

    def error_event(self, fault: ProxyError, said: bytes = b"") -> bytes:
        """The event that ends a stream after a failure.

        `said` is the body of upstream's refusal, if that is the failure. It is used instead of `fault` where it has
        the shape that clients of this API know.
        """


DIALECTS: tuple[Dialect, ...] = (CHAT,)
"""Every dialect that the proxy knows. Which one serves a request is decided in this order."""


def for_request(method: str, path: bytes) -> Dialect | None:
    """The dialect that serves this method and path; None for what is only relayed."""
    return next((dialect for dialect in DIALECTS if dialect.serves(method, path)), None)
