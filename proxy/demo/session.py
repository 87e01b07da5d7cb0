"""The demo's session, turn by turn, and its result."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping

import msgspec

from proxy.demo import measure
from proxy.demo.agent import Agent, AgentTurn
from proxy.demo.library import DEFINITIONS, TOOLS, Library, Question
from proxy.demo.model import QUESTION, TASK, text_of
from proxy.demo.upstream import ScriptedUpstream

HISTORY = 95_000
"""Tokens that the session's history must reach."""


class Row(msgspec.Struct, frozen=True):
    """A turn: tokens of the agent's request and of the one sent upstream, results moved in it, tokens read back."""

    turn: int
    action: str
    client: int
    sent: int
    moved: int
    read_back: int


class DemoAnswer(msgspec.Struct, frozen=True):
    question: Question
    said: str

    @property
    def right(self) -> bool:
        return self.said.strip() == self.question.line.strip()


class Session:
    """An agent at work through the proxy. `rows` and `answers` grow as `run` is driven."""

    def __init__(self, agent: Agent, library: Library, upstream: ScriptedUpstream, count: Callable[[str], int]) -> None:
        self.rows: list[Row] = []
        self.answers: list[DemoAnswer] = []
        self._agent = agent
        self._library = library
        self._upstream = upstream
        self._count = count
        self._offered = count(msgspec.json.encode(DEFINITIONS).decode())

    def run(self) -> Iterator[Row]:
        """Read the modules, then ask for a line of each of the first two."""
        modules = self._library.reading_list(HISTORY, self._count)
        questions = [self._library.question(module) for module in modules[:2]]
        yield from self._turns(TASK.format(modules=", ".join(f"`{module}`" for module in modules)))
        for question in questions:
            yield from self._turns(QUESTION.format(path=question.path, begins=question.begins))
            self.answers.append(DemoAnswer(question, text_of(self._agent.messages[-1])))

    def outcome(self, originals: Mapping[str, bytes]) -> DemoResult:
        """The figures at the end; `originals` are the moved results in the store, by file name."""
        requests = [request for request in self._upstream.requests if not request.summary]
        texts = {message.get("tool_call_id"): text_of(message) for message in self._agent.messages}
        moved = {name: call for request in requests for name, call in measure.moved(request.messages).items()}
        lost = sorted(name for name, call in moved.items() if originals.get(name) != texts[call].encode())
        return DemoResult(
            rows=self.rows,
            answers=self.answers,
            sent=sum(request.tokens for request in self._upstream.requests),
            prefix_kept=measure.prefix_kept(requests),
            moved=len(moved),
            lost=lost,
            refused=self._upstream.refused,
        )

    def _turns(self, request: str) -> Iterator[Row]:
        seen = len(self._upstream.requests)
        for turn in self._agent.work(request):
            requests = [one for one in self._upstream.requests[seen:] if not one.summary]
            seen = len(self._upstream.requests)
            self.rows.append(self._row(turn, requests))
            yield self.rows[-1]

    def _row(self, turn: AgentTurn, requests: list[measure.SentRequest]) -> Row:
        return Row(
            turn=len(self.rows) + 1,
            action=_action(turn),
            client=self._offered + sum(measure.message_tokens(one, self._count) for one in self._agent.messages[:-1]),
            sent=requests[-1].tokens,
            moved=len(measure.moved(requests[-1].messages)),
            read_back=measure.read_back(requests[-1], TOOLS, self._count),
        )


class DemoResult(msgspec.Struct, frozen=True):
    """The result. Sizes are tokens; `lost`: stored files that differ from the results in the agent's history."""

    rows: list[Row]
    answers: list[DemoAnswer]
    sent: int
    """Input tokens of all requests upstream, internal rounds and summaries included."""
    prefix_kept: float
    moved: int
    lost: list[str]
    refused: list[str]

    @property
    def without(self) -> int:
        """Input tokens of all requests as the agent sent them."""
        return sum(row.client for row in self.rows)

    @property
    def largest(self) -> int:
        """Tokens of the largest request upstream."""
        return max(row.sent for row in self.rows)

    @property
    def last(self) -> Row:
        return self.rows[-1]

    @property
    def reduction(self) -> float:
        """The share of the last request's tokens that the proxy took out."""
        return 1 - self.last.sent / self.last.client

    def faults(self) -> list[str]:
        """The failed checks, in words; empty on success."""
        checks = [
            (self.last.client < HISTORY, f"the history has {self.last.client:,} tokens and not {HISTORY:,}"),
            (not self.moved, "nothing was moved"),
            (not any(row.read_back for row in self.rows), "nothing was read back"),
            (bool(self.lost), f"the store does not hold what was moved: {', '.join(self.lost)}"),
            (bool(self.refused), f"upstream refused: {'; '.join(self.refused)}"),
        ]
        wrong = [f"asked for {one.question.line!r}, it said {one.said!r}" for one in self.answers if not one.right]
        return [text for failed, text in checks if failed] + wrong


def _action(turn: AgentTurn) -> str:
    """The model's decision in words: a tool call, or the answer."""
    for name, arguments in turn.calls:
        given = json.loads(arguments)
        return " ".join([name, *(str(value) for value in given.values())])
    return "answers the user"
