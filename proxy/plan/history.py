"""A history as the planner sees it: the measures of its messages, the digests that identify it, and its plan so far.

`History` folds messages. If it continues an earlier request's history, only the new messages have to be read.

The *history digest* covers the meaning of messages and not their bytes, so that a client is still recognised if it
serialises anew on every turn, moves cache breakpoints or adds annotations. The leading system messages are not part of
it, because agents put the time of day there. Later ones are, because some clients send results as system messages.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile

import msgspec
from msgspec import Raw

from proxy.plan import preview
from proxy.plan.message import COPY_BYTES, Message, Piece, with_pieces
from proxy.plan.pairing import REGULAR, Irregular, Pairing, Place
from proxy.plan.plan import Item, Plan, Role, Room, Standing
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


class Opening(msgspec.Struct, frozen=True):
    """How far a history's opening has come."""

    leading: int = 0
    """The number of system messages at the beginning."""
    over: bool = False
    """Whether a message of another role has come, so that system messages no longer lead."""
    asked: bool = False
    """Whether the user's first message has come."""

    def leads(self, role: Role) -> bool:
        """Whether a message of this role would be one of the leading system messages."""
        return role is Role.SYSTEM and not self.over

    def then(self, role: Role) -> Opening:
        """The opening after one more message."""
        if self.asked or (self.over and role is not Role.USER):
            return self
        if role is Role.SYSTEM:
            return Opening(self.leading + 1)
        return Opening(self.leading, over=True, asked=role is Role.USER)

    def after(self, roles: Iterable[Role]) -> Opening:
        """The opening after messages of these roles."""
        opening = self
        if not opening.asked:
            for role in roles:
                opening = opening.then(role)
                if opening.asked:
                    break
        return opening

    def part(
        self, role: Role, tokens: int, carries: Carries, offload: Offload, said: bool = False
    ) -> tuple[Role, bool]:
        """The part that the next message plays in the plan, and whether its texts may ever be moved.

        One in which the user speaks (`said`) is the user's, whoever sends it.

        Later system messages that are large are results, and so are messages that the policy names. Of the others only
        large user messages can be moved, but never the first one, which usually states the task.
        """
        if role not in (Role.SYSTEM, Role.USER):
            return role, True
        if self.leads(role) or (role is Role.USER and not self.asked):
            return role, False
        if said:
            return Role.USER, tokens > offload.pin_user_tokens
        named = carries is Carries.YES or (carries is Carries.AFTER_FIRST_USER and self.asked)
        if named or (role is Role.SYSTEM and tokens > offload.max_tool_message_tokens):
            return Role.TOOL, True
        return role, role is Role.USER and tokens > offload.pin_user_tokens


START = Opening()
"""The opening of a history without messages."""


class Transcript:
    """A whole history: the entries, and a `Message` for each."""

    def __init__(
        self, raws: Sequence[bytes | Raw], messages: Sequence[Message], tools: Sequence[str] | None = None
    ) -> None:
        self.raws = raws
        self.messages = messages
        self.tools = [place.tool for place in places(messages, Pairing())] if tools is None else tools
        """Per message, the name of the tool whose result it is."""
        self.leading = START.after(message.role for message in messages).leading
        """The number of system messages at the beginning."""


def places(messages: Sequence[Message], pairing: Pairing, offload: Offload | None = None) -> list[Place]:
    """The place of each of these messages among calls and results. `pairing` has those of the messages before them.

    Without the policy, results that it lets stay are not known.
    """
    asking, errors = (offload.asking, offload.keep_errors) if offload else ((), False)
    return [
        pairing.add(
            message.role,
            message.calls,
            message.answers,
            message.sealed,
            message.said or (errors and message.failed),
            asking,
        )
        for message in messages
    ]


def items(
    messages: Sequence[Message], places: Sequence[Place], offload: Offload, opening: Opening = START
) -> list[Item]:
    """The items of these messages for the plan, after a history with this opening."""
    tools = {place.tool for place in places if place is not REGULAR}
    excluded = {tool for tool in tools if offload.excludes(tool) or tool in offload.asking}
    found: list[Item] = []
    for message, place in zip(messages, places, strict=True):
        part, movable = opening.part(message.role, message.tokens, message.carries, offload, message.said)
        stays = place.tool in excluded or (offload.keep_errors and message.failed)
        found.append(message.item_at(place, part, movable and not stays))
        opening = opening.then(message.role)
    return found


BEGINNING = bytes(16)
"""The digest of a history without messages."""


def links(link: bytes, messages: Sequence[Message], opening: Opening = START) -> list[bytes]:
    """The history's digest after each of these messages. The history before them has the digest `link`."""
    found: list[bytes] = []
    for message in messages:
        if not opening.leads(message.role):
            link = extend(link, message.meaning)
        found.append(link)
        opening = opening.then(message.role)
    return found


def extend(link: bytes, meaning: bytes) -> bytes:
    """The digest of a history with one more message."""
    return hashlib.sha256(link + meaning).digest()[:16]


class Terms(msgspec.Struct, frozen=True):
    """Everything that a plan depends on besides the messages; see `planner.fold`."""

    model: str
    offload: Offload
    room: Room
    tool_definition_tokens: int

    def leave_alone(self, tokens: int, leading: int) -> bool:
        """Whether a history of so few tokens, `leading` of them in leading system messages, never needs a plan."""
        offload, room = self.offload, self.room
        ceiling = room.ceiling(offload.max_total_tokens)
        if tokens > min(ceiling, offload.max_tool_message_tokens):
            return False
        return room.window is None or room.holds(tokens - leading + room.reserved(leading))


