"""What the dialects do alike with entries: measure them, replace and mark their texts, describe
them to readers.

A dialect walks over an entry once and adds what it finds to a `Contents`. All else is made of that.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from msgspec import Raw

from proxy import rawjson
from proxy.dialects import attachments
from proxy.plan import preview, texts
from proxy.plan.plan import Count, Message, Piece, Reading, Role, ToolCall, digest
from proxy.plan.preview import Shape
from proxy.plan.recognise import mark
from proxy.plan.summary import Section
from proxy.plan.texts import Carries, carried, reports_error
from proxy.rawjson import Members, NotJson, elements_of, string, text_of

Entry = bytes | Raw
"""One entry of a history as JSON."""

MESSAGE_TOKENS = 4
"""Tokens of a message's frame. OpenAI's cookbook says 3, and 1 for a name; other models' templates
need a few more."""

OPAQUE_BYTES = 6
"""Bytes of encrypted text for each token of it: four characters, a third more for base64, and a
frame."""

DEFAULTS = {
    "caller": '{"type":"direct"}',  # no program of upstream's made the call (OpenAI, Anthropic)
    "async": "false",  # the client answers the call before it goes on (OpenAI)
    **dict.fromkeys(("prefix", "partial"), "false"),  # the reply is complete (Mistral, Moonshot)
}
"""Members with what their APIs take for granted, as canonical JSON. Clients that write all fields
of their types send them."""

MAX_ARGUMENTS = 256 << 10
MAX_SEPARATORS = 50_000
"""The most characters of a call's arguments, and the most characters in them that may begin a
value, for which the arguments are parsed. That takes some 40 ms, during which no other thread can
use the interpreter. Larger arguments are used as written."""


def canonical(arguments: str) -> str:
    """Return the arguments as canonical JSON, or unchanged if they are not JSON or too large to
    parse."""
    if len(arguments) > MAX_ARGUMENTS or sum(map(arguments.count, ",[{")) > MAX_SEPARATORS:
        return arguments.strip()
    try:
        return json.dumps(
            json.loads(arguments or "{}"), sort_keys=True, ensure_ascii=False, separators=(",", ":")
        )
    except (ValueError, RecursionError):
        return arguments.strip()


def marks(calls: Iterable[ToolCall]) -> tuple[bytes, ...]:
    """Return what marks these calls, in their order, without those that have no id."""
    return tuple(mark(call, canonical(call.arguments)) for call in calls if call.id)


def meaning(
    dialect: str,
    role: Role,
    text: str,
    calls: Iterable[ToolCall],
    answers: str = "",
    others: Iterable[bytes] = (),
) -> bytes:
    """Return an entry's `Message.meaning`. The dialect's name is part of it, so that no record of
    another API is ever found."""
    called = [(call.id, call.name, canonical(call.arguments)) for call in calls]
    seen = hashlib.sha256(rawjson.encode([dialect, int(role), text.strip(), called, answers]))
    for other in others:
        seen.update(b"\n")
        seen.update(other)
    return seen.digest()[:16]


Harmless = Collection[str]
"""The paths of members, such as `messages[].timestamp`, that the policy calls harmless."""


def unknown(
    members: Mapping[str, Raw],
    table: Mapping[str, Collection[str]],
    kind: str,
    at: str,
    harmless: Harmless = (),
) -> str:
    """Return the path of a member that `table` does not have for this kind; empty if it has all
    that say something: what we do not know may mean anything. `at` is the path of the object.
    Types, breakpoints and `DEFAULTS` mean the same everywhere."""
    if kind not in table:
        return f"{at}.type"
    for key, raw in members.items():
        usual = (
            key in table[kind]
            or key in MARKS
            or rawjson.is_null(raw)
            or (key == "type" and text_of(raw) == kind)
            or (
                key in DEFAULTS
                and canonical(bytes(raw).decode("utf-8", "replace")) == DEFAULTS[key]
            )
        )
        if not usual and f"{at}.{key}" not in harmless:
            return f"{at}.{key}"
    return ""


def unknown_in(
    parts: Iterable[Raw],
    table: Mapping[str, Collection[str]],
    at: str,
    harmless: Harmless = (),
    unnamed: str = "",
) -> str:
    """Return the same for the parts at a path; a part without a type is `unnamed`."""
    listed = map(rawjson.members, parts)
    found = (
        unknown(part, table, text_of(part.get("type")) or unnamed, at, harmless) for part in listed
    )
    return next(filter(None, found), "")


def opaque(raws: Iterable[Raw]) -> int:
    """Return the tokens of what only upstream can read."""
    return sum(len(memoryview(raw)) for raw in raws) // OPAQUE_BYTES


# -- what an entry holds ---------------------------------------------------------------------------


class Contents:
    """What an entry holds, sorted by what it is needed for."""

    def __init__(self, role: Role) -> None:
        self.role = role
        self.name = self.answers = ""
        """Who says it, if it has a name; and the id of the call whose result it is."""
        self.failed = False
        """Whether it says that its call failed."""
        self.texts: list[tuple[int | None, str]] = []
        """The texts that can be replaced: one without a place, or each with its place."""
        self.media: list[tuple[int, bytes, bool]] = []
        """Images and files as canonical JSON, with their places, and whether they can move."""
        self.spoken: list[str] = []
        """The texts that are part of the meaning."""
        self.calls: list[ToolCall] = []
        """The calls that are part of the meaning."""
        self.others: list[bytes] = []
        """What else is part of the meaning: all that is no text, as canonical JSON."""
        self.answered: list[ToolCall] = []
        """The calls that the client answers."""
        self.counted: list[str] = []
        """The texts that have tokens and never move."""
        self.called: list[tuple[str, str]] = []
        """The names and arguments of all calls. They are counted in canonical form: spaces
        influence no decision."""
        self.files: list[bytes] = []
        """Images, files and what counts like them, as JSON."""
        self.opaque = 0
        """Tokens of what only upstream can read."""
        self._shown: list[tuple[str, str, bytes]] = []
        """What readers see: a title's end and a text, or an image or a file."""

    def text(self, place: int | None, text: str, *, said: bool = True, moves: bool = True) -> None:
        self._shown.append(("", text, b""))
        if moves:
            self.texts.append((place, text))
        else:
            self.counted.append(text)
        if said:
            self.spoken.append(text)

    def thought(self, text: str) -> None:
        if text:
            self.counted.append(text)
            self._shown.append((" reasoning", text, b""))

    def call(
        self, call: ToolCall, *, answered: bool = True, said: bool = True, shown: str = ""
    ) -> None:
        """Add a call. `shown` are the arguments without images, if it has any."""
        arguments = shown or call.arguments
        self.called.append((call.name, arguments))
        self._shown.append((f" calls {_one_line(call.name)} {_one_line(call.id)}", arguments, b""))
        if said:
            self.calls.append(call)
        if answered:
            self.answered.append(call)

    def medium(self, place: int, part: bytes, *, moves: bool) -> None:
        self.files.append(part)
        self.media.append((place, part, moves))
        self._shown.append(("", "", part))

    def other(self, value: Members | Raw) -> None:
        """Add what readers get as JSON."""
        self._shown.append(("", rawjson.encode(value).decode("utf-8", "replace"), b""))

    def sources(self, part: Members) -> None:
        """Add the sources that upstream named for a text, for readers."""
        named = [one for key in ("citations", "annotations") for one in elements_of(part.get(key))]
        if named:
            found = [bytes(one).decode("utf-8", "replace") for one in named]
            self._shown.append((" sources", "\n".join(found), b""))

    @property
    def empty(self) -> bool:
        """Whether a reader sees nothing."""
        return not self._shown

    def sections(self, index: int, message: Message, tool: str) -> list[Section]:
        """Return it in readable form, titled by the entry's `index` and by the `tool` whose result
        it is."""
        role = message.role
        title = f"{index + 1} {role.name.lower()} {_one_line(self.name)}".rstrip()
        if role is Role.TOOL:
            title = (
                f"{title} {_one_line(message.answers)} {_one_line(tool)}{' failed' * self.failed}"
            )
        made: list[Section] = []
        for suffix, text, part in self._shown:
            words = f"[{attachments.about(part)}]" if part else text
            made.append(Section(title + suffix, words, role, part=part.decode("utf-8", "replace")))
        return made or [Section(title, "", role)]


