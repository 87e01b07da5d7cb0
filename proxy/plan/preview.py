"""A tool result's text → a preview and a reference to the file that holds all of it."""

from __future__ import annotations

import hashlib

import msgspec

from proxy.plan import said

Spans = tuple[tuple[int, int], ...]

PREVIEW_CHARS = 100
"""Characters that stay of a moved result: enough to recognise it. The reference behind them takes some 60 tokens."""
GLIMPSE_CHARS = 2_000
"""Characters of preview for a result that moves before the model has seen it: about one screen."""
MARK = "(detailed result is stored in "


class Shape(msgspec.Struct, frozen=True):
    """The policy keys that determine the form of a replacement."""

    store_dir: str
    preview_chars: int
    preview_tail_chars: int

    def first_preview(self) -> Shape:
        """Return this shape with the larger preview for a result that the model has not seen."""
        return msgspec.structs.replace(self, preview_chars=max(self.preview_chars, GLIMPSE_CHARS))


STEP = 1 << 20
"""Characters that one step reads: a few milliseconds at most, after which other threads get their turn."""


def digest(text: str) -> str:
    """Return the first 32 hex digits of the text's SHA-256, the first of which are part of its file's name."""
    seen = hashlib.sha256()
    for at in range(0, len(text), STEP):
        seen.update(text[at : at + STEP].encode("utf-8", "surrogatepass"))
    return seen.hexdigest()[:32]


def line_feeds(text: str, start: int = 0, stop: int | None = None) -> int:
    """Count the line feeds from `start` to `stop`."""
    stop = len(text) if stop is None else stop
    return sum([text.count("\n", at, min(at + STEP, stop)) for at in range(start, stop, STEP)])


def line_count(text: str) -> int:
    """Return the number of lines as `read_file` counts them: only a line feed ends a line."""
    return line_feeds(text) + (not text.endswith("\n")) if text else 0


ABOUT_CHARS = 200
"""Characters of an image's name or address that are shown."""


def on_one_line(text: str) -> str:
    """Return the beginning of a name or an address, on one line."""
    return " ".join(text[:ABOUT_CHARS].split())


def pointer(about: str, name: str, origin: str, shape: Shape) -> str:
    """Return the reference that replaces an image or a file, which moves to the file `name`."""
    return f"[{about}]... {MARK}{shape.store_dir}/{name}; it can be shown again; {origin})"


def replacement(text: str, name: str, origin: str, tokens: int, shape: Shape, kept: int = 0, spans: Spans = ()) -> str:
    """Return the preview and reference that replace `text`, which has `tokens` tokens and moves to the file `name`.

    `origin` says what the text is, such as `result of read_log`. The preview has at least the first `kept` characters,
    and what the user said in these `spans` follows word for word.
    """
    size = f"complete, {line_count(text)} lines, {tokens} tokens"
    reference = f"... {MARK}{shape.store_dir}/{name}; {size}; {origin})"
    tail = text[-shape.preview_tail_chars :] if shape.preview_tail_chars else ""
    head = text[: max(shape.preview_chars, kept)]
    return "\n\n".join([f"{head}{'...' if tail else ''}{tail}{reference}", *said.quoted(text, spans, len(head))])
