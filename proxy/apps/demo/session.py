"""A typical agent at work: the `openai` client, a list of messages, a tool and a loop. It does not
know the proxy.

It reads the sources of this machine's Python standard library, page by page. Beside it, what
reached the upstream is measured and shown.
"""

from __future__ import annotations

import json
import re
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from posixpath import basename
from typing import Any, NamedTuple

from openai import OpenAI, OpenAIError

from proxy.apps.demo.model import (
    QUESTION,
    READ_SOURCE,
    TASK,
    Json,
    ScriptedUpstream,
    Sent,
    count,
    message_tokens,
    moved_to,
    text_of,
)
from proxy.errors import ProxyError, UserMistake

PAGE_LINES = 500
"""Lines of a page: coding agents read a few hundred at a time."""

READING = (
    "argparse.py",
    "asyncio/base_events.py",
    "tarfile.py",
    "http/client.py",
    "subprocess.py",
    "pickle.py",
    "difflib.py",
    "inspect.py",
    "logging/__init__.py",
    "unittest/mock.py",
    "typing.py",
)
"""Large modules in every Python since 3.11, in the order in which the demo reads them."""

_CONSTANT = re.compile(r"_?[A-Z][A-Z_]{3,} = (?=.{8})")
"""How lines begin that make good questions."""

HISTORY = 95_000
"""Tokens that the session's history must reach."""
SYSTEM = "You are a careful engineer. You answer from what you have read, never from memory."
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": READ_SOURCE,
            "description": f"{PAGE_LINES} lines of a source file of Python's standard library, from line `first` on.",
            "parameters": {
                "type": "object",
                "properties": {
                    "path": {"type": "string"},
                    "first": {"type": "integer", "minimum": 1},
                },
                "required": ["path"],
            },
        },
    }
]

INTRODUCTION = """\
An agent reads Python's standard library through offload-proxy, and sends its
whole history with every turn. The agent, its tools, the proxy and the store are
real. The model is scripted: it runs on this machine and decides by what it sees
in the messages that reach it. Its prices are those of gpt-5.5. Sizes are tokens
of o200k_base.

"""
_COLUMNS = (
    "turn",
    "the model says",
    "agent sends",
    "upstream gets",
    "results moved",
    "read rounds",
)
_LINE = "{:>4}  {:<44} {:>11} {:>13} {:>13} {:>11}\n"


# -- what it reads ---------------------------------------------------------------------------------


class Page(NamedTuple):
    """`text` has a line before it that says which lines these are."""

    path: str
    first: int
    text: str


class Question(NamedTuple):
    """A question for the line of a file that begins with a certain text."""

    path: str
    begins: str
    line: str


def pages(path: str) -> Iterator[Page]:
    """Yield the pages of a module of `READING`; none of anything else."""
    file = Path(sysconfig.get_paths()["stdlib"], path)
    if path not in READING or not file.is_file():
        return
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    for start in range(0, len(lines), PAGE_LINES):
        part = lines[start : start + PAGE_LINES]
        head = f"{path}, lines {start + 1}-{start + len(part)} of {len(lines)}\n"
        yield Page(path, start + 1, head + "".join(part))


def reading_list() -> list[Page]:
    """Return whole modules' pages with at least `HISTORY` tokens. Raises UserMistake if the sources
    have fewer."""
    chosen: list[Page] = []
    for path in READING:
        chosen += pages(path)
        if sum(count(page.text) for page in chosen) >= HISTORY:
            return chosen
    raise UserMistake(
        "the demo reads the standard library's sources, and this Python has too few of them: run it with "
        "another one, such as python.org's or uv's"
    )


def question(path: str) -> Question:
    """Return a question for a constant on the first page that the file mentions once. Raises
    UserMistake."""
    lines = [line for page in pages(path) for line in page.text.splitlines()]
    for line in reversed(lines[: PAGE_LINES + 1]):
        found = _CONSTANT.match(line)
        if found and sum(other.startswith(found[0]) for other in lines) == 1:
            return Question(path, found[0].strip(), line)
    raise UserMistake(
        f"{path} is not what the demo expects of the standard library: run it with another Python"
    )


# -- the agent -------------------------------------------------------------------------------------


class Row(NamedTuple):
    """A turn: the whole prompt's tokens as it came and as it was sent, as the proxy says them,
    results moved in it, and the rounds in which the model read them back."""

    turn: int
    action: str
    client: int
    sent: int
    moved: int
    rounds: int


