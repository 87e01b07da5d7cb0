"""A history as the planner sees it: the measures of its messages, the digests that identify it, and
its plan so far.

`History` folds messages. If it continues an earlier request's history, only the new messages have
to be read.

The *history digest* covers the meaning of messages and not their bytes, so that a client is still
recognised if it serialises anew on every turn, moves cache breakpoints or adds annotations. The
leading system messages are not part of it, because agents put the time of day there. Later ones
are, because some clients send results as system messages.

A *step* is an assistant message with everything up to the next one. Within a step a result belongs
to the call with its id; calls with equal ids, or with none, get their results in order. A message
is *irregular* if it has a call without a result, if it is a result without a call, or if it is
*sealed*: something in it is not known to be safe to move or to cut, such as definitions of tools,
what only upstream can read, or what no API had when this was written. Nobody knows what hangs on
such messages, so the plan leaves them as they are, and a cut leaves their whole step in its place.
So does a cut with a step in which the user speaks.
"""

from __future__ import annotations

import copy
import hashlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from itertools import takewhile
from typing import NamedTuple, Self

import msgspec
from msgspec import Raw

from proxy.plan import preview
from proxy.plan.plan import Breakpoint, Item, Message, Piece, Plan, Role, Room
from proxy.plan.planner import Fold
from proxy.plan.preview import Label
from proxy.plan.recognise import Hidden
from proxy.plan.texts import Carries
from proxy.policy import Offload

PLACE_BYTES = 250
"""Bytes that a history takes for each message beside the message. `tests/plan/test_sizes.py`
compares all of these with what the objects take."""
WANTED_BYTES = 200
"""Bytes of the key of a record that was looked for."""
RAW_BYTES = 80
"""Bytes of an entry of a beginning beside those of its text."""
BEGINNING = bytes(16)  # the digest of a history without messages
OPENING_MESSAGES = 100
"""Messages among which the user's first one is looked for. It is the first or second one of nearly
every history."""


def extend(link: bytes, meaning: bytes) -> bytes:
    """The digest of a history with one more message."""
    return hashlib.sha256(link + meaning).digest()[:16]


def leading(messages: Iterable[Message]) -> int:
    """Return the number of system messages at the beginning."""
    return sum(1 for _ in takewhile(lambda message: message.role is Role.SYSTEM, messages))


def beginning(messages: Sequence[Message]) -> bytes:
    """Return the digest of what a history means up to the user's first message, without the leading
    system messages.

    All requests of a conversation have it."""
    link = BEGINNING
    for message in messages[leading(messages[:OPENING_MESSAGES]) : OPENING_MESSAGES]:
        link = extend(link, message.meaning)
        if message.role is Role.USER:
            break
    return link


# -- calls and results -----------------------------------------------------------------------------


class Irregular(StrEnum):
    """Why a message fits into no pair."""

    NO_RESULT = "no_result"
    NO_CALL = "no_call"
    SEALED = "sealed"


class Place(NamedTuple):
    """A message's place among calls and results."""

    tool: str = ""  # the tool whose result it is
    # whether it is neither a result without a call nor sealed. Otherwise its text must not move.
    fits: bool = True
    stays: bool = False  # whether a cut leaves it where it is
    stays_before: int = 0
    """How many messages directly before it a cut must leave where they are too, as this message
    shows."""


