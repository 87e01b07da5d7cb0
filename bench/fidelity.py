"""Whether the proxy loses anything that it moves.

Recorded runs are replayed request by request through the proxy's own preparation (`bench.sent`),
under the default policy. Everything that was ever left out of a request is then looked up with the
tools that the run's last request carries:

- *read back*: each file page by page, compared with the client's own text;
- *found*: each number, path and identifier of the omitted text, by `grep`;
- *visible*: the share of these facts that the last request itself still shows.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from statistics import median

import msgspec

from bench.sent import MODEL, Texts, replay, words_of
from proxy import regex
from proxy.plan.turn import Unplannable
from proxy.policy import Policy
from proxy.requests.cache import MessageCache
from proxy.requests.planned import Rendered
from proxy.tokens import Tokens
from proxy.tools.answer import Material, ToolAnswer, answer
from proxy.tools.definitions import Tool, parsed
from tests.tools.paging import undone
from tests.transcripts import Json, Run

KINDS = {
    "numbers": re.compile(r"(?<![\w.,])\d+(?:[.,]\d+)*(?!\w)"),
    "paths": re.compile(r"(?:\w+:/)?(?:[\w.~-]*/)+[\w.~-]+"),
    "identifiers": re.compile(r"\b(?=\w*[A-Za-z])(?:\w*_\w+|\w*\d\w*|[a-z]+[A-Z]\w*)\b"),
}
_ELSEWHERE = re.compile(r"\(the whole text is in (\S+)\)")
LONGEST = 300
"""Characters of a path or identifier. Nobody would grep for a longer one, which is mostly
base64."""
Facts = dict[str, dict[str, str]]
"""Kind → fact → path of a file that must contain it."""


class Found(msgspec.Struct, frozen=True):
    """The result of one run."""

    id: str
    requests: int
    files: int
    moved: int
    """Bytes of the client's text that were left out."""
    facts: dict[str, int]
    visible: dict[str, float]
    """Of each kind's facts, the share in the last request."""
    lost: list[str]
    """Texts that could not be read back and facts that could not be found, in words."""


# -- asking the tools ------------------------------------------------------------------------------


class Reading:
    """The tools over a run's last request."""

    def __init__(self, ready: Rendered, tokens: Tokens) -> None:
        self._policy = ready.planned.policy
        self._names = ready.planned.names
        files = ready.files()
        self._files = dict(files)
        self._index = files.index
        self.paths = list(files)
        self._tokens = tokens

    def ask(self, tool: Tool, arguments: Json) -> ToolAnswer:
        material = Material(
            self._files,
            self._index,
            self._policy.tools.max_answer_tokens,
            lambda text: self._tokens.count(text, MODEL),
            regex.compile,
            self._names,
        )
        return answer(parsed(tool, json.dumps(arguments)), material)

    def whole(self, path: str) -> str:
        """A file's text, joined from its pages."""
        parts: list[str] = []
        more: dict[str, int] | None = {}
        while more is not None:
            part, more = undone(self.ask("read_file", {"path": path, **more}).text)
            parts.append(part)
        return "".join(parts)

    def finds(self, fact: str, path: str) -> bool:
        """Whether grep shows this fact when asked for its own text."""
        for pattern in (re.escape(fact), rf"(?-i){re.escape(fact)}"):
            head, _, lines = self.ask("grep", {"pattern": pattern, "path": path}).text.partition(
                "\n---\n"
            )
            if head.startswith("Found") and f'"{path}"' in head and fact in lines:
                return True
        return False


def homes(told: Texts, paths: Iterable[str], whole: Callable[[str], str]) -> Texts:
    """The promised texts by the files that must have them.

    A snapshot's file holds what the snapshot took since the one before, and names the files of
    texts that had moved earlier. So what the newest snapshot promises may be in the file of an
    earlier one, or in a result's.
    """
    groups = [path for path in paths if "/compressed_group_" in path]
    found: Texts = {}
    for path, promised in told.items():
        for text in promised:
            home = path
            if path in groups and text not in whole(path):
                others = [
                    *groups,
                    *(named for group in groups for named in _ELSEWHERE.findall(whole(group))),
                ]
                having = (
                    one
                    for one in others
                    if text == whole(one) or (one in groups and text in whole(one))
                )
                home = next(having, path)
            texts_of = found.setdefault(home, [])
            if text not in texts_of:
                texts_of.append(text)
    return found


