"""The values of a turn that dialects and requests share: the client's request, why and how it is
sent, and what became of it.

A turn is one request of a client: as many rounds with upstream as it takes, and one reply.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection
from enum import Enum, StrEnum, auto
from functools import cached_property

import msgspec
from msgspec import Raw

from proxy import rawjson
from proxy.plan.history import Beginning


class State(Enum):
    """Where a turn is: about to send, reading a reply, waiting for the answers of our tools, or
    finished."""

    READY = auto()
    READING = auto()
    CALLING = auto()
    DONE = auto()


class WrongState(RuntimeError):
    """The driver called a method that the turn's state does not allow."""


class Broken(ValueError):
    """Upstream's reply cannot be continued: it stopped within one of our calls, or it is larger
    than any limit."""


class Usage(msgspec.Struct):
    """Tokens over all rounds, as upstream counted them."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0  # those of the prompt that upstream's cache held
    written: int = 0  # those of the prompt that upstream wrote to its cache
    cache_told: bool = False  # whether upstream said anything of its cache
    # the prompt of one round, the largest: upstream has shown that it takes so many
    largest: int = 0
    # those of the completion tokens that belong to rounds after which another one followed
    hidden: int = 0
    counted_rounds: int = 0  # rounds of which upstream said what it counted


class Continuation(msgspec.Struct, frozen=True):
    """How later requests go on from a reply with hidden rounds, and find it again, if upstream
    keeps the history. The client knows the reply by the id `shown`, and upstream keeps it as
    several `rounds`, in order. The entries `after` belong between the last one and what the client
    adds. `reply` is the whole reply as the client saw it; empty if it has no end."""

    shown: str
    rounds: tuple[str, ...]
    after: tuple[bytes, ...]
    reply: bytes = b""


class Declined(msgspec.Struct, frozen=True):
    """A request that the `model` refused after the hidden rounds `before`. Upstream gave a token
    with which another model takes it for less, if not a byte of it is different."""

    model: str
    before: tuple[bytes, ...]


# -- why, and with what, a request is sent -----------------------------------------------------


class Reason(StrEnum):
    """Empty for a request that was planned, be it that there was nothing to do."""

    NONE = ""
    OFF = "off"
    HEADER = "header"
    ENCODING = "encoding"
    INVALID = "invalid"  # upstream says better than we could what is wrong with it
    TOO_MANY_MESSAGES = "too_many_messages"
    TOO_MANY_TOOLS = "too_many_tools"
    TOO_MANY_MEMBERS = "too_many_members"
    # our tools do not go with one of the request's fields, which the log names as `obstacle`
    FIELD = "field"
    SUMMARY = "summary"
    BUSY = "busy"
    BUG = "bug"  # before the reply began
    REFUSED = "refused"

    def words(
        self, obstacle: str = "", unknown: Collection[str] = (), sent: str = "sent as it came"
    ) -> str:
        """Say in a sentence how a request was `sent` without a plan, and why. `unknown` are the
        members that we do not know."""
        if obstacle in map(_shown, unknown):
            return (
                f"{sent}: the proxy does not know what `{obstacle}` means; where it is harmless, name it in "
                "the policy's `upstream.members`"
            )
        why = _OBSTACLES.get(obstacle) or (
            f"the proxy's tools do not go with `{obstacle}`" if obstacle else _WHY[self]
        )
        return f"{sent}: {_UPSTREAM_COMPACTS if obstacle.startswith('compact') else why}"


_WHY = {
    Reason.OFF: "the policy's mode for this model is off",
    Reason.HEADER: "the client sent `x-offload: off`",
    Reason.ENCODING: "its body cannot be decompressed, or is too large then",
    Reason.INVALID: "its body is no chat that this API takes",
    Reason.TOO_MANY_MESSAGES: "it has too many messages (docs/deployment.md, Limits)",
    Reason.TOO_MANY_TOOLS: "it has too many tools (docs/deployment.md, Limits)",
    Reason.TOO_MANY_MEMBERS: "it has too many members (docs/deployment.md, Limits)",
    Reason.FIELD: "the proxy's tools do not go with one of its fields",
    Reason.SUMMARY: "the client has its history summarised, and the model gets all of it",
    Reason.BUSY: "it was only to be observed, and the proxy had too much to do",
    Reason.BUG: "the proxy failed at it, and its log says where",
    Reason.REFUSED: "upstream refused it with the proxy's changes",
}
_UPSTREAM_COMPACTS = "upstream is asked to compact it"
_OBSTACLES = {
    "unwritten": f"{_UPSTREAM_COMPACTS}, because the model wrote no snapshot of it for the proxy",
    "unstored": f"{_UPSTREAM_COMPACTS}, because the proxy's store did not keep what would move",
    "store_originals": f"{_UPSTREAM_COMPACTS}, because with `store_originals: false` the proxy keeps no texts",
    "tools": "the client's tools have the names of the proxy's; rename one",
    "tool_choice": "by its `tool_choice`, the model cannot read back what would move",
}


class Addition(StrEnum):
    """What we add to a client's request. Metrics and the log show these values."""

    USAGE = "usage"  # the wish to have the usage of a stream reported
    # the place of the snapshot: a system message of ours, or text at the end of the client's
    PLACE = "place"
    THINKING = "thinking"
    """The client's signed thinking, which upstream takes only behind what it took before. We have
    changed that."""
    LOOSE = "loose"
    """Our tools as they usually are: not strict, although all of the client's are."""
    ANY = "any"
    """No addition in particular: upstream takes the conversation as the client sent it and not as
    we changed it."""