class Pairing:
    """The calls and results of a history's messages so far. Each message takes constant time
    (amortised)."""

    def __init__(self) -> None:
        self.irregular: dict[Irregular, int] = {}  # the number of irregular messages so far
        # by id, the tools called in the newest step whose results may still come
        self.open: dict[str, deque[str]] = {}
        self._stays = False  # whether the step so far stays
        self._loose = 0  # how many messages the step has so far, if it does not stay
        # whether the next reply belongs to this step: we do not know who said the last entry
        self._goes_on = False

    def add(
        self,
        role: Role,
        calls: tuple[tuple[str, str], ...],
        answers: str,
        sealed: bool = False,
        said: bool = False,
        asks: Callable[[str], bool] = lambda tool: False,
    ) -> Place:
        """Return the place of the history's next message. `sealed`, `said`: see `Message`; `asks`:
        whether a tool's results are the user's words."""
        reasons = list[Irregular]()
        # the step goes on without their results
        if self.open and role not in (Role.TOOL, Role.SEALED):
            reasons.append(Irregular.NO_RESULT)
            self.open = {}
        before = self._begin_to_stay() if reasons else 0
        if role is Role.ASSISTANT and not self._goes_on:
            self._stays = False
            self._loose = 0
        self._goes_on = sealed and role is Role.SEALED
        tool = None
        if role is Role.TOOL and (names := self.open.get(answers)):
            tool = names.popleft()
            if not names:
                del self.open[answers]
        fits = not sealed and (role is not Role.TOOL or tool is not None)
        if not fits:
            reasons.append(Irregular.SEALED if sealed else Irregular.NO_CALL)
        if not fits or (role is Role.TOOL and (said or asks(tool or ""))):
            before += self._begin_to_stay()
        for id, name in calls if role is Role.ASSISTANT else ():
            self.open.setdefault(id, deque()).append(name)
        self._loose += not self._stays
        for reason in reasons:
            self.irregular[reason] = self.irregular.get(reason, 0) + 1
        return Place(tool or "", fits, self._stays, before)

    def copy(self) -> Self:
        other = copy.copy(self)
        other.open = {id: names.copy() for id, names in self.open.items()}
        other.irregular = self.irregular.copy()
        return other

    def _begin_to_stay(self) -> int:
        """Let the step stay; returns how many of its messages did not stay before."""
        before = self._loose
        self._stays = True
        self._loose = 0
        return before


class Naming(msgspec.Struct, frozen=True):
    """Names the pieces of a history, message by message. A name depends only on what came before
    it."""

    # the labels of all calls, by their ids; of calls with the same id, the newest
    calls: Mapping[str, Label] = {}
    taken: Mapping[str, str] = {}
    """Each name so far, with the digest of its text: a text that would get another's name gets a
    longer one."""

    def named(self, messages: Sequence[Message]) -> tuple[list[Message], Naming]:
        """Return the messages with their pieces named, and the naming to continue with."""
        if not any([message.calls or message.pieces for message in messages]):
            return list(messages), self
        calls = dict(self.calls)
        taken = dict(self.taken)
        found = list[Message]()
        for message in messages:
            calls |= {
                id: label for (id, _), label in zip(message.calls, message.labels, strict=False)
            }
            known = calls.get(message.answers) if message.role is Role.TOOL else None
            pieces = list[Piece]()
            for piece in message.pieces:
                label = known or piece.label
                name = preview.file_name(label, piece.digest)
                if taken.setdefault(name, piece.digest) != piece.digest:
                    name = preview.file_name(label, piece.digest, len(piece.digest))
                    taken[name] = piece.digest
                pieces.append(piece.named(name, label))
            found.append(
                msgspec.structs.replace(message, pieces=tuple(pieces)) if pieces else message
            )
        return found, Naming(calls, taken)


# -- the history -----------------------------------------------------------------------------------


class Transcript:
    """A whole history: the entries, and a `Message` for each."""

    def __init__(
        self,
        raws: Sequence[bytes | Raw],
        messages: Sequence[Message],
        tools: Sequence[str],
        breakpoints: Mapping[Breakpoint, int] = {},
    ) -> None:
        self.raws = raws
        self.messages = messages
        self.tools = tools  # per message, the name of the tool whose result it is
        self.breakpoints = breakpoints  # as `History` has them
        self.leading = leading(messages)


class Terms(msgspec.Struct, frozen=True):
    """Everything that a plan depends on besides the messages; see `Fold`."""

    model: str
    offload: Offload
    room: Room
    tool_definition_tokens: int
    pauses: tuple[tuple[bytes, int], ...] = ()
    """By `History.point_digest`: requests at which upstream's cache had expired, and the seconds
    since those before."""
    harmless: tuple[str, ...] = ()
    """See `Reading`."""