class Agent:
    """`messages` is the agent's whole memory, and every request carries all of it. `rows` and
    `answers` grow."""

    def __init__(self, client: OpenAI, upstream: ScriptedUpstream) -> None:
        self.messages: list[Any] = [{"role": "system", "content": SYSTEM}]
        self.rows: list[Row] = []
        self.answers: list[tuple[Question, str]] = []
        self._sizes = 0, 0
        self.upstream = upstream
        self._client = client

    def run(self) -> Iterator[Row]:
        """Read the modules, then ask for a line of each of the first two. Raises ProxyError if an
        agent had to stop."""
        reading = reading_list()
        yield from self.work(
            TASK.format(
                pages="\n".join(f"`{page.path}` from line {page.first}" for page in reading)
            )
        )
        for path in list(dict.fromkeys(page.path for page in reading))[:2]:
            asked = question(path)
            yield from self.work(QUESTION.format(path=path, begins=asked.begins))
            self.answers.append((asked, text_of(self.messages[-1]).strip()))

    def work(self, request: str) -> Iterator[Row]:
        self.messages.append({"role": "user", "content": request})
        calls: Any = True
        while calls:
            before = len(self.upstream.requests)
            client = count(json.dumps(TOOLS)) + sum(map(message_tokens, self.messages))
            reply = self._ask()
            self.messages.append(reply)
            calls = reply.get("tool_calls") or ()
            self.rows.append(self._row(client, calls, self.upstream.requests[before:]))
            yield self.rows[-1]
            for call in calls:
                function = call["function"]
                if function["name"] != READ_SOURCE:
                    raise ProxyError(
                        f"the agent was told to call {function['name']}, which is not its tool"
                    )
                given = json.loads(function["arguments"])
                found = (page.text for page in pages(given["path"]) if page.first == given["first"])
                result = next(found, f"There is no {given['path']}.")
                self.messages.append(
                    {"role": "tool", "tool_call_id": call["id"], "content": result}
                )

    def _ask(self) -> Json:
        try:
            reply = self._client.chat.completions.with_raw_response.create(
                model="scripted-demo", messages=self.messages, tools=TOOLS
            )
        except OpenAIError as error:
            raise ProxyError(f"the agent got an error: {error}") from error
        sizes = [
            int(reply.headers.get(f"x-offload-tokens-{end}", 0)) for end in ("before", "after")
        ]
        self._sizes = sizes[0], sizes[1]
        said: Json = reply.parse().choices[0].message.to_dict()
        return said

    def _row(self, client: int, calls: list[Json], requests: list[Sent]) -> Row:
        sent = requests[-1]
        action = "answers the user"
        came, went = self._sizes
        if calls:
            function = calls[0]["function"]
            action = " ".join(
                [function["name"], *map(str, json.loads(function["arguments"]).values())]
            )
        moved = sum(bool(moved_to(message)) for message in sent.messages)
        return Row(
            len(self.rows) + 1,
            action,
            came or client,
            went or sent.tokens,
            moved,
            len(requests) - 1,
        )

    def lost(self, originals: Mapping[str, bytes]) -> dict[str, bool]:
        """Every moved result by its file's name, and whether the store does not hold it byte for
        byte."""
        texts = {message.get("tool_call_id"): text_of(message) for message in self.messages}
        moved = {
            basename(file): message["tool_call_id"]
            for request in self.upstream.requests
            for message in request.messages
            if (file := moved_to(message))
        }
        return {name: originals.get(name) != texts[call].encode() for name, call in moved.items()}


def show(agent: Agent) -> None:
    sys.stdout.write(INTRODUCTION + _LINE.format(*_COLUMNS))
    for row in agent.run():
        figures = (f"{number:,}" if number else "" for number in row[2:])
        sys.stdout.write(_LINE.format(row.turn, row.action[:44], *figures))
        sys.stdout.flush()


def faults(agent: Agent, lost: Mapping[str, bool]) -> list[str]:
    client = agent.rows[-1].client
    missing = ", ".join(sorted(name for name, gone in lost.items() if gone))
    checks = {
        f"the history has {client:,} tokens and not {HISTORY:,}": client < HISTORY,
        "nothing was moved": not lost,
        "nothing was read back": not any(row.rounds for row in agent.rows),
        f"the store does not hold what was moved: {missing}": bool(missing),
        **{
            f"asked for {one.line!r}, it said {said!r}": said != one.line.strip()
            for one, said in agent.answers
        },
    }
    return [text for text, failed in checks.items() if failed]


def summary(agent: Agent, originals: Mapping[str, bytes], folder: Path) -> list[str]:
    """Write what the demo has shown; returns the failed checks."""
    lost = agent.lost(originals)
    wrong = faults(agent, lost)
    requests = agent.upstream.requests
    last = agent.rows[-1]
    sent = sum(request.tokens for request in requests)
    kept = sum(one.shares(two) for one, two in pairwise(requests)) / sent
    whole = sum(row.client for row in agent.rows)
    stored = (
        f"{sum(lost.values())} of them are LOST"
        if any(lost.values())
        else "each is in the store byte for byte"
    )
    sys.stdout.write("\n")
    for one, said in agent.answers:
        sys.stdout.write(f"asked         the line of {one.path} that begins with {one.begins!r}\n")
        sys.stdout.write(
            f"  answered    {said}  ({'right' if said == one.line.strip() else 'WRONG'})\n"
        )
    sys.stdout.write(f"""
context       {last.client:,} tokens without the proxy, {last.sent:,} with it: {1 - last.sent / last.client:.0%} less
              at no time more than {max(row.sent for row in agent.rows):,}
all requests  {whole:,} tokens of input without, {sent:,} with, hidden rounds included
same prefix   {kept:.0%} of the input repeats how the request before began, so a prompt cache has it
nothing lost  {len(lost)} results were moved, and {stored}
files         {folder}/store, kept for you; delete them when you like
              {sys.executable} -m proxy store ls --store {folder}/store
your agent    {sys.executable} -m proxy run -- claude

""")
    sys.stdout.write("".join(f"FAILED: {fault}\n" for fault in wrong))
    return wrong
