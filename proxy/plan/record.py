"""A model's answer → the record: what is taken of it, and the exact details and references that we add.

A model's answer is hostile input, because the model has read tool results. All work on it is linear.

Models round numbers, misspell ids and leave out paths. So we find these in the old history, in one pass over its
lines, and add those that the model left out.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from enum import IntEnum
from itertools import pairwise

import msgspec

from proxy.plan import summary
from proxy.plan.plan import Role
from proxy.plan.summary import CLOSE, OPEN, Section

THOUGHT_TOKENS, TOKEN_CHARS = 64_000, 8
"""The most tokens that a model may think aloud before its record, and the characters assumed for a token: twice as many
as English has. A longer answer comes from a model that repeats itself without end, and is rejected unread."""
KEPT_WHOLE, SHORTENED = 2, 8
"""A record may take so many times the tokens that it was given: up to the first it is taken as it is, up to the second
its longest sections are shortened. A longer one repeats itself more than it records."""
REFERENCES = 40
"""The most stored results that a record names. `grep` finds the others."""

_thought = re.compile(r"<(scratchpad|think)>")
_ours = re.compile(r"<(exact_details|stored_results)>")
_our_tag = re.compile(r"<(?=/?\s*(?:exact_details|stored_results)\b)", re.IGNORECASE)
_section = re.compile(r"<(overall_goal|key_knowledge|files_and_references|progress|open_questions|next_steps)>")
_markup = re.compile(r"<[^<>]*>")
_tag = re.compile(r"<(?=/?\s*(?:state_snapshot|system|developer)\b)", re.IGNORECASE)
_reference = re.compile(r"\((?=(?:detailed result is|original \d+ messages are) stored in)", re.IGNORECASE)


class Unusable(ValueError):
    """The model's answer cannot be used as a snapshot. The text gives the reason, for the retry and the log."""


