"""Defines what the proxy needs to know about an API, and lists the APIs that it knows.

A dialect is one folder in this package. It knows how its API writes history, tools, replies and errors. It is pure, and
no other part of the proxy names a field of its API. The proxy never translates one API into another: unknown fields,
encrypted reasoning and signatures survive only because untouched entries keep their bytes.

An *entry* is the unit of history in which the plan counts. In chat completions it is a message.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from msgspec import Raw

from proxy.dialects.chat import CHAT
from proxy.dialects.messages import MESSAGES
from proxy.dialects.refusals import RawHeaders
from proxy.dialects.responses import RESPONSES
from proxy.dialects.turn import Turn
from proxy.dialects.usage import Reported
from proxy.errors import ProxyError
from proxy.plan.history import Count, Message, Reading, ToolCall, Unplannable
from proxy.plan.refusals import Complaint
from proxy.plan.request import Request
from proxy.plan.summary import Section, SummaryAnswer
from proxy.plan.turn import Continuation, HiddenRound
from proxy.policy import SnapshotRole
from proxy.rawjson import NotJson
from proxy.tools.definitions import NAMES, Names

Entry = bytes | Raw
"""One entry of a history as JSON."""


class Dialect(Protocol):
    """One API. All methods are pure functions of their arguments."""

    @property
    def name(self) -> str:
        """The name of the dialect's folder."""

    @property
    def counts(self) -> bool:
        """Whether its requests only ask how many tokens they have, so that no model replies and nothing is recorded."""

    def serves(self, method: str, path: bytes) -> bool:
        """Whether a request with this method and path (without the query) asks this API for a model's reply."""

    def owns(self, path: bytes, names: Collection[bytes]) -> bool:
        """Whether another request belongs to this API, as its path or a header's name tells (in lower case)."""

    # -- a request --

    def parse(self, body: bytes) -> Request:
        """Parse a decompressed body. Raises Unplannable for a body that is not a request of this API."""

    def turn(
        self,
        request: Request,
        entries: Sequence[Entry],
        tools: Sequence[bytes],
        max_rounds: int,
        usage: bool = True,
        left: int | None = None,
    ) -> Turn:
        """Return a turn that sends `entries` instead of the request's own and adds our `tools`.

        `tools` are JSON objects with `name`, `description` and `parameters`. Everything else is sent as the client
        wrote it, except that the turn asks for the `usage` of a stream if the client does not, for the metrics. After
        `max_rounds` hidden rounds, calls of our tools are no longer answered. The reply's limit is lowered as
        `reply_limit` says if it is known how many tokens are `left` for it.
        """

    def reply_limit(self, asked: Request, left: int) -> int | None:
        """Return the lower limit that the reply gets if the window leaves it so many tokens; None if its own fits.

        It is not below a thinking budget, nor so low that the reply would be of no use.
        """

    def with_lower_limit(self, asked: Request, left: int) -> bytes:
        """Return the body of the request with that limit and no other change."""

    def continued(self, request: Request, continuation: Continuation) -> bytes:
        """Return the body of a request that goes on from a reply with hidden rounds, for upstream, which keeps them."""

    # -- an entry --

    def read(self, entry: Entry, reading: Reading, count: Count) -> Message:
        """Measure an entry: role, meaning, tokens, texts that can be moved, calls, answers. Raises Unplannable.

        The meaning is part of record keys. Two dialects must never return the same one, or a record of one API would
        be put into requests of the other. Chat, the first dialect, adds no prefix; others begin with their name.
        """

    def texts(self, entry: Entry) -> list[tuple[int | None, str]]:
        """Return the entry's texts, each with the place by which `replace` finds it again. Raises NotJson."""

    def replace(self, entry: Entry, texts: Mapping[int | None, str]) -> bytes:
        """Return the entry with the texts at these places replaced. All other members keep their bytes."""

    def sections(self, entry: Entry, index: int, message: Message, tool: str) -> list[Section]:
        """Return the entry in readable form, for the file of originals. Raises NotJson.

        `index` is the entry's place in the history, and `tool` is the name of the tool whose result it is, or empty.
        """

    def with_snapshot(self, entries: list[Entry], leading: int, block: str, role: SnapshotRole) -> list[Entry]:
        """Return the entries with the snapshot's text `block` added at the place for `role`.

        `leading` is the number of system messages with which the entries begin. An entry of its own stands directly
        after them.
        """

    def joined(self, entries: list[Entry]) -> list[Entry]:
        """Return the entries with each run of user messages as one, if the API may refuse user messages in a row.

        Messages of users with different names stay apart, and so does everything else.
        """

    def reinserted(self, hidden: HiddenRound, visible: Entry) -> list[Entry]:
        """Return a hidden round together with the reply that the client saw, in their original order."""

    def shrunk(self, hidden: HiddenRound, least: int, names: Names = NAMES) -> HiddenRound:
        """Return the round with a line in place of each answer above `least` tokens that says how to get it again.
        `names` are those of our tools."""

    def marked(self, request: Request, place: int, entry: Entry) -> Entry:
        """Return entry `place` as it is sent, with a cache breakpoint of ours unless the client marks it or it cannot
        carry one. The request has room for it; see `cache_marks.room`."""

    def said(self, entry: Entry) -> tuple[str, list[ToolCall]]:
        """Return the text and the calls of a reply. Raises NotJson."""

    def reply_meaning(self, text: str, calls: Sequence[ToolCall]) -> bytes:
        """Return the `Message.meaning` of a reply with this text and these calls when the client sends it back."""

    # -- a summary --

    def summary_request(self, text: str, model: str, request: Request | None = None, most: int = 0) -> bytes:
        """Return the body of a summary call whose only input is `text`.

        The call copies from `request` the members that say who asks. If `request` is for the same model, the call also
        copies how to cache and how to reason. The reply may have `most` tokens, without a limit if that is 0.
        """

    def summary_on_prefix(
        self, text: str, request: Request, entries: Sequence[Entry], tools: Sequence[bytes], most: int, end: int
    ) -> bytes:
        """Return the body of a summary call that continues `entries`, which upstream has cached, with the task `text`.

        `end` is the place in the client's history where the entries end. If the client set a cache breakpoint after it,
        the task gets that breakpoint. `tools` and `most` are as above; the model may not call any of the tools.
        """

    def summary_answer(self, status: int, body: bytes) -> SummaryAnswer:
        """Read the reply to a summary call. Accepts any body; the answer has no text if the body cannot be read."""

    # -- refusals and errors --

    def forgiving(self, body: bytes, headers: RawHeaders) -> tuple[bytes, RawHeaders]:
        """Return the request so that upstream drops thinking that no longer fits what precedes it, if it can."""

    def may_be_overflow(self, status: int) -> bool:
        """Whether a reply with this status may mean that the request is too long, so that its body is worth reading."""

    def prompt_tokens(self, end: bytes) -> int:
        """Return the tokens of the prompt, as upstream counted them, from the last bytes of a reply; 0 if they do not
        say."""

    def reported(self, end: bytes) -> Reported | None:
        """Return what the last bytes of a reply that is only relayed say about its cost, or None if they do not."""

    def window(self, body: bytes) -> int | None:
        """Return the context window, in tokens, that such a refusal names, or None if it names none."""

    def complaint(self, status: int, body: bytes) -> Complaint:
        """Return what this refusal of a request that we changed is about.

        Status 200 means that `body` is an error in the place of a reply, as in `Turn.refusal`.
        """

    def is_error(self, body: bytes) -> bool:
        """Whether this is an error in the place of a reply."""

    def shape(self, request: Request) -> str:
        """Return what else in the request decides whether upstream takes our additions, such as JSON mode."""

    def error_body(self, fault: ProxyError) -> bytes:
        """Return the body of an error reply from the proxy itself."""

    def error_event(self, fault: ProxyError, said: bytes = b"") -> bytes:
        """Return the event that ends a stream after a failure.

        `said` is the body of upstream's refusal, if that is the failure. It is used instead of `fault` if it has the
        shape that clients of this API know.
        """


DIALECTS: tuple[Dialect, ...] = (CHAT, RESPONSES, MESSAGES, MESSAGES.counting)
"""Every dialect that the proxy knows. The first one that serves a request is used."""


def for_body(body: bytes) -> list[Dialect]:
    """Return the dialects of which a body without a path may be, the likeliest first."""
    own: list[Dialect] = [dialect for dialect in DIALECTS if not dialect.counts]
    try:
        messages = MESSAGES.recognises(MESSAGES.parse(body))
    except (Unplannable, NotJson):
        messages = False
    return [MESSAGES, *own] if messages else own


def owner_of(path: bytes, names: Collection[bytes]) -> Dialect | None:
    """Return the dialect of a request that asks for no reply, or None if several APIs have its path."""
    return next((dialect for dialect in DIALECTS if dialect.owns(path, names)), None)


def for_request(method: str, path: bytes) -> Dialect | None:
    """Return the dialect that serves this method and path, or None for requests that are only relayed."""
    for dialect in DIALECTS:
        if dialect.serves(method, path):
            return dialect
    return None
