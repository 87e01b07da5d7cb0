"""What stays of a moved text: a preview, and a reference to the file that holds all of it.

A model knows a result by the call that it made: `/var/log/billing.log`, and not
`tool_call_a41f9…txt`. So a file is named after the call, followed by a digest of the text:
`billing.log.2e7dc01b9a01f2d4.txt`. A name depends only on the call, the text and the names before
it, so it never changes as the history grows. It has only letters, digits, dots and underscores: a
reader takes it out of a text with `[\\w.]+`, and nothing that shows it needs quotes.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any

import msgspec

from proxy.plan.glimpse import beginning, glimpse, opened

Spans = tuple[tuple[int, int], ...]

CHUNK = 1 << 20
"""Characters that are read at once: a few milliseconds at most, after which other threads get their
turn."""
PREVIEW_CHARS = 100
"""Characters that stay of a moved result: enough to recognise it. The reference behind them takes
some 60 tokens."""
# characters of preview for a result that moves before the model has seen it: about one screen
GLIMPSE_CHARS = 2_000
MEDIA_CHARS = 200  # characters of an image's name or address that are shown
MARK = "(detailed result is stored in "


class Shape(msgspec.Struct, frozen=True):
    """The policy keys that determine the form of a replacement."""

    store_dir: str
    preview_chars: int
    unseen: bool = False  # whether the model has not seen the result yet

    def first_preview(self) -> Shape:
        """Return this shape with the larger preview for a result that the model has not seen."""
        chars = max(self.preview_chars, GLIMPSE_CHARS)
        return msgspec.structs.replace(self, preview_chars=chars, unseen=True)


def digest(text: str) -> str:
    """Return the first 32 hex digits of the text's SHA-256, the first of which are part of its
    file's name."""
    seen = hashlib.sha256()
    for at in range(0, len(text), CHUNK):
        seen.update(text[at : at + CHUNK].encode("utf-8", "surrogatepass"))
    return seen.hexdigest()[:32]


def line_feeds(text: str, start: int = 0, stop: int | None = None) -> int:
    """Count the line feeds from `start` to `stop`."""
    stop = len(text) if stop is None else stop
    return sum([text.count("\n", at, min(at + CHUNK, stop)) for at in range(start, stop, CHUNK)])


def line_count(text: str) -> int:
    """Return the number of lines as `read_file` counts them: only a line feed ends a line."""
    return line_feeds(text) + (not text.endswith("\n")) if text else 0


def on_one_line(text: str) -> str:
    """Return the beginning of a name or an address, on one line."""
    return " ".join(text[:MEDIA_CHARS].split())


def pointer(about: str, name: str, origin: str, shape: Shape) -> str:
    """Return the reference that replaces an image or a file, which moves to the file `name`."""
    return f"[{about}]... {MARK}{shape.store_dir}/{name}; it can be shown again; {origin})"


def replacement(
    text: str, name: str, origin: str, tokens: int, shape: Shape, kept: int = 0, spans: Spans = ()
) -> str:
    """Return the preview and reference that replace `text`, which has `tokens` tokens and moves to
    the file `name`. `origin` says what the text is, such as `result of read_log`. The preview has
    at least the first `kept` characters, and what the user said in these `spans` follows word for
    word."""
    shown = text if kept or spans else opened(text)
    # the file of another text has other lines
    lines = f"{line_count(text)} lines, " if shown is text else ""
    reference = f"... {MARK}{shape.store_dir}/{name}; complete, {lines}{tokens} tokens; {origin})"
    if kept or spans:
        head = text[: max(shape.preview_chars, kept)]
    elif shape.unseen:
        head = glimpse(shown, shape.preview_chars)
    else:
        head = beginning(shown, shape.preview_chars)
    words = [text[start:end] for start, end in spans if end > len(head)]
    return "\n\n".join([f"{head}{reference}", *words])


# -- what a moved text is called -------------------------------------------------------------------

DIGITS = 16
"""Hex digits of a text's digest in a file's name: 64 bits, which nobody guesses. Where two texts
would get the same name, the later one gets all."""

# the most characters of a name before its digest, and of a tool's name in a reference
STEM_CHARS = 40
SAID = 16
SAID_CHARS = 200
"""The most strings of a call that are kept as words for its result, and the most characters of
each."""
ABOUT_CHARS = 80  # characters of an argument that are shown to say what a file is
RESULT_OF = "result of "  # precedes the tool's name where a text says what it is
PARSED = 64 << 10
VALUES = 200
"""Characters of arguments that are parsed, which takes less than a millisecond (of more, the
beginning is read as text), and the most values that are looked at."""