class Verdict(Enum):
    """A refusal for another reason than our additions."""

    OVERFLOW = auto()  # the request has too many tokens
    # the model wrote something that upstream could not use. The same request may succeed.
    GENERATION = auto()
    FINAL = auto()
    """Whatever we left out would not help: safety, credentials, quota, an unknown model, a fault of
    upstream's own."""


Complaint = Addition | Verdict

# -- the client's request --------------------------------------------------------------------------

ENTRY = 512  # bytes that looking at an entry counts as, whatever its length
COMPARED = 8
PASSED = 2
"""How many times as much it costs to read bytes as to compare and copy known ones, and to look at
an entry as to pass over a known one."""

MAX_NAME = 40  # the most characters that a log or a header shows of a member's name
MAX_PATH = 100
"""The same of a path."""
_NAMELESS = re.compile(r"[^\w.\[\]-]", re.ASCII)
"""Characters that are in no API's names of members. They are replaced, so that clients cannot write
into a log or a header."""


def _shown(name: str, most: int = MAX_NAME) -> str:
    return _NAMELESS.sub("?", name[:most])


def unknown_words(sealed: str) -> str:
    """Say why an entry stays as it is; see `Message.sealed`."""
    if "[]." not in sealed:
        return f"an entry stays as it is for its {sealed}."
    path = _shown(sealed, MAX_PATH)
    said = f"what has `{path}` stays as it is, because the proxy does not know what that means"
    if path.endswith(".type"):
        return f"{said}."
    return f"{said}; where it is harmless, name it in the policy's `upstream.members`."


class Request(msgspec.Struct, frozen=True, dict=True):
    """What a dialect's `parse` finds in a body. An entry is the unit of history that the plan
    counts in."""

    body: bytes
    members: dict[str, Raw]  # all top-level members as raw JSON
    entries: list[Raw]
    model: str
    stream: bool
    tools: Raw  # the client's tool definitions; `null` where it sent none
    reply_tokens: int  # how many tokens the client reserved for the reply; 0 where it did not say
    # what our two tools are called in this request; None where there is no room for them
    names: tuple[str, str] | None
    # those of our tools' names that the client has for tools of its own, in any case
    theirs: frozenset[str]
    obstacle: str
    """The field that keeps us from offloading, because our tools do not work with it. Empty: there
    is none."""
    forbids_ours: bool = False
    """Whether the model may not call our tools, as `tool_choice` says, so that it could not read
    what was moved."""
    unknown: tuple[str, ...] = ()
    """The top-level members that we do not know. They may mean anything, so the history is not
    touched."""
    # text that precedes the history and is no part of it; `null` where there is none
    preamble: Raw = rawjson.NULL
    keeps: bool = False
    """Whether upstream keeps replies, so that a client may send none of them again."""
    replied: bool = False
    """Whether a reply is among the entries, where that counts because upstream may keep it."""
    # the id of an earlier reply, if upstream keeps the history and the request goes on from there
    continues: str = ""
    credit: str = ""
    """Upstream's token for a request that it refused, if this one is the same for another model."""
    listing: str = ""  # the member that has the entries
    known: Beginning | None = None
    """The beginning that the request shares with an earlier one."""
    fresh: bytes = b""
    """The body with a stand-in for that beginning."""

    @cached_property
    def aside(self) -> bytes:
        """The members beside the entries, as JSON."""
        return rawjson.encode(
            {name: raw for name, raw in self.members.items() if name != self.listing}
        )

    @property
    def unsent(self) -> bool:
        """Whether upstream keeps this beginning of a conversation, so that its client may never
        send it again."""
        return self.keeps and not self.replied

    def obstacle_beside(self, known: Collection[str]) -> str:
        """Return the obstacle, or an unknown member that is not among these `known` ones; empty if
        there is none."""
        name = self.obstacle or next((name for name in self.unknown if name not in known), "")
        return _shown(name)

    @property
    def has_tools(self) -> bool:
        """Whether the client sent tools of its own, as agents do."""
        return bytes(self.tools).strip() not in (b"null", b"[]", b"")

    @property
    def shape(self) -> str:
        """Stands for its members' names, which decide whether upstream takes our additions: JSON
        mode, for example."""
        return hashlib.sha256(
            "\n".join(sorted(self.members)).encode("utf-8", "surrogatepass")
        ).hexdigest()[:16]

    @property
    def size(self) -> int:
        """Bytes that work on the request looks through, for `threads`. Those that are known are
        only compared and copied."""
        known = self.known
        if known is None:
            return max(len(self.body), len(self.entries) * ENTRY)
        entries = (len(self.entries) - len(known.entries)) * ENTRY
        new = max(len(self.body) - len(known.text), entries)
        return new + max(len(known.text) // COMPARED, len(known.entries) * ENTRY // PASSED)


class Unplannable(ValueError):
    """This is not a request that we can read, or it has too many parts. It goes upstream
    unchanged."""

    def __init__(self, message: str, reason: Reason = Reason.INVALID) -> None:
        super().__init__(message)
        self.reason = reason
