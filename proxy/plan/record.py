"""A model's answer → the record: what is taken of it, and the exact details and references that we add.

A model's answer is hostile input, because the model has read tool results. All work on it is linear.

Models round numbers, misspell ids and leave out paths. So we find these in the old history, in one pass over its
lines, and add those that the model left out.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice, pairwise, zip_longest

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

_ASKED_FOR = re.findall(r">([^<>\n]{20,})</", summary.TASK)
"""What the task wants to be replaced. Weak models copy it."""
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
    originals: str = "",
) -> str:
    """Return the neutralised record in a usable answer. Raises Unusable.

    `finished`: the model ended its answer by itself, so that a missing closing tag means no missing text. A record that
    is too long says where it was shortened, and that everything is in the file of `originals`.
    """
    most = TOKEN_CHARS * (THOUGHT_TOKENS + 2 * snapshot_tokens)
    if len(answer) > most:
        raise Unusable(f"it is {len(answer)} characters long and must stay below {most}")
    text = written(neutral(_inside(_without(answer, _thought), finished)))
    if not _markup.sub("", text).strip():
        raise Unusable("the record is empty")
    if sum(line in text for line in _ASKED_FOR) > 1:
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
ERROR_CHARS, DETAIL_CHARS = 400, 160
"""Characters of a line that may as a whole be an error, and of a detail."""
CONTEXT_WORDS, CONTEXT_CHARS = 3, 48
"""The most words, and characters, before a detail that are shown with it."""
PER_TEXT = 12
"""The most new details that one text adds, so that a log does not push out all others."""
TRIED = 200
"""The most of the newest details, and of the most frequent ones, that are measured for one snapshot."""

_break = re.compile(r"\n|\\n(?![a-z])")
"""The end of a line; JSON within a text writes it as backslash and n. With a letter behind it, that may be a path."""
_error = re.compile(
    r"error|exception|fail(?:ed|ure)|fatal|panic|denied|refused|timed out|traceback|cannot |not found|abort", re.I
)
_word = re.compile(r"[^\s\"'`<>(){}\[\],;|]+")
_time = re.compile(r"\[?[0-9]{4}[-/][0-9]{2}[-/][0-9]{2}|[0-9]{1,2}:[0-9]{2}(:|$)")
_number = re.compile(r"[-+~]?[$€£]?[0-9][0-9.,_]*")
_unit = re.compile(
    r"[kmgt]?i?b|bytes?|[nuµm]?s|sec(?:ond)?s?|min(?:ute)?s?|h|hours?|days?|weeks?|[rq]ps|[kmg]?hz|px|rows?|lines?|files?"
    r"|items?|requests?|tokens?|errors?|times|percent|usd|eur|k?[vw]|[kcm]?m|k?g|°c|users?|tests?|passed|failed",
    re.I,
)
_file = re.compile(
    r"[\w@+-][\w.@+/-]*\.(?:py|js|ts|tsx|jsx|go|rs|c|h|cc|cpp|java|kt|rb|php|sh|sql|md|txt|json|ya?ml|toml|ini|cfg|conf|env"
    r"|log|csv|html|css|xml|lock|pem|service)(?::[0-9]+)*"
)
_path = re.compile(r"(?:[/~.\\]|[A-Za-z]:\\).*[/\\].*\w")


def details(texts: Sequence[Section], known: str, room: int, count: Callable[[str], int]) -> str:
    """Return lines with the newest and the most frequent details of these texts, which are ordered from old to new, in
    at most `room` tokens. What the text `known` has is left out."""
    newest, seen = found(texts)
    frequent = [exact for exact, times in seen.most_common(TRIED) if times > 1]
    chosen: list[str] = []
    both = chain.from_iterable(zip_longest(list(newest)[:TRIED], frequent, fillvalue=""))
    for exact in dict.fromkeys(filter(None, both)):
        line = f"- {newest[exact]}"
        cost = count(f"{line}\n")
        if cost <= room and exact not in known:
            room -= cost
            known += f"\n{line}"
            chosen.append(line)
    return "\n".join(chosen)


def found(texts: Sequence[Section]) -> tuple[dict[str, str], Counter[str]]:
    """Return the details of these texts, the newest first, as they are shown, and how often somebody mentions each.

    What the user or the model says counts three times as much as what a tool printed.
    """
    shown: dict[str, str] = {}
    seen: Counter[str] = Counter()
    left = READ_CHARS
    for text in reversed(texts):
        here: dict[str, str] = {}
        for line in reversed(_break.split(text.text[-left:])) if left > 0 else ():
            here |= _in_line(line)
            if len(here) >= PER_TEXT:
                break
        for exact, words in islice(here.items(), PER_TEXT):
            shown.setdefault(exact, words)
            seen[exact] += 1 if text.role is Role.TOOL else 3
        left -= len(text.text)
    return shown, seen


def _in_line(line: str) -> dict[str, str]:
    """Return the details in a line, each with the text to show."""
    if len(line) <= ERROR_CHARS and _error.search(line) and any(map(str.isalnum, line)):
        said = " ".join(line.split())[:DETAIL_CHARS]
        return {said: said}
    here: dict[str, str] = {}
    words = [(match.start(), match[0].rstrip(".:!?*。")) for match in _word.finditer(line)]
    for (start, word), (_, following) in pairwise([*words, (0, "")]):
        if not word or len(word) > DETAIL_CHARS or _time.match(word):
            continue
        if _number.fullmatch(word):
            if _unit.fullmatch(following):
                here[f"{word} {following}"] = f"{_before(line, start)}{word} {following}"
            elif len(word) > 1 and line[max(start - 4, 0) : start].rstrip(" \"'").endswith((":", "=")):
                here[f"{_before(line, start)}{word}"] = f"{_before(line, start)}{word}"
        elif _path.fullmatch(word) or _file.fullmatch(word) or "://" in word:
            here[word] = word
        elif (
            len(word) > 2 and any(map(str.isdigit, word)) and any(letter.isalpha() or letter == "%" for letter in word)
        ):
            here[word] = f"{_before(line, start)}{word}"
        if len(here) >= PER_TEXT:
            break
    return here


def _before(line: str, start: int) -> str:
    """Return the words of the line just before `start`, which say what the detail is."""
    before = _divider.split(line[max(start - CONTEXT_CHARS, 0) : start])[-1]
    words = " ".join(before.replace('"', "").replace("'", "").split()[-CONTEXT_WORDS:]).lstrip(" -*#")
    return f"{words} " if words and line[start - 1].isspace() else words


_divider = re.compile(r"[,;|(){}\[\]]|[.!?] ")
