"""A typical agent at work: the `openai` client, a list of messages, tools and a loop. It does not know about the proxy.

Beside it, what reached the upstream is measured and shown.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from posixpath import basename
from typing import Any, NamedTuple

from openai import OpenAI, OpenAIError

from proxy.demo.library import READ_SOURCE, TOOLS, Library, Question
from proxy.demo.model import QUESTION, TASK, Count, Json, ScriptedUpstream, Sent, message_tokens, moved_to, text_of
from proxy.errors import ProxyError

HISTORY = 95_000
"""Tokens that the session's history must reach."""
SYSTEM = "You are a careful engineer. You answer from what you have read, never from memory."

INTRODUCTION = """\
An agent reads Python's standard library through offload-proxy, and sends its
whole history with every turn. The agent, its tools, the proxy and the store are
real. The model is scripted: it runs on this machine and decides by what it sees
in the messages that reach it. Sizes are tokens of o200k_base.

"""
_COLUMNS = ("turn", "the model says", "agent sends", "upstream gets", "results moved", "read back")
_LINE = "{:>4}  {:<44} {:>11} {:>13} {:>13} {:>9}"


class Row(NamedTuple):
    """A turn: tokens of the agent's request and of the one sent upstream, results moved in it, tokens read back."""

    turn: int
    action: str
    client: int
    sent: int
    moved: int
    read_back: int

    def cells(self) -> tuple[str, ...]:
        figures = (f"{number:,}" if number else "" for number in self[2:])
        return (str(self.turn), self.action[:44], *figures)


class Prompt(NamedTuple):
    """Tokens of a whole prompt as the agent sent it, and as it went upstream in the first round."""

    came: int
    sent: int

    @classmethod
    def of(cls, headers: Mapping[str, str]) -> Prompt:
        return cls(*(int(headers.get(f"x-offload-tokens-{end}", 0)) for end in ("before", "after")))


class Agent:
    """`messages` is the agent's whole memory, and every request carries all of it. `rows` and `answers` grow."""

    def __init__(self, client: OpenAI, upstream: ScriptedUpstream, count: Count) -> None:
        self.messages: list[Json] = [{"role": "system", "content": SYSTEM}]
        self.rows: list[Row] = []
        self.answers: list[tuple[Question, str]] = []
        self.upstream = upstream
        self._client = client
        self._count = count
        self._library = Library()
        self._offered = count(json.dumps(TOOLS))

    def run(self) -> Iterator[Row]:
        """Read the modules, then ask for a line of each of the first two. Raises ProxyError if an agent had to stop."""
        modules = self._library.reading_list(HISTORY, self._count)
        yield from self.work(TASK.format(modules=", ".join(f"`{module}`" for module in modules)))
        for question in map(self._library.question, modules[:2]):
            yield from self.work(QUESTION.format(path=question.path, begins=question.begins))
            self.answers.append((question, text_of(self.messages[-1]).strip()))

    def work(self, request: str) -> Iterator[Row]:
        """The turns until the model calls no more tools."""
        self.messages.append({"role": "user", "content": request})
        calls: Any = True
        while calls:
            before, client = len(self.upstream.requests), self._tokens()
            reply = self._ask()
            self.messages.append(reply)
            calls = [call["function"] for call in reply.get("tool_calls") or ()]
            self.rows.append(self._row(client, calls, self.upstream.requests[before:]))
            yield self.rows[-1]
            for call in reply.get("tool_calls") or ():
                if call["function"]["name"] != READ_SOURCE:
                    raise ProxyError(f"the agent was told to call {call['function']['name']}, which is not its tool")
                result = self._library.page(**json.loads(call["function"]["arguments"]))
                self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})

    def _ask(self) -> Json:
        tools: Any = TOOLS
        messages: Any = self.messages
        try:
            with self._client.chat.completions.stream(model="scripted-demo", messages=messages, tools=tools) as stream:
                said = stream.get_final_completion().choices[0].message
        except OpenAIError as error:
            raise ProxyError(f"the agent got an error: {error}") from error
        named = ((call.id, call.function) for call in said.tool_calls or ())
        calls = [
            {"id": id, "type": "function", "function": {"name": one.name, "arguments": one.arguments}}
            for id, one in named
        ]
        return {"role": "assistant", "content": said.content or "", **({"tool_calls": calls} if calls else {})}

    def _tokens(self) -> int:
        return self._offered + sum(message_tokens(message, self._count) for message in self.messages)

    def _row(self, client: int, calls: list[Json], requests: list[Sent]) -> Row:
        sent = requests[-1]
        given = [" ".join([call["name"], *map(str, json.loads(call["arguments"]).values())]) for call in calls]
        moved = sum(bool(moved_to(message)) for message in sent.messages)
        return Row(
            len(self.rows) + 1, (given or ["answers the user"])[0], client, sent.tokens, moved, self._read_back(sent)
        )

    def _read_back(self, sent: Sent) -> int:
        """Tokens of the results since the last user message that answer no tool of the agent."""
        last = max(index for index, message in enumerate(sent.messages) if message["role"] == "user")
        calls = [call for message in sent.messages[last:] for call in message.get("tool_calls") or ()]
        hidden = {call["id"] for call in calls if call["function"]["name"] != READ_SOURCE}
        return sum(self._count(text_of(one)) for one in sent.messages[last:] if one.get("tool_call_id") in hidden)

    def lost(self, originals: Mapping[str, bytes]) -> dict[str, bool]:
        """Every moved result by its file's name, and whether the store does not hold it byte for byte."""
        texts = {message.get("tool_call_id"): text_of(message) for message in self.messages}
        moved = {
            basename(file): message["tool_call_id"]
            for request in self.upstream.requests
            for message in request.messages
            if (file := moved_to(message))
        }
        return {name: originals.get(name) != texts[call].encode() for name, call in moved.items()}