class Parts(msgspec.Struct, frozen=True):
    """What a plan needs of a history's messages. `links`: entry *i* identifies what the first *i* of them mean."""

    messages: list[Message]
    """With the names of their pieces."""
    tools: list[str]
    """Per message, the name of the tool whose result it is."""
    items: list[Item]
    links: list[bytes]
    pairing: Pairing
    """Never changed; `extended` continues a copy."""
    opening: Opening = START
    naming: Naming = Naming()

    def extended(self, messages: Sequence[Message], offload: Offload) -> Parts:
        """The parts of the history followed by these messages."""
        messages, naming = self.naming.named(messages)
        pairing = self.pairing.copy()
        found = places(messages, pairing, offload)
        return Parts(
            messages=[*self.messages, *messages],
            tools=[*self.tools, *(place.tool for place in found)],
            items=[*self.items, *items(messages, found, offload, self.opening)],
            links=[*self.links, *links(self.links[-1], messages, self.opening)],
            pairing=pairing,
            opening=self.opening.after(message.role for message in messages),
            naming=naming,
        )


NOTHING = Parts([], [], [], [BEGINNING], Pairing())


class History:
    """The messages of a history, measured and folded.

    `fold` is None as long as the history is too small for a plan. Most requests have such a history and go upstream as
    they came, so its parts are only computed if somebody asks for them.
    """

    def __init__(
        self,
        terms: Terms,
        read: list[Message],
        tokens: int = 0,
        sent_tokens: int = 0,
        fixed: int = 0,
        held: int = 0,
        fold: Fold | None = None,
        parts: Parts | None = None,
    ) -> None:
        self.terms = terms
        self.tokens = tokens
        self.sent_tokens = sent_tokens
        """The tokens of the history as it is sent, spaces in arguments included."""
        self.fixed = fixed
        """Tokens of images, audio and files, which could not be counted."""
        self.fold = fold
        self._read = read
        self._held = held  # bytes of the messages, and of their copies
        self._parts = parts

    @classmethod
    def beginning(cls, terms: Terms) -> History:
        return cls(terms, [])

    def __len__(self) -> int:
        """The number of messages."""
        return len(self._read)

    def extended(self, messages: Sequence[Message]) -> History:
        """The history followed by these messages."""
        if not messages:
            return self
        read = [*self._read, *messages]
        tokens = self.tokens + sum([message.tokens for message in messages])
        sent = self.sent_tokens + sum([message.tokens + message.spaces for message in messages])
        fixed = self.fixed + sum([message.item.fixed for message in messages])
        held = self._held + sum([message.size() + COPY_BYTES * len(message.pieces) for message in messages])
        if self.fold is None and self.terms.leave_alone(tokens, _leading_tokens(read)):
            return History(self.terms, read, tokens, sent, fixed, held)
        terms, parts = self.terms, self.parts.extended(messages, self.terms.offload)
        fold = self.fold.copy() if self.fold else Fold(terms.offload, terms.room, terms.tool_definition_tokens)
        for item in parts.items[len(self) if self.fold else 0 :]:
            fold.add(item)
        return History(terms, read, tokens, sent, fixed, held, fold, parts)

    @property
    def parts(self) -> Parts:
        if self._parts is None:
            self._parts = NOTHING.extended(self._read, self.terms.offload)
        return self._parts

    @property
    def messages(self) -> list[Message]:
        return self.parts.messages

    @property
    def tools(self) -> list[str]:
        """Per message, the name of the tool whose result it is."""
        return self.parts.tools

    @property
    def items(self) -> list[Item]:
        return self.parts.items

    @property
    def links(self) -> list[bytes]:
        """Entry *i* identifies what the first *i* messages mean."""
        return self.parts.links

    @property
    def measured(self) -> Sequence[Message]:
        """The messages, without the names of their pieces."""
        return self._read

    @property
    def irregular(self) -> Mapping[Irregular, int]:
        """How many messages fit into no pair, by the reason."""
        pairing = self.parts.pairing
        found = pairing.irregular
        return found | {Irregular.NO_RESULT: found.get(Irregular.NO_RESULT, 0) + 1} if pairing.open else found

    def size(self) -> int:
        """About how many bytes it takes, with its messages, as their own cache may have evicted them, and its parts,
        which may be computed later."""
        naming = self._parts.naming if self._parts else Naming()
        fold = 64 * self.fold.pins if self.fold else 0
        return 1_000 + fold + PLACE_BYTES * len(self) + 100 * (len(naming.calls) + len(naming.taken)) + self._held

    def plan(self) -> Plan:
        """The plan for a request that ends here."""
        if self.fold is None:
            total, ceiling = (
                self.tokens - _leading_tokens(self._read),
                self.terms.room.ceiling(self.terms.offload.max_total_tokens),
            )
            return Plan({}, (), (), live=self.tokens, fits=True, standing=Standing(total, ceiling))
        return self.fold.plan()

    def transcript(self, raws: Sequence[bytes | Raw]) -> Transcript:
        """The history together with the bytes of its entries."""
        return Transcript(raws, self.messages, self.tools)


def _leading_tokens(messages: Sequence[Message]) -> int:
    """The tokens of the system messages at the beginning."""
    return sum([message.tokens for message in takewhile(lambda message: message.role is Role.SYSTEM, messages)])


OPENING_MESSAGES = 100
"""Messages among which the user's first one is looked for. It is the first or second one of nearly every history."""


def beginning(messages: Sequence[Message]) -> bytes:
    """Return the digest of what a history means up to the user's first message, without the leading system messages.

    All requests of a conversation have it."""
    link, opening = BEGINNING, START
    for message in messages[:OPENING_MESSAGES]:
        if not opening.leads(message.role):
            link = extend(link, message.meaning)
        opening = opening.then(message.role)
        if opening.asked:
            break
    return link