class Sought(msgspec.Struct, frozen=True):
    """The hidden rounds of a history's replies before `upto`, as they are put back. For the other
    replies before that, the store had no record when it was asked."""

    namespace: str
    upto: int = 0
    rounds: Mapping[int, Hidden] = {}
    used: Mapping[bytes, int] = {}
    """Digests of what these rounds hold, and of which reply they are."""
    wanted: set[str] = set()
    """The keys of the records that were looked for, at least. Longer histories add theirs."""
    at: int = 0
    """How many records the process had put before it looked."""

    def ending(self, upto: int, rounds: Mapping[int, Hidden]) -> Sought:
        """Return the same up to this index, with those of these rounds that are before it."""
        rounds = {at: hidden for at, hidden in rounds.items() if at < upto}
        used = {content: at for content, at in self.used.items() if at < upto}
        return msgspec.structs.replace(self, upto=upto, rounds=rounds, used=used)

    def size(self) -> int:
        """About how many bytes it takes."""
        return WANTED_BYTES * len(self.wanted) + sum(map(Hidden.size, self.rounds.values()))


class Paused(msgspec.Struct, frozen=True):
    """At which of a history's requests before the message `upto` upstream's cache had expired, and
    after how many seconds: by the digests of these points."""

    namespace: str
    recorded: int
    """Which pause of the conversation this process had recorded last when it looked."""
    upto: int = 0
    seconds: Mapping[bytes, int] = {}


