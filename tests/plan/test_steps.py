"""No step over a long text reads all of it: one call into C holds the interpreter's lock until it ends."""

from __future__ import annotations

import hashlib
import random
from typing import Any

from proxy.plan import preview
from proxy.plan.preview import CHUNK
from proxy.tools import pages

LONG = "".join(random.Random(1).choices('a\n"\\é語😀\x00', k=3 * CHUNK + 17))


class Watched(str):
    """A text that notes how many characters each call reads."""

    read: list[int]

    def __getitem__(self, key: Any) -> str:
        part = Watched(super().__getitem__(key))
        part.read = self.read
        return part

    def encode(self, *options: Any, **more: Any) -> bytes:
        self.read.append(len(self))
        return super().encode(*options, **more)

    def count(self, sub: str, start: Any = 0, stop: Any = None) -> int:  # type: ignore[override]
        self.read.append((len(self) if stop is None else stop) - start)
        return super().count(sub, start, stop)


def watched() -> Watched:
    text = Watched(LONG)
    text.read = []
    return text


def test_a_digest_is_made_in_steps() -> None:
    text = watched()
    assert preview.digest(text) == hashlib.sha256(LONG.encode()).hexdigest()[:32]
    assert max(text.read) <= CHUNK and sum(text.read) == len(LONG)
    assert preview.digest("") == hashlib.sha256(b"").hexdigest()[:32]


def test_lines_are_counted_in_steps() -> None:
    text = watched()
    assert preview.line_count(text) == pages.line_count(text) == LONG.count("\n") + (LONG[-1] != "\n")
    assert pages.line_start(text, 100_000) == len("\n".join(LONG.split("\n", 100_000)[:-1])) + 1
    assert max(text.read) <= CHUNK
    assert preview.line_feeds("a\nb\nc\n", 2, 5) == 1