def accept(
    answer: str,
    snapshot_tokens: int,
    replaced_tokens: int,
    count: Callable[[str], int],
    *,
    finished: bool = False,
    store_dir: str = "",
    stored: Collection[str] | None = None,
    originals: str = "",
) -> str:
    """Return the neutralised record in a usable answer. Raises Unusable.

    `finished`: the model ended its answer by itself, so that a missing closing tag means no missing text. Paths
    below `store_dir` that are not `stored` are removed, if that is known, because the model invented them. A record
    that is too long says where it was shortened, and that everything is in the file of `originals`.
    """
    most = TOKEN_CHARS * (THOUGHT_TOKENS + 2 * snapshot_tokens)
    if len(answer) > most:
        raise Unusable(f"it is {len(answer)} characters long and must stay below {most}")
    text = written(neutral(_inside(_without(answer, _thought), finished)))
    text = text if stored is None else _without_invented(text, store_dir, stored)
    if not _markup.sub("", text).strip():
        raise Unusable("the record is empty")
    if _repeats_the_task(text):
        raise Unusable("it repeats the task and does not record the conversation")
    tokens = count(text)
    if tokens > SHORTENED * snapshot_tokens:
        raise Unusable(f"it is {tokens} tokens long and must stay below {snapshot_tokens}")
    if tokens > KEPT_WHOLE * snapshot_tokens or tokens >= replaced_tokens:
        text = _shortened(text, min(snapshot_tokens, replaced_tokens // 2), count, originals)
        if not text or count(text) >= replaced_tokens:
            raise Unusable(f"it is not smaller than the {replaced_tokens} tokens that it replaces")
    return text


def _shortened(text: str, tokens: int, count: Callable[[str], int], originals: str) -> str:
    """Return the record in about so many tokens. Its longest sections lose the most, and each loses its middle.

    Weak models copy what they should record, and do so again if they are told that it is too long.
    """
    starts = [0, *(match.start() for match in _section.finditer(text) if match.start()), len(text)]
    sections = [Section("", text[start:end].strip(), Role.ASSISTANT) for start, end in pairwise(starts)]
    [kept] = summary.fitted(sections, tokens, 1, count, originals)
    return "\n".join(section.text for section in kept)


def _inside(answer: str, finished: bool) -> str:
    """Return the text of the last record in an answer. Raises Unusable if there is none.

    Each record is the text between a closing tag and the first opening tag before it. Weaker models forget the closing
    tag or both.
    """
    records = [part.partition(OPEN)[2] for part in answer.split(CLOSE)[:-1] if OPEN in part]
    if records:
        return records[-1].strip()
    if finished and OPEN in answer:
        return _without_fence(answer.rpartition(OPEN)[2])
    sections = list(_section.finditer(answer)) if finished else []
    if len({match[1] for match in sections}) > 1:
        return _without_fence(answer[sections[0].start() :].removesuffix(CLOSE))
    raise Unusable(f"it has no closed {OPEN} … {CLOSE}")


def _without_fence(text: str) -> str:
    return text.partition("\n```")[0].strip()


def _without(text: str, tag: re.Pattern[str]) -> str:
    """Return the text without what is between these tags. A tag that is never closed hides nothing."""
    kept, end, unclosed = list[str](), 0, set[str]()
    for opening in tag.finditer(text):
        name = opening[1]
        if opening.start() < end or name in unclosed:
            continue
        closing = text.find(f"</{name}>", opening.end())
        if closing < 0:
            unclosed.add(name)
            continue
        kept.append(text[end : opening.start()])
        end = closing + len(f"</{name}>")
    return "".join([*kept, text[end:]])


def neutral(text: str) -> str:
    """Disarm tags and reference lines, so that text from tools cannot pass for our own."""
    return _reference.sub("[", _tag.sub("&lt;", text))


def _without_invented(text: str, store_dir: str, stored: Collection[str]) -> str:
    """Return the text without paths below `store_dir` that lead nowhere, and without lines that hold nothing else."""
    path = re.compile(rf"(?<![\w.]){re.escape(store_dir)}/[^\s\"'`<>()\[\]{{}},;|*]+")

    def kept(match: re.Match[str]) -> str:
        return match[0] if match[0].rstrip(".:!?") in stored else ""

    lines = [(line, path.sub(kept, line)) for line in text.split("\n")]
    return "\n".join(new for line, new in lines if new == line or any(map(str.isalnum, _markup.sub("", new))))


def _repeats_the_task(text: str) -> bool:
    """Whether the record is made of the task's own lines. One of them may stand as a heading."""
    plain = _plain(text)
    repeated = [line for line in _TASK_LINES if line in plain]
    return len(repeated) > 1 or any(2 * len(line) > len(plain) for line in repeated)


def _plain(text: str) -> str:
    """Return the words of a text, without markup, case and punctuation."""
    return re.sub(r"[\W_]+", " ", _markup.sub(" ", text).casefold()).strip()


_TASK_LINES = [
    line for part in re.split(r"[\n.:]", summary.TASK) if "{" not in part and len((line := _plain(part)).split()) > 4
]


# -- what we add ------------------------------------------------------------------------------------------------------


def completed(text: str, details: str, references: Iterable[str]) -> str:
    """Return the record with exact details, which are lines, and with a line for each stored result."""
    listed = "\n".join(f"- {line}" for line in references)
    added = [
        f"<{name}>\n{_our_tag.sub('&lt;', neutral(lines))}\n</{name}>"
        for name, lines in (("exact_details", details), ("stored_results", listed))
        if lines
    ]
    return "\n".join([text, *added])


def written(text: str) -> str:
    """Return the part of a record that a model wrote."""
    return _without(text, _ours).strip()


def fitting(lines: Iterable[str], room: int, count: Callable[[str], int]) -> list[str]:
    """Return as many lines as fit into `room` tokens, at most `REFERENCES`."""
    kept: list[str] = []
    for line in lines:
        room -= count(f"- {line}\n")
        if room < 0 or len(kept) == REFERENCES:
            break
        kept.append(line)
    return kept


# -- exact details -----------------------------------------------------------------------------------------------------

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