def show(rows: Iterable[Row]) -> None:
    """Show the rows as they come."""
    sys.stdout.write(INTRODUCTION + _LINE.format(*_COLUMNS) + "\n")
    for row in rows:
        sys.stdout.write(_LINE.format(*row.cells()) + "\n")
        sys.stdout.flush()


def faults(agent: Agent, lost: Mapping[str, bool]) -> list[str]:
    """The failed checks, in words; empty on success."""
    client = agent.rows[-1].client
    missing = ", ".join(sorted(name for name, gone in lost.items() if gone))
    checks = [
        (client < HISTORY, f"the history has {client:,} tokens and not {HISTORY:,}"),
        (not lost, "nothing was moved"),
        (not any(row.read_back for row in agent.rows), "nothing was read back"),
        (bool(missing), f"the store does not hold what was moved: {missing}"),
        (bool(agent.upstream.refused), f"upstream refused: {'; '.join(agent.upstream.refused)}"),
        *((said != one.line.strip(), f"asked for {one.line!r}, it said {said!r}") for one, said in agent.answers),
    ]
    return [text for failed, text in checks if failed]


def summary(agent: Agent, originals: Mapping[str, bytes], folder: Path, told: Sequence[Prompt]) -> list[str]:
    """Write what the demo has shown, with what the proxy told of each request; returns the failed checks."""
    lost = agent.lost(originals)
    wrong, last, requests = faults(agent, lost), told[-1], agent.upstream.requests
    sent = sum(request.tokens for request in requests)
    kept = sum(one.shares(two) for one, two in pairwise(requests)) / sent
    lines = [
        f"asked         the line of {one.path} that begins with {one.begins!r}\n"
        f"  answered    {said}  ({'right' if said == one.line.strip() else 'WRONG'})"
        for one, said in agent.answers
    ]
    lines += [
        f"\ncontext       {last.came:,} tokens without the proxy, {last.sent:,} with it: "
        f"{1 - last.sent / last.came:.0%} less",
        f"              at no time more than {max(one.sent for one in told):,}",
        f"all requests  {sum(row.client for row in agent.rows):,} tokens of input without, {sent:,} with, hidden "
        "rounds included",
        f"same prefix   {kept:.0%} of the input repeats how the request before began, so a prompt cache has it",
        f"nothing lost  {len(lost)} results were moved, and each is in the store byte for byte"
        if not any(lost.values())
        else f"LOST          {sum(lost.values())} of {len(lost)} moved results",
        f"files         {folder}/store, kept for you; delete them when you like",
        f"              {sys.executable} -m proxy store ls --store {folder}/store",
        "your agent    offload-proxy serve --upstream https://api.openai.com/v1",
        "              OPENAI_BASE_URL=http://127.0.0.1:8787/v1 your-agent",
        "",
        *(f"FAILED: {fault}" for fault in wrong),
    ]
    sys.stdout.write("\n" + "\n".join(lines) + "\n")
    return wrong
