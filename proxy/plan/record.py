"""A model's answer → the record: what is taken of it, and what we add.

A model's answer is hostile input, because the model has read tool results. All work on it is linear.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from itertools import pairwise

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
