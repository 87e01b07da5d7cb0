"""How often a model needs what was moved.

Runs of strong models are replayed request by request. For each recorded reply, its *facts* are
looked up in what a strategy would have sent before it: numbers of three or more digits, paths,
identifiers, and quoted lines of 20 or more characters, in its text and in the arguments of its
calls. Only facts that a tool result brought count, and not those that the task names. A fact is

- *sent*, if any message of the request has it whole;
- *preview*, if only a preview of a moved result has it;
- *moved*, if it is only in moved text: the proxy's model is one read away from it, with the others
  it is gone.

Of a reply that uses moved facts, *one read* is the share where a single moved result has all of
them. An *edit* is a call that quotes old text to be replaced (`OLD_TEXT`); it counts as moved if a
quoted line is only in moved text.

The replies were written by models that saw everything, so a reply is not changed by what a strategy
left out. Summaries are canned and hold no fact, for us and for `summary only` alike.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import msgspec

from bench.fidelity import KINDS, LONGEST
from bench.sent import MODEL, REFERENCE, replay
from proxy.dialects.chat import CHAT
from proxy.policy import Policy, Profile
from proxy.requests.cache import MessageCache
from proxy.tokens import Tokens
from tests import written
from tests.transcripts import Json, Run, requests_of

ALL = "all"
TRIGGER = 30_000
"""Tokens of history from which the alternatives act: the default ceiling of ours."""

LEAST_LINE = 20
LEAST_DIGITS = 3
"""Characters of a line that counts as a quote, and digits of a number. Shorter ones are everywhere
by chance."""

OLD_TEXT = frozenset({"old_str", "old_string", "old_text", "oldText", "search"})
"""Arguments of calls that quote the text which an edit replaces."""
OURS = {f"proxy: {profile}": profile for profile in Profile}
DEFAULT = f"proxy: {Profile.BALANCED}"
CODING = "coding agents"
GATHERING = "gathering agents"
"""Agents that work on code, and those that gather facts through the APIs of others: research, MCP,
customer service."""

_OLD_BLOCK = re.compile(
    r"^(?:<<<BEFORE_EDIT>>>|<{5,9} SEARCH)\n(.*?)\n(?:<<<AFTER_EDIT>>>|={5,9}$)", re.M | re.S
)
"""Old text in the format of SUPER's agent, and in that of aider and others."""
_NUMBERED = re.compile(r"^\s*\d+\s?[:|\t] ?")
_BARE = re.compile(r"\D+")

Facts = frozenset[tuple[str, str]]
Requests = Iterable[Sequence[Json]]
"""The messages of each request, in their order."""
Strategy = Callable[[Run, Tokens], Requests]

SENT = "sent"
PREVIEW = "preview"
MOVED = "moved"


class Reply(msgspec.Struct, frozen=True):
    """A recorded reply, and what it has from results."""

    used: Facts
    """Its facts that a result brought and the task did not."""
    edits: list[Facts]
    """Of each edit, the quoted lines among these facts; edits that quote none are left out."""
    results: list[Json]
    """The results before it."""


class Sent(msgspec.Struct, frozen=True):
    """A message as it was sent."""

    tokens: int
    facts: Facts
    preview: bool
    """Whether it is only a preview of a moved result."""


class Tally(msgspec.Struct):
    """What became of the facts that replies use. `replies` use any fact of a result, `lacking` of
    them a moved one.

    `one_read`: those of the lacking replies whose moved facts are all in one result. `edits` quote
    lines of results, `edits_moved` of them a moved line.
    """

    where: Counter[str] = msgspec.field(default_factory=Counter)
    replies: int = 0
    lacking: int = 0
    one_read: int = 0
    edits: int = 0
    edits_moved: int = 0
    tokens: int = 0
    """Tokens of the messages of all requests, as they were sent."""

    def note(self, reply: Reply, sent: Sequence[Sent]) -> None:
        """Count a reply's facts, by the messages of its request."""
        found = {fact: _place(fact, sent) for fact in reply.used}
        self.where.update(found.values())
        moved = {fact for fact, place in found.items() if place == MOVED}
        self.replies += bool(found)
        self.lacking += bool(moved)
        self.one_read += bool(moved) and any(
            moved <= of_message(result) for result in reply.results
        )
        self.edits += len(reply.edits)
        self.edits_moved += sum(not moved.isdisjoint(edit) for edit in reply.edits)

    def add(self, other: Tally) -> None:
        """Count what the other one counted, too."""
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def share(self, place: str) -> float:
        return _share(self.where[place], self.where.total())


