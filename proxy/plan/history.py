"""A history as the planner sees it: the measures of its messages, the digests that identify it, and its plan so far.

`History` folds messages. If it continues an earlier request's history, only the new messages have to be read.

The *history digest* covers the meaning of messages and not their bytes, so that a client is still recognised if it
serialises anew on every turn, moves cache breakpoints or adds annotations. The leading system messages are not part of
it, because agents put the time of day there. Later ones are, because some clients send results as system messages.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile

import msgspec
from msgspec import Raw

from proxy.plan import preview
from proxy.plan.message import COPY_BYTES, Message, Piece, with_pieces
from proxy.plan.pairing import Irregular, Pairing
from proxy.plan.plan import Item, Plan, Role, Room
from proxy.plan.planner import Fold
from proxy.plan.preview import Label
from proxy.plan.texts import Carries
from proxy.policy import Offload

PLACE_BYTES = 330
"""Bytes that a history takes for each message beside the message. `tests/plan/test_sizes.py` compares all of these with
what the objects take."""


class Naming(msgspec.Struct, frozen=True):
    """Names the pieces of a history, message by message. A name depends only on what came before it."""

    calls: Mapping[str, Label] = {}
    """The labels of all calls, by their ids; of calls with the same id, the newest."""
    taken: Mapping[str, str] = {}
    """Each name so far, with the digest of its text: a text that would get another's name gets a longer one."""

    def named(self, messages: Sequence[Message]) -> tuple[list[Message], Naming]:
        """Return the messages with their pieces named, and the naming to continue with."""
        if not any([message.calls or message.pieces for message in messages]):
            return list(messages), self
        calls, taken, found = dict(self.calls), dict(self.taken), list[Message]()
        for message in messages:
            calls |= {id: label for (id, _), label in zip(message.calls, message.labels, strict=False)}
            known = calls.get(message.answers) if message.role is Role.TOOL else None
            pieces = [self._named(piece, known, taken) for piece in message.pieces]
            found.append(with_pieces(message, pieces) if pieces else message)
        return found, Naming(calls, taken)

    def _named(self, piece: Piece, known: Label | None, taken: dict[str, str]) -> Piece:
        label = known or piece.label
        name = preview.file_name(label, piece.digest)
        if taken.setdefault(name, piece.digest) != piece.digest:
            name = preview.file_name(label, piece.digest, len(piece.digest))
            taken[name] = piece.digest
        return piece.named(name, label)


class Transcript:
    """A whole history: the entries, and a `Message` for each."""

    def __init__(self, raws: Sequence[bytes | Raw], messages: Sequence[Message], tools: Sequence[str]) -> None:
        self.raws = raws
        self.messages = messages
        self.tools = tools
        """Per message, the name of the tool whose result it is."""
        self.leading = leading(messages)


def leading(messages: Iterable[Message]) -> int:
    """Return the number of system messages at the beginning."""
    return sum(1 for _ in takewhile(lambda message: message.role is Role.SYSTEM, messages))


BEGINNING = bytes(16)
"""The digest of a history without messages."""


def extend(link: bytes, meaning: bytes) -> bytes:
    """The digest of a history with one more message."""
    return hashlib.sha256(link + meaning).digest()[:16]


OPENING_MESSAGES = 100
"""Messages among which the user's first one is looked for. It is the first or second one of nearly every history."""


def beginning(messages: Sequence[Message]) -> bytes:
    """Return the digest of what a history means up to the user's first message, without the leading system messages.

    All requests of a conversation have it."""
    link = BEGINNING
    for message in messages[leading(messages[:OPENING_MESSAGES]) : OPENING_MESSAGES]:
        link = extend(link, message.meaning)
        if message.role is Role.USER:
            break
    return link


class Terms(msgspec.Struct, frozen=True):
    """Everything that a plan depends on besides the messages; see `planner.fold`."""

    model: str
    offload: Offload
    room: Room
    tool_definition_tokens: int
    pauses: tuple[tuple[bytes, int], ...] = ()
    """The requests at which upstream's cache had expired, by `History.asked`, and the seconds since the ones before."""