_TEXT_CHARS = 1_000
_TELLING = re.compile(r"path|file|ur[li]$|link|href")
_PATH = re.compile(
    r"(?<![\w.~@+-])[\w.~@+-]*(?:/[\w.@+-]+)+"
    r"|(?<![\w.@+-])\.*[\w@+-][\w.@+-]*\.[A-Za-z]\w{0,9}(?!\w)"
)
"""A path, or a name with an ending. It begins where its characters begin, so that each is looked at
only twice."""
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*://", re.I)
_odd = re.compile(r"[^A-Za-z0-9._-]+")
_odd_in_name = re.compile(r"[^A-Za-z0-9._]+")
_SECRET = re.compile(r"(?:[A-Za-z_+/=-]*[0-9]){4}[A-Za-z0-9_+/=-]*")
_SECRET_CHARS = 20
_DIGEST = re.compile(r"\.([0-9a-f]{16}|[0-9a-f]{32})\.txt\Z")
_SUFFIX = b".txt"
_ENDING = re.compile(
    rb"\.txt(?![A-Za-z0-9_-])(?:(?<=[._][0-9a-f]{16}\.txt)|(?<=[._][0-9a-f]{32}\.txt))"
)
"""The end of the name of a moved text, or of the originals behind a summary. It begins with what is
rare, so that it is found fast."""
_BREAK = re.compile(rb"[^A-Za-z0-9._\\]+")
_JSON_ESCAPE = re.compile(r"\A(?:u[0-9a-fA-F]{4}|[a-z])")
"""What follows the backslash of an escape in JSON, such as that of a line feed."""
_MARKDOWN_ESCAPE = re.compile(r"\\+(?=[._])")
_STEM_BYTES = 160
_STEP = 256 << 10
"""Bytes before an ending that are looked at, in which every character of a stem may be escaped; and
bytes of a step."""


class Label(msgspec.Struct, frozen=True, gc=False):
    """What is known of a text from the call whose result it is."""

    stem: str  # the beginning of its file's name
    origin: str  # what the reference says that it is, such as `result of read_log`
    # the same with the argument that identifies the call: `result of read_log /var/log/billing.log`
    about: str
    call_strings: tuple[
        str, ...
    ] = ()  # the strings of the call, by which a model may call the result
    tokens: int = 0  # what the stem and the origin add to a reference

    def size(self) -> int:
        """About how many bytes it takes."""
        return (
            150
            + len(self.stem)
            + len(self.origin)
            + len(self.about)
            + sum(60 + len(said) for said in self.call_strings)
        )


ORIGINALS = Label(
    "compressed_group", "summarised messages", "the original messages behind a summary"
)
EARLIER = Label("", "", "from an earlier conversation of this user")
NAMELESS = Label("", "", "")  # for measuring a reference before its label is known


def of_call(tool: str, arguments: str, count: Callable[[str], int]) -> Label:
    """Return the label for the result of a call. `arguments` is JSON or any other text."""
    tool = _odd.sub("_", tool[:SAID_CHARS]).strip("._-")[:STEM_CHARS] or "tool"
    values = [value for _, value in sorted(_strings(arguments), key=_rank)]
    stem, shown = next(
        ((stem, value) for value in values if (stem := _stem(value))),
        (_safe(tool), "".join(values[:1])),
    )
    origin = f"{RESULT_OF}{tool}"
    line = " ".join(shown[: 2 * ABOUT_CHARS].split())
    if len(line) > ABOUT_CHARS or len(shown) > 2 * ABOUT_CHARS:
        line = line[:ABOUT_CHARS] + "…"
    about = f"{origin} {line}" if shown else origin
    said = tuple(dict.fromkeys(islice(_words(tool, values), SAID)))
    return Label(stem, origin, about, said, count(stem) + count(origin))


def of_kind(kind: str, count: Callable[[str], int]) -> Label:
    """Return the label for a text without a known call, such as a `user message`."""
    stem = _safe(kind)
    return Label(stem, kind, kind, tokens=count(stem) + count(kind))


def file_name(label: Label, digest: str, digits: int = DIGITS) -> str:
    """Return the name of the file that holds a text with this digest. Every file system accepts
    it."""
    return f"{label.stem}.{digest[:digits]}.txt"


def digest_in(name: str) -> str:
    """Return the digest's beginning that `file_name` wrote into a name, or an empty string for any
    other name."""
    match = _DIGEST.search(name)
    return match[1] if match else ""


def names_in(body: bytes) -> frozenset[str]:
    """Return the full names of files that JSON quotes, such as in the summary that a client made of
    its history. It is looked at in steps, between which other threads have their turn."""
    found = set[str]()
    for begin in range(0, len(body), _STEP) if _SUFFIX in body else ():
        end = begin + _STEP
        for match in _ENDING.finditer(body, begin, end + len(_SUFFIX)):
            if match.start() < end and (name := _name_before(body, match.end())):
                found.add(name)
    return frozenset(found)