def _place(fact: tuple[str, str], sent: Sequence[Sent]) -> str:
    found = [one.preview for one in sent if fact in one.facts]
    if not found:
        return MOVED
    return PREVIEW if all(found) else SENT


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


# -- facts -----------------------------------------------------------------------------------------


@cache
def facts_in(text: str) -> Facts:
    """The facts of a text, with their kinds."""
    found = {
        (kind, fact)
        for kind, pattern in KINDS.items()
        for fact in pattern.findall(text)
        if len(fact) <= LONGEST
    }
    found = {
        (kind, fact)
        for kind, fact in found
        if kind != "numbers" or len(_BARE.sub("", fact)) >= LEAST_DIGITS
    }
    lines = (_NUMBERED.sub("", line).strip() for line in text.splitlines())
    return frozenset(
        found | {("quotes", line) for line in lines if LEAST_LINE <= len(line) <= LONGEST}
    )


def of_message(message: Json) -> Facts:
    """The facts of a message: its texts, and the strings in the arguments of its calls."""
    found = frozenset[tuple[str, str]]().union(*map(facts_in, _texts(message)))
    for call in message.get("tool_calls") or ():
        found = found.union(
            *(facts_in(text) for _, text in _strings(call["function"]["arguments"]))
        )
    return found


def quoted(arguments: str) -> Facts:
    """The lines of old text that an edit with these arguments quotes; none if it is no edit."""
    old = list[str]()
    for name, text in _strings(arguments):
        old += [text] if name in OLD_TEXT else _OLD_BLOCK.findall(text)
    return frozenset(fact for text in old for fact in facts_in(text) if fact[0] == "quotes")


def _texts(message: Json) -> list[str]:
    content = message.get("content")
    if isinstance(content, str):
        return [content]
    return [text for _, text in CHAT.texts(json.dumps(message).encode())] if content else []


def _strings(arguments: str) -> Iterator[tuple[str, str]]:
    """The strings in a call's arguments, each with the name of the member that has it."""
    try:
        level: list[tuple[str, Any]] = [("", json.loads(arguments))]
    except ValueError:
        level = [("", arguments)]
    while level:
        name, value = level.pop()
        if isinstance(value, str):
            yield name, value
        elif isinstance(value, dict):
            level += value.items()
        elif isinstance(value, list):
            level += [(name, one) for one in value]


# -- strategies ------------------------------------------------------------------------------------


def proxied(profile: Profile) -> Strategy:
    """The proxy's own preparation, under a profile."""

    def sent(run: Run, tokens: Tokens) -> Requests:
        policy = Policy(offload=written.offload(profile=profile))
        bodies = asyncio.run(replay(run, policy, MessageCache(tokens))).bodies
        return (msgspec.json.decode(body)["messages"] for body in bodies)

    return sent


def last_results(number: int, above: int = 0) -> Strategy:
    """Only the last results, in requests above so many tokens: a window, or Anthropic's
    `clear_tool_uses`."""

    def sent(run: Run, tokens: Tokens) -> Requests:
        for messages, _ in requests_of(run):
            tools = [index for index, message in enumerate(messages) if message["role"] == "tool"]
            old = set(tools[:-number]) if _size(messages, tokens) > above else set()
            yield [
                {**one, "content": "[cleared]"} if index in old else one
                for index, one in enumerate(messages)
            ]

    return sent


def summary_only(run: Run, tokens: Tokens) -> Requests:
    """All but the task becomes a summary whenever the history exceeds the trigger."""
    start = 0
    for messages, _ in requests_of(run):
        task = next((at for at, one in enumerate(messages) if one["role"] == "user"), -1) + 1
        if _size([*messages[:task], *messages[max(start, task) :]], tokens) > TRIGGER:
            start = len(messages)
        yield [*messages[:task], *messages[max(start, task) :]]


def _size(messages: Sequence[Json], tokens: Tokens) -> int:
    return sum(_read(json.dumps(message), tokens).tokens for message in messages)