def _one_line(text: str) -> str:
    """Return at most 64 characters on one line, because line breaks in a client's ids and names
    would end a header."""
    return " ".join(text.split())[:64]


# -- measures --------------------------------------------------------------------------------------


def measured(
    dialect: str, entry: Entry, found: Contents, reading: Reading, count: Count, *, sealed: str
) -> Message:
    """Measure an entry that has these contents. A `sealed` one stays as it is, with its step; see
    `Pairing`."""
    role = found.role
    name = role.name.lower()
    reply = role is Role.ASSISTANT
    sizes = [count(text) for _, text in found.texts]
    counted = [
        *found.counted,
        *(text for tool, given in found.called for text in (tool, canonical(given))),
    ]
    fixed = sum(map(attachments.tokens, found.files))
    tokens = sum(sizes) + sum(map(count, counted)) + fixed + found.opaque + MESSAGE_TOKENS
    carries, kept = (
        (Carries.NO, 0)
        if reply
        else carried(name, [text for _, text in found.texts], reading.results)
    )
    if role is Role.SYSTEM and found.texts and not found.spoken:
        carries = Carries.YES  # the client's reminders, which belong to the step before them
    result = role is Role.TOOL or bool(carries)
    kind = "tool result" if result else f"{name} message"
    pieces: list[Piece] = []
    for (place, text), size in zip(
        () if reply else found.texts, () if reply else sizes, strict=True
    ):
        pieces.append(_piece(place, text, size, kind, 0 if pieces else kept, reading, count))
    pieces += [
        _medium(place, part, kind, reading.shape if result and moves else None, count)
        for place, part, moves in found.media
    ]
    answered = found.answered if reply else ()
    stays = bool(sealed) or role is Role.SEALED
    return Message(
        digest(entry),
        role,
        meaning(
            dialect,
            role,
            "".join(found.spoken),
            found.calls if reply else (),
            found.answers,
            found.others,
        ),
        tokens,
        () if stays else tuple(pieces),
        calls=tuple((call.id, call.name) for call in answered),
        answers=found.answers,
        sealed=sealed,
        user_speaks=any(piece.spans for piece in pieces),
        failed=role is Role.TOOL and (found.failed or reports_error(found.spoken)),
        carries=carries,
        labels=tuple(
            preview.of_call(call.name, canonical(call.arguments), count) for call in answered
        ),
        marks=marks(answered),
        fixed=fixed,
    )