class History:
    """The messages of a history, measured and folded. It never changes; `extended` makes a longer one."""

    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        self.measured: list[Message] = []
        """The messages without the names of their pieces."""
        self.messages: list[Message] = []
        """With them."""
        self.tools: list[str] = []
        """Per message, the name of the tool whose result it is."""
        self.items: list[Item] = []
        self.links = [BEGINNING]
        """Entry *i* identifies what the first *i* messages mean."""
        self.tokens = 0
        self.fixed = 0
        """Tokens of images, audio and files, which could not be counted."""
        self.fold = Fold(terms.offload, terms.room, terms.tool_definition_tokens)
        self._asked = False  # whether the user's first message has come
        self._pairing = Pairing()
        self._naming = Naming()
        self._held = 0  # bytes of the messages, and of their copies

    def __len__(self) -> int:
        """The number of messages."""
        return len(self.measured)

    def extended(self, messages: Sequence[Message]) -> History:
        """The history followed by these messages."""
        if not messages:
            return self
        longer = copy.copy(self)
        named, longer._naming = self._naming.named(messages)
        longer.measured = [*self.measured, *messages]
        longer.messages = [*self.messages, *named]
        longer.tools, longer.items, longer.links = self.tools.copy(), self.items.copy(), self.links.copy()
        longer._pairing, longer.fold = self._pairing.copy(), self.fold.copy()
        for message in named:
            longer._add(message)
        longer._held += sum([message.size() + COPY_BYTES * len(message.pieces) for message in messages])
        return longer

    def _add(self, message: Message) -> None:
        offload, pause = self.terms.offload, self._pause()
        leads = message.role is Role.SYSTEM and self.links[-1] == BEGINNING
        kept = offload.keep_errors and message.failed
        place = self._pairing.add(
            message.role, message.calls, message.answers, message.sealed, message.said or kept, offload.asking
        )
        part, movable = (message.role, False) if leads else self._part(message)
        stays = kept or (place.tool and (offload.excludes(place.tool) or place.tool in offload.asking))
        item = message.item_at(place, part, movable and not stays)
        self.tools.append(place.tool)
        self.items.append(item)
        self.links.append(BEGINNING if leads else extend(self.links[-1], message.meaning))
        self.fold.add(item, pause)
        self.tokens += message.tokens
        self.fixed += message.item.fixed
        self._asked = self._asked or message.role is Role.USER

    def _part(self, message: Message) -> tuple[Role, bool]:
        """The part that the next message plays in the plan, and whether its texts may ever be moved.

        One in which the user speaks is the user's, whoever sends it. Later system messages that are large are results,
        and so are messages that the policy names. Of the others only large user messages can be moved, but never the
        first one, which usually states the task.
        """
        role, offload = message.role, self.terms.offload
        if role not in (Role.SYSTEM, Role.USER):
            return role, True
        if role is Role.USER and not self._asked:
            return role, False
        large_user = message.tokens > offload.pin_user_tokens
        if message.said:
            return Role.USER, large_user
        named = message.carries is Carries.YES or (message.carries is Carries.AFTER_FIRST_USER and self._asked)
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
        """About how many bytes it takes, with its messages, as their own cache may have evicted them."""
        names = len(self._naming.calls) + len(self._naming.taken)
        return 3_000 + 64 * self.fold.pins + PLACE_BYTES * len(self) + 100 * names + self._held

    def plan(self) -> Plan:
        """The plan for a request that ends here."""
        return self.fold.plan(self._pause())

    def asked(self, point: int) -> bytes:
        """The digest of the history that the client sent with its first `point` messages, without the system messages
        at its end: some clients add a reminder to each request and keep none."""
        while point and self.items[point - 1].role is Role.SYSTEM:
            point -= 1
        return self.links[point]

    def _pause(self) -> int:
        """The seconds since the request before, if upstream's cache had expired at one that ends here; else 0."""
        return dict(self.terms.pauses).get(self.asked(len(self.items)), 0) if self.terms.pauses else 0

    def transcript(self, raws: Sequence[bytes | Raw]) -> Transcript:
        """The history together with the bytes of its entries."""
        return Transcript(raws, self.messages, self.tools)