STRATEGIES: dict[str, Strategy] = {
    "no proxy": last_results(10**9),
    **{name: proxied(profile) for name, profile in OURS.items()},
    "last 10 results": last_results(10),
    f"clear_tool_uses, keep 3, above {TRIGGER:,}": last_results(3, TRIGGER),
    f"summary only, above {TRIGGER:,}": summary_only,
}


# -- one run, all runs -----------------------------------------------------------------------------


def tally(run: Run, strategies: Mapping[str, Strategy], tokens: Tokens) -> dict[str, Tally]:
    """A run's facts under each strategy."""
    found = {name: Tally() for name in strategies}
    replies = list(replies_of(run))
    for name, strategy in strategies.items():
        for reply, messages in zip(replies, strategy(run, tokens), strict=True):
            sent = [_read(json.dumps(message), tokens) for message in messages]
            found[name].tokens += sum(one.tokens for one in sent)
            found[name].note(reply, sent)
    return found


@cache
def _read(encoded: str, tokens: Tokens) -> Sent:
    message = json.loads(encoded)
    preview = message["role"] == "tool" and any(REFERENCE.search(text) for text in _texts(message))
    return Sent(tokens.count(encoded, MODEL), of_message(message), preview)


def replies_of(run: Run) -> Iterator[Reply]:
    """The recorded replies with their facts."""
    brought = set[tuple[str, str]]()
    given = set[tuple[str, str]]()
    results = list[Json]()
    for message in run.messages:
        if message["role"] == "assistant":
            used = of_message(message) & brought - given
            calls = message.get("tool_calls") or ()
            edits = [quoted(call["function"]["arguments"]) & used for call in calls]
            yield Reply(used, [edit for edit in edits if edit], list(results))
        elif message["role"] == "tool":
            results.append(message)
            brought |= of_message(message)
        else:
            given |= of_message(message)


Found = dict[str, dict[str, Tally]]
"""Kind of agent or source → strategy → what became of the facts of its runs. `ALL` are all runs."""


def agents(run: Run) -> str:
    """The kind of agent that made this run: `CODING` or `GATHERING`."""
    return CODING if run.kind in ("software-engineering", "ml-repo-execution") else GATHERING


def needed(runs: Iterable[Run], strategies: Mapping[str, Strategy] = STRATEGIES) -> Found:
    """What became of the facts of these runs."""
    tokens = Tokens()
    found: Found = defaultdict(lambda: {name: Tally() for name in strategies})
    for run in runs:
        for name, one in tally(run, strategies, tokens).items():
            for group in (ALL, agents(run), run.source):
                found[group][name].add(one)
        facts_in.cache_clear()
        _read.cache_clear()
    return found


def report(runs: Iterable[Run]) -> str:
    """Both tables."""
    found = needed(runs)
    return f"{table(found[ALL])}\n\n{group_table(found)}"


def table(found: Mapping[str, Tally]) -> str:
    """What became of the facts under each strategy."""
    first = next(iter(found.values()))
    lines = [
        f"{first.where.total():,} facts of results that {first.replies:,} replies use\n",
        "| | tokens sent | sent | preview | moved | replies with a moved fact |",
        "|---|---|---|---|---|---|",
    ]
    for name, one in found.items():
        places = " | ".join(f"{one.share(place):.1%}" for place in (SENT, PREVIEW, MOVED))
        tokens = _share(one.tokens, first.tokens)
        lacking = _share(one.lacking, one.replies)
        lines.append(f"| {name} | {tokens:.2f} | {places} | {lacking:.1%} |")
    return "\n".join(lines)


def group_table(found: Found) -> str:
    """By kind of agent and source: replies that use a moved fact, by profile; one read and edits
    under the default."""
    lines = [f"| | replies | {' | '.join(OURS.values())} | one read | edits |"]
    lines.append("|---" * (len(OURS) + 4) + "|")
    kinds = [group for group in (ALL, CODING, GATHERING) if group in found]
    for group in [*kinds, *sorted(found.keys() - {*kinds})]:
        tallies = found[group]
        default = tallies[DEFAULT]
        lacking = [f"{_share(tallies[name].lacking, tallies[name].replies):.1%}" for name in OURS]
        one_read = f"{default.one_read} of {default.lacking}"
        edits = f"{default.edits_moved} of {default.edits}"
        cells = [group, f"{default.replies:,}", *lacking, one_read, edits]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