def unreadable(dialect: str, entry: Entry, role: Role, count: Count) -> Message:
    """Measure an entry as a whole, whose form we do not know."""
    text = bytes(entry).decode("utf-8", "replace")
    meant = meaning(dialect, role, "unreadable", [ToolCall("", "", text)])
    tokens = count(text) + MESSAGE_TOKENS
    return Message(
        digest(entry), role, meant, tokens, (), (), "", sealed="form, which nobody here knows"
    )


def _medium(place: int, part: bytes, kind: str, shape: Shape | None, count: Count) -> Piece:
    """Return an image or a file. Without a shape, it stays as long as its entry does.

    It never moves before the model has seen it, as only seeing it tells what is in it.
    """
    text = part.decode("utf-8", "replace")
    tokens = attachments.tokens(part)
    about = attachments.about(part)
    name = preview.file_name(preview.NAMELESS, moved := preview.digest(text))
    left = min(count(preview.pointer(about, name, "", shape)), tokens) if shape else tokens
    return Piece(place, moved, tokens, left, tokens, preview.of_kind(kind, count), media=about)


def _piece(
    place: int | None, text: str, tokens: int, kind: str, kept: int, reading: Reading, count: Count
) -> Piece:
    """Return a text. It is called by its `kind` as long as no call is known whose result it is; its
    first `kept` characters stay in any case."""
    name = preview.file_name(preview.NAMELESS, moved := preview.digest(text))
    spans = texts.spans(text, reading.user_openings)

    def replaced(shape: Shape) -> int:
        """Return the tokens of the replacement without a label; those of the text where it would
        not be shorter."""
        replacement = preview.replacement(text, name, "", tokens, shape, kept, spans)
        return min(count(replacement), tokens) if len(replacement) < len(text) else tokens

    at_event = replaced(reading.shape)
    first = replaced(reading.shape.first_preview()) if tokens > reading.unseen_limit else tokens
    label = preview.of_kind(kind, count) if at_event < tokens else preview.NAMELESS
    return Piece(place, moved, tokens, at_event, first, label, kept, spans=spans)