class History:
    """The messages of a history, measured and folded. Only `stem`, `sought` and `paused` ever
    change; `extended` makes a longer history."""

    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        self.messages: list[Message] = []  # with the names of their pieces
        self.tools: list[str] = []  # per message, the name of the tool whose result it is
        self.items: list[Item] = []
        self.links = [BEGINNING]  # entry *i* identifies what the first *i* messages mean
        self.tokens = 0
        self.fixed = 0  # tokens of images, audio and files, which could not be counted
        self.has_place = False  # whether it has the name of the folder of moved texts
        # what looks like the names of moved texts
        self.names: frozenset[str] = frozenset()
        # the client's cache breakpoints, and how many times there is each
        self.breakpoints: Mapping[Breakpoint, int] = {}
        self.fold = Fold(terms.offload, terms.room, terms.tool_definition_tokens)
        self._user_came = False  # whether the user's first message has come
        self._pairing = Pairing()
        self._naming = Naming()
        self._held = 0  # bytes of the messages
        self.stem: History | None = None
        """The shorter history that is kept for later requests; None if this one is kept."""
        self.sought: Sought | None = None
        """What its caller's records had of its replies when they were last asked."""
        self.paused: Paused | None = None
        """What they said of its pauses."""

    def __len__(self) -> int:
        """The number of messages."""
        return len(self.messages)

    def extended(self, messages: Sequence[Message]) -> History:
        """The history followed by these messages."""
        if not messages:
            return self
        longer = copy.copy(self)
        longer.stem = None
        named, longer._naming = self._naming.named(messages)
        longer.messages = [*self.messages, *named]
        longer.tools = self.tools.copy()
        longer.items = self.items.copy()
        longer.links = self.links.copy()
        longer._pairing = self._pairing.copy()
        longer.fold = self.fold.copy()
        for message in named:
            longer._add(message)
        longer._held += sum([message.size() for message in named])
        longer.has_place |= any([message.has_place for message in named])
        longer.names = self.names.union(*[message.names for message in named])
        marks = [mark for message in named for mark in message.breakpoints]
        longer.breakpoints = (
            Counter(self.breakpoints) + Counter(marks) if marks else self.breakpoints
        )
        return longer

    def _add(self, message: Message) -> None:
        offload = self.terms.offload
        role = message.role
        pause = self._pause()
        leads = role is Role.SYSTEM and self.links[-1] == BEGINNING
        kept = offload.keep_errors and message.failed
        place = self._pairing.add(
            role,
            message.calls,
            message.answers,
            bool(message.sealed),
            message.user_speaks or kept,
            offload.asks,
        )
        part, movable = (role, False) if leads else self._part(message)
        if (
            kept
            or not place.fits
            or (place.tool and (offload.excludes(place.tool) or offload.asks(place.tool)))
        ):
            movable = False
        item = Item(
            part,
            message.tokens,
            message.first_preview if movable else message.tokens,
            message.preview if movable else message.tokens,
            message.fixed,
            place.stays or role is Role.SEALED,
            place.stays_before,
        )
        self.tools.append(place.tool)
        self.items.append(item)
        self.links.append(BEGINNING if leads else extend(self.links[-1], message.meaning))
        self.fold.add(item, pause)
        self.tokens += message.tokens
        self.fixed += message.fixed
        self._user_came = self._user_came or role is Role.USER

    def _part(self, message: Message) -> tuple[Role, bool]:
        """The part that the next message plays in the plan, and whether its texts may ever be
        moved. One in which the user speaks is the user's, whoever sends it. Later system messages
        that are large are results, and so are messages that the policy names. Of the others only
        large user messages can be moved, but never the first one, which usually states the task."""
        role = message.role
        offload = self.terms.offload
        if role not in (Role.SYSTEM, Role.USER):
            return role, True
        if role is Role.USER and not self._user_came:
            return role, False
        large_user = message.tokens > offload.pin_user_tokens
        if message.user_speaks:
            return Role.USER, large_user
        named = message.carries is Carries.YES or (
            message.carries is Carries.AFTER_FIRST_USER and self._user_came
        )
        if named or (role is Role.SYSTEM and message.tokens > offload.max_tool_message_tokens):
            return Role.TOOL, True
        return role, role is Role.USER and large_user

    @property
    def irregular(self) -> Mapping[Irregular, int]:
        """How many messages fit into no pair, by the reason."""
        found = self._pairing.irregular
        if not self._pairing.open:
            return found
        return found | {Irregular.NO_RESULT: found.get(Irregular.NO_RESULT, 0) + 1}

    def size(self) -> int:
        """About how many bytes it takes, with its messages, as their own cache may have evicted
        them."""
        names = len(self._naming.calls) + len(self._naming.taken)
        sought = self.sought.size() if self.sought else 0
        places = PLACE_BYTES * len(self) + 100 * names
        paused = WANTED_BYTES * len(self.paused.seconds) if self.paused else 0
        return 4_700 + 64 * self.fold.pins + places + self._held + sought + paused

    def plan(self) -> Plan:
        """The plan for a request that ends here."""
        return self.fold.plan(self._pause())

    def point_digest(self, point: int) -> bytes:
        """The digest of the history that the client sent with its first `point` messages, without
        the system messages at its end: some clients add a reminder to each request and keep
        none."""
        while point and self.items[point - 1].role is Role.SYSTEM:
            point -= 1
        return self.links[point]

    def _pause(self) -> int:
        """The seconds since the request before, if upstream's cache had expired at one that ends
        here; else 0."""
        return (
            dict(self.terms.pauses).get(self.point_digest(len(self.items)), 0)
            if self.terms.pauses
            else 0
        )

    def transcript(self, raws: Sequence[bytes | Raw]) -> Transcript:
        """The history together with the bytes of its entries."""
        return Transcript(raws, self.messages, self.tools, self.breakpoints)


class Beginning:
    """The beginning of a history as a client sent it, and what was made of it: all of this is a
    function of its bytes."""

    def __init__(
        self,
        text: bytes,
        count: int,
        entries: list[Raw],
        *,
        replied: bool = False,
        refers: bool = False,
    ) -> None:
        self.text = text
        """The messages, with what is between them."""
        self.count = count
        """How many they are; they may be more entries, or fewer."""
        self.entries = entries
        self.replied = replied
        """Whether a reply is known to be among them, where the API counts on that."""
        self.refers = refers
        """Whether there may be references to compacted histories in it."""
        self.histories: dict[Terms, History] = {}
        """The newest last. One may end before this beginning does."""

    def size(self) -> int:
        """About how many bytes it takes, with the entries, which have bytes of their own."""
        histories = sum([history.size() for history in self.histories.values()])
        return 2 * len(self.text) + RAW_BYTES * len(self.entries) + histories
