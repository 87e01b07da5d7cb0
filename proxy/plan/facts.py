"""Finds the exact things in old history, so that a snapshot has them whoever writes it: numbers with what they count,
ids, error lines, paths and URLs. Models round them, misspell them and leave them out.

All of it is a pure function of the texts, in one pass over their lines.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from itertools import pairwise

import msgspec

from proxy.plan.plan import Role
from proxy.plan.summary import Section

READ_CHARS = 4 << 20
"""Characters of the newest texts that are read, in a second or two."""
LINE_CHARS, ERROR_CHARS, FACT_CHARS = 16_000, 400, 160
"""Characters of a line that are read, of a line that may as a whole be an error, and of a fact."""
CONTEXT_WORDS, CONTEXT_CHARS = 3, 48
"""The most words, and characters, before a fact that are shown with it."""
ALIKE = 3
"""How many lines of a text are read that differ only in numbers and ids. A log has thousands."""
FOUND = 20_000
"""The most facts that are told apart."""
PER_TEXT = 12
"""The most facts of a kind that one text adds as its newest, so that a log does not push out all others."""
TRIED = 200
"""The most of the newest facts, and of the most frequent ones, that are measured for one snapshot."""

_word = re.compile(r"[^\s\"'`<>(){}\[\],;|]+")
_number = re.compile(r"[-+~]?[$€£]?[0-9][0-9.,_]*%?")
_time = re.compile(r"\[?[0-9]{4}[-/][0-9]{2}[-/][0-9]{2}|[0-9]{1,2}:[0-9]{2}(:|$)")
_error = re.compile(
    r"error|exception|fail(?:ed|ure)|fatal|panic|denied|refused|timed out|traceback|cannot |not found|abort", re.I
)
_file = re.compile(
    r"[\w@+-][\w.@+/-]*\.(?:py|js|ts|tsx|jsx|go|rs|c|h|cc|cpp|java|kt|rb|php|sh|sql|md|txt|json|ya?ml|toml|ini|cfg|conf|env"
    r"|log|csv|html|css|xml|lock|pem|service)(?::[0-9]+)*"
)
_unit = re.compile(
    r"[kmgt]?i?b|bytes?|bits?|[nuµm]?s|secs?|seconds?|mins?|minutes?|h|hours?|days?|weeks?|[rq]ps|[kmg]?hz|px|rows?|lines?"
    r"|files?|items?|requests?|tokens?|errors?|failures?|retries|times|percent|usd|eur|k?[vw]|[kcm]?m|k?g|°c|connections?"
    r"|workers?|threads?|replicas?|users?|tests?|passed|failed",
    re.I,
)
_break = re.compile(r"\n|\\n(?![a-z])")
"""The end of a line; JSON within a text writes it as backslash and n. With a letter behind it, that may be a path."""
_divider = re.compile(r"[,;|(){}\[\]]|[.!?] ")
_varying = re.compile(r"(?<![0-9a-f])[a-f]*[0-9][0-9a-f]*", re.I)
"""A number or an id. It begins where the letters and digits begin, so that each of them is looked at only once."""


class FactKind(IntEnum):
    """What a fact is. The order is that of the sections in a snapshot."""

    ERROR = 0
    NUMBER = 1
    NAME = 2
    PATH = 3


class Fact(msgspec.Struct):
    """A thing to be spelled exactly: where it was found last, and in how many texts."""

    kind: FactKind
    exact: str
    shown: str
    """With the words before it, as they were where it was found last."""
    order: int
    """0 for the newest."""
    weight: int = 1
    early: bool = False
    """Whether it is among the newest of its kind in the text where it was found last."""


def section(texts: Sequence[Section], known: str, room: int, count: Callable[[str], int]) -> str:
    """Return the newest and the most frequent facts of these texts, which are ordered from old to new, in at most
    `room` tokens; empty if there are none. What the text `known` has is left out."""
    chosen: list[Fact] = []
    shown = known
    for fact in _candidates(found(texts)):
        cost = count(f"- {fact.shown}\n")
        if cost > room or fact.exact in shown:
            continue
        room -= cost
        shown += "\n" + fact.shown
        chosen.append(fact)
    return "\n".join(f"- {fact.shown}" for fact in sorted(chosen, key=lambda fact: (fact.kind, fact.order)))


def found(texts: Sequence[Section]) -> dict[str, Fact]:
    """Return the facts of these texts, the newest first."""
    facts: dict[str, Fact] = {}
    left = READ_CHARS
    for text in reversed(texts):
        if left <= 0:
            break
        seen = set[str]()
        fresh = dict.fromkeys(FactKind, PER_TEXT)
        said = 1 if text.role is Role.TOOL else 3  # what somebody says again matters more than what a tool printed
        for line in _different(text.text[-left:]):
            for kind, exact, shown in _facts(line):
                if exact in seen:
                    continue
                seen.add(exact)
                if (fact := facts.get(exact)) is not None:
                    fact.weight += said
                elif len(facts) < FOUND:
                    facts[exact] = Fact(kind, exact, shown, len(facts), said, fresh[kind] > 0)
                    fresh[kind] -= 1
        left -= len(text.text)
    return facts


def _different(text: str) -> Iterator[str]:
    """Yield the lines of a text, the last one first, without most of those that differ only in numbers and ids."""
    alike = Counter[str]()
    for line in reversed(_break.split(text)):
        shape = _varying.sub("0", line[:ERROR_CHARS])
        alike[shape] += 1
        if alike[shape] <= ALIKE:
            yield line[:LINE_CHARS]


def _candidates(facts: dict[str, Fact]) -> Iterator[Fact]:
    """Yield the facts worth measuring, in turn one of the newest and one of those in the most texts."""
    newest = [fact for fact in facts.values() if fact.early]
    frequent = sorted((fact for fact in facts.values() if fact.weight > 1), key=lambda fact: (-fact.weight, fact.order))
    given = set[int]()
    for pair in zip(*(_padded(facts, TRIED) for facts in (newest, frequent)), strict=True):
        for fact in pair:
            if fact is not None and fact.order not in given:
                given.add(fact.order)
                yield fact


def _padded(facts: list[Fact], size: int) -> list[Fact | None]:
    return [*facts[:size], *[None] * (size - len(facts))]


def _facts(line: str) -> Iterator[tuple[FactKind, str, str]]:
    """Yield kind, exact text, and the text to show of the facts in a line."""
    if len(line) <= ERROR_CHARS and _error.search(line) and any(map(str.isalnum, line)):
        said = " ".join(line.split())[:FACT_CHARS]
        yield FactKind.ERROR, said, said
        return
    words = [(match.start(), match[0].rstrip(".:!?*。")) for match in _word.finditer(line)]
    for (start, word), (_, following) in pairwise([*words, (0, "")]):
        if not word or len(word) > FACT_CHARS or _time.match(word):
            continue
        kind = _kind(word)
        if kind is not None:
            yield kind, word, word if kind is FactKind.PATH else f"{_before(line, start)}{word}"
        elif _number.fullmatch(word):
            if _unit.fullmatch(following):
                yield FactKind.NUMBER, f"{word} {following}", f"{_before(line, start)}{word} {following}"
            elif len(word) > 1 and line[max(start - 4, 0) : start].rstrip(" \"'").endswith((":", "=")):
                shown = f"{_before(line, start)}{word}"
                yield FactKind.NUMBER, shown, shown


def _kind(word: str) -> FactKind | None:
    """Return what a word is, or None if nothing in it has to be exact. Plain numbers are not looked at."""
    if "://" in word or _file.fullmatch(word):
        return FactKind.PATH
    digits = any("0" <= character <= "9" for character in word)
    if word.count("/") + word.count("\\") > 1 and any(map(str.isalnum, word)):
        return FactKind.PATH if word[0] in "/~.\\" or word[1:2] == ":" or "." in word or digits else None
    if not digits:
        return None
    number = _number.match(word)
    if number is not None and (number[0][-1] == "%" or _unit.fullmatch(word, number.end())):
        return FactKind.NUMBER
    return FactKind.NAME if len(word) > 3 and any(map(str.isalpha, word)) else None


def _before(line: str, start: int) -> str:
    """Return the words of the line just before `start`, which say what the fact is."""
    before = line[max(start - CONTEXT_CHARS, 0) : start]
    phrase = _divider.split(before)[-1]
    cut = (start > CONTEXT_CHARS and phrase == before) or None
    shown = " ".join(phrase.replace('"', "").replace("'", "").split()[cut:][-CONTEXT_WORDS:]).lstrip(" -*#")
    return f"{shown} " if shown and before[-1].isspace() else shown