def unescaped(text: str) -> str:
    """Return a text that names files without the backslashes that Markdown puts before their
    underscores."""
    return _MARKDOWN_ESCAPE.sub("", text)


def has_place(body: bytes, store_dir: str) -> bool:
    """Whether JSON has the last part of this directory's name, also in Markdown. Without
    it, nothing in the JSON is the name of a moved text."""
    place = store_dir.rstrip("/").rpartition("/")[2].encode("utf-8", "surrogatepass")
    if place in body or b"\\_" not in body:
        return place in body
    return any(place.replace(b"_", b"\\" * escapes + b"_") in body for escapes in (1, 2, 4))


def _name_before(body: bytes, end: int) -> str:
    """Return the name of which the ending is before this place in JSON; empty if nothing precedes
    the ending."""
    digits = DIGITS if body[end - len(_SUFFIX) - DIGITS - 1] in b"._" else 2 * DIGITS
    start = end - len(_SUFFIX) - digits - 1
    before = body[max(start - _STEM_BYTES, 0) : start]
    last = unescaped(_BREAK.split(before)[-1].rstrip(b"\\").decode())
    _, escape, stem = last.rpartition("\\")
    stem = _JSON_ESCAPE.sub("", stem) if escape else stem
    return f"{stem}{body[start:end].decode()}" if stem else ""


def paths(text: str) -> list[str]:
    """Return the parts of a text, such as a command, that look like paths or names of files."""
    found = (match[0].rstrip(".") for match in _PATH.finditer(text[:_TEXT_CHARS]))
    return [path for path in found if not path.startswith("/dev/")]


def _strings(arguments: str) -> Iterator[tuple[str, str]]:
    """Yield the strings of the arguments, each with the key that it is found under, outer ones
    first."""
    try:
        given = msgspec.json.decode(arguments) if len(arguments) <= PARSED else arguments
    except (ValueError, RecursionError):
        given = arguments
    level: list[tuple[str, Any]] = [("", given)]
    left = VALUES
    while level and left > 0:
        deeper: list[tuple[str, Any]] = []
        for key, value in level[:left]:
            left -= 1
            if isinstance(value, str) and value.strip():
                yield key, value
            elif isinstance(value, dict):
                deeper += islice(value.items(), left)
            elif isinstance(value, list):
                deeper += [(key, item) for item in value[:left]]
        level = deeper


def _rank(string: tuple[str, str]) -> int:
    """Order the strings of a call by how well they identify it: paths and addresses, anything else,
    then contents."""
    key, value = string
    if not _TELLING.search(key.lower()):
        return 1
    return 0 if _is_name(value) else 2


def _words(tool: str, values: list[str]) -> Iterator[str]:
    """Yield what a model may call the result: the strings of the call, the paths in them, and the
    tool."""
    named = (path for value in values if not _is_name(value) for path in paths(value))
    yield from (word for word in chain(values, named) if len(word) <= SAID_CHARS)
    yield tool


def _stem(value: str) -> str:
    """Return a short name for what a string means; empty if it tells nothing, or looks like a
    secret."""
    if _is_name(value):
        candidates = [value]
    else:
        line = value.strip().splitlines()[0]
        named = paths(line)
        with_ending = [path for path in named if "." in path.rpartition("/")[2]]
        candidates = [
            *with_ending[::-1],
            *named[::-1],
            " ".join(re.findall(r"\w[\w.]*", line[:_TEXT_CHARS])[:3]),
        ]
    return next((stem for candidate in candidates if (stem := _last(candidate))), "")


def _is_name(value: str) -> bool:
    """Whether a string is a path, an address or a name, and not a text or a command."""
    return len(value) <= SAID_CHARS and not any(character.isspace() for character in value.strip())


def _last(path: str) -> str:
    """Return the last component of a path or address in characters that every file system
    accepts."""
    path = path.strip()
    if scheme := _SCHEME.match(path):
        path = re.split(r"[?#]", path[scheme.end() :], maxsplit=1)[0]
    last = re.split(r"[/\\]", path.rstrip("/\\"))[-1].rpartition("@")[2]
    bare = last.partition(".")[0]
    if len(bare) >= _SECRET_CHARS and _SECRET.fullmatch(bare):
        return ""
    stem = _safe(_safe(last)[:STEM_CHARS])
    return stem if any(map(str.isalnum, stem)) else ""


def _safe(text: str) -> str:
    return _odd_in_name.sub("_", text[:SAID_CHARS]).strip("._")