# -- the content of an entry -----------------------------------------------------------------------


def with_texts(content: Raw, replaced: Mapping[int | None, str], type: str) -> Raw:
    """Return a content with these texts. An image or a file becomes a part of this type."""
    if None in replaced:
        return string(replaced[None])
    parts = rawjson.elements(content)
    for place, text in replaced.items():
        if place is not None:
            part = rawjson.members(parts[place])
            marks = {key: part[key] for key in MARKS if key in part}
            kept = part if rawjson.is_string(part.get("text")) else {"type": string(type), **marks}
            parts[place] = Raw(rawjson.encode(kept | {"text": string(text)}))
    return Raw(rawjson.array(parts))


def appended(content: Raw | None, text: str, type: str) -> Raw:
    """Return a content with `text` added at its end, as a part of this type where it has parts."""
    if content is None or rawjson.is_null(content):
        return string(text)
    if rawjson.is_string(content):
        return Raw(bytes(content)[:-1] + rawjson.encode(text)[1:])
    return Raw(
        rawjson.array([*rawjson.elements(content), rawjson.encode({"type": type, "text": text})])
    )


# -- cache breakpoints: no meaning contains one ----------------------------------------------------


class Mark(NamedTuple):
    """A member of a block, or of a message."""

    key: str
    value: Raw


OPENAI = "prompt_cache_breakpoint"
MARKS = {"cache_control": Raw(b'{"type":"ephemeral"}'), OPENAI: Raw(b'{"mode":"explicit"}')}
"""Anthropic's and OpenAI's breakpoint with the shortest life."""
TEXT = ("text", "input_text")
"""The blocks that can carry a breakpoint, if their text is not empty."""

_PATTERNS = {key: re.compile(rb'"%b"\s*:\s*(\{[^{}]*\})' % key.encode()) for key in MARKS}
"""Clients that write all fields set most of them to null, which is no mark. Within a string, the
quotation marks would be escaped."""
_MEMBERS = {key: re.compile(rb',\s*"%b"\s*:\s*\{[^{}]*\}' % key.encode()) for key in MARKS}
"""The same, with the comma before it."""


def marks_in(raw: Entry) -> list[Mark]:
    """Return the breakpoints that the client set in an entry, or in a whole body, all in one
    spelling."""
    whole = bytes(raw)
    for key, pattern in _PATTERNS.items():
        if key.encode() in whole and (found := pattern.findall(whole)):
            return [Mark(key, Raw(one)) for one in found]
    return []


def without_marks(entry: Entry, marks: Sequence[Mark]) -> Entry:
    """Return an entry as it was before its client set these breakpoints, as far as that is certain:
    what a model gives to a tool may look like one."""
    whole = bytes(entry)
    if not marks or b'"input"' in whole or b'"assistant"' in whole:
        return entry
    return _MEMBERS[marks[0].key].sub(b"", whole)


def unmarked(block: Members) -> bytes:
    """Return a block as canonical JSON, without its breakpoint."""
    return rawjson.encode({key: block[key] for key in sorted(block) if key not in MARKS})


def marked(content: Raw | None, mark: Mark, carriers: Sequence[str]) -> Raw | None:
    """Return a content with this breakpoint at its end; None if it cannot carry one, whatever it
    is. A single text becomes a block of the first kind that can carry one."""
    if content is None or rawjson.is_null(content):
        return None
    try:
        if rawjson.is_string(content):
            blocks = list[Raw]()
            last = {"type": string(carriers[0]), "text": content}
        else:
            *blocks, final = rawjson.elements(content)
            last = rawjson.members(final)
    except (NotJson, ValueError):
        return None
    kind = text_of(last.get("type"))
    if kind not in carriers or (kind in TEXT and not text_of(last.get("text"))):
        return None
    return Raw(rawjson.array([*blocks, rawjson.encode(last | {mark.key: mark.value})]))