def unread(told: Texts, whole: Callable[[str], str]) -> list[str]:
    """The promised texts that are missing in their files, in words."""
    lost = []
    for path, promised in told.items():
        found = whole(path)
        # A result's file is exactly the result. A snapshot's file has a header line before each
        # message.
        missing = [
            text
            for text in promised
            if (text not in found if "/compressed_group_" in path else text != found)
        ]
        lost += [f"{path}: {text[:60]!r} …, {len(text)} characters" for text in missing]
    return lost


def facts(told: Texts) -> Facts:
    """All facts. Results come first, because a snapshot's originals repeat them."""
    found: Facts = {kind: {} for kind in KINDS}
    for path, promised in sorted(told.items(), key=lambda entry: "/compressed_group_" in entry[0]):
        for kind, fact in ((kind, fact) for text in promised for kind, fact in facts_in(text)):
            found[kind].setdefault(fact, path)
    return found


def facts_in(text: str) -> Iterator[tuple[str, str]]:
    """Pairs of kind and fact."""
    for kind, pattern in KINDS.items():
        for fact in set(pattern.findall(text)):
            if len(fact) <= LONGEST:
                yield kind, fact


def visible(known: Facts, text: str) -> dict[str, float]:
    """Of each kind's facts, the share that `text` contains; 1 for a kind without facts."""
    there = set(facts_in(text))
    return {
        kind: sum((kind, fact) in there for fact in found) / len(found) if found else 1.0
        for kind, found in known.items()
    }


# -- one run, all runs -----------------------------------------------------------------------------


def examined(run: Run, tokens: Tokens) -> Found | None:
    """Examine one run; None if nothing was moved. Raises Unplannable."""
    sent = asyncio.run(replay(run, Policy(), MessageCache(tokens)))
    if sent.last is None or not sent.told:
        return None
    tools = Reading(sent.last, tokens)
    whole = cache(tools.whole)
    told = homes(sent.told, tools.paths, whole)
    known = facts(told)
    last = "\n".join(text for raw in sent.last.entries for text in words_of(raw))
    lost = unread(told, whole)
    lost += [f"{path}: grep does not find {fact!r}" for fact, path in _ungrepped(known, tools)]
    moved = {text for promised in told.values() for text in promised}
    return Found(
        id=run.id,
        requests=len(sent.bodies),
        files=len(told),
        moved=sum(len(text.encode()) for text in moved),
        facts={kind: len(found) for kind, found in known.items()},
        visible=visible(known, last),
        lost=lost,
    )


def _ungrepped(known: Facts, tools: Reading) -> Iterator[tuple[str, str]]:
    for found in known.values():
        yield from ((fact, path) for fact, path in found.items() if not tools.finds(fact, path))


def examine(runs: Iterable[Run]) -> Iterator[Found]:
    """The results of those runs in which anything was moved."""
    tokens = Tokens()
    for run in runs:
        try:
            found = examined(run, tokens)
        except Unplannable as error:
            print(f"{run.id}: left out, {error}")
        else:
            if found:
                yield found


def table(results: Sequence[Found]) -> str:
    """What moved, how much of it the last request shows, and what is lost."""
    of_all = ", ".join(f"{sum(one.facts[kind] for one in results):,} {kind}" for kind in KINDS)
    lines = [
        f"{len(results)} runs of which anything was moved, {sum(one.requests for one in results):,} requests",
        f"left out of the last requests, or of one before: {sum(one.moved for one in results):,} bytes in "
        f"{sum(one.files for one in results):,} files, with {of_all}",
    ]
    for kind in KINDS:
        shares = [one.visible[kind] for one in results]
        lines.append(f"{kind} that the last request shows: {median(shares):.0%} (median)")
    lost = [f"{one.id}: {fault}" for one in results for fault in one.lost]
    return "\n".join([*lines, f"lost: {len(lost) or 'nothing'}", *lost[:20]])
