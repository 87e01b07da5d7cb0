"""A scripted model that works for agents: it reads logs, answers questions, and asks for what it
cannot see any more.

It decides by the request that it gets, and by which logs it has seen in earlier ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.clients.apis import Asked
from tests.fake_upstream import Call, Message, calls, mixed, text

LOGS = 6
"""Files to read. Each is near the tests' `max_total_tokens`; together they are far above it."""
REFERENCE = re.compile(r"\(detailed result is stored in (/context_store/[\w.-]+)")
CODE, KEY, NEVER = "heliotrope-7291", "obsidian-4416", "never write to /etc/quarry"
FACTS = {0: f"the code word is {CODE}", 1: f"the bay key is {KEY}"}
SNAPSHOT = "<state_snapshot>"
SUMMARY = f"<scratchpad>so</scratchpad>{SNAPSHOT}<progress>Several logs were read.</progress></state_snapshot>"
WORD, BAY = re.compile(r"code word is (\w+-\d+)"), re.compile(r"bay key is (\w+-\d+)")
READY = "Ready."
MOST = 40
"""Replies of a run; it needs about twenty."""

FIRST = f"[{{model}}] Read the logs 0 to {LOGS // 2 - 1}, one after the other."
RULE = f"A rule for all that follows: {NEVER}. Now read the logs {LOGS // 2} to {LOGS - 1}."
QUESTION = "Tell me the word and the key that the logs name, and where you must never write."


def prompts(model: str) -> list[str]:
    """What the user says, one after the other: the rule in the middle. gptme would insert files
    that it names."""
    return [FIRST.format(model=model), RULE, QUESTION]


def write_logs(folder: Path) -> None:
    """Each has about 1,800 tokens in 99 lines, with its fact in the middle."""
    for number in range(LOGS):
        lines = [
            f"{number}:{at:03} the quick worker {at * 37 % 101} moved {at * 53 % 997} crates to bay {at % 7}"
            for at in range(99)
        ]
        lines[50] += f"; {FACTS[number]}" if number in FACTS else ""
        (folder / f"part{number}.log").write_text("\n".join(lines) + "\n")


@dataclass
class Worker:
    """Greps the first log's fact when it has been moved, and uses the proxy's `read_file` beside
    two of the client's calls. At the end it greps what it cannot see, and reports what it sees."""

    read: Callable[[Path], Call | str]
    """A file → the client's call that reads it, or text that its client takes for one."""
    finish: Callable[[str], Message] = text
    folder: Path = Path()
    seen: set[int] = field(default_factory=set)
    looked: bool = False
    said: list[Message] = field(default_factory=list)

    def __call__(self, asked: Asked) -> Message:
        if is_summary(asked):
            return text(SUMMARY)
        if not is_work(asked):
            return text("A title.")
        assert len(self.said) < MOST, f"the model goes round in circles: {self.said[-1]}"
        self.said.append(self._next(asked.tools, asked.shown))
        return self.said[-1]

    def greps(self) -> list[str]:
        made = [call for message in self.said for call in message.calls if call[0].endswith("grep")]
        return [call[1]["pattern"] for call in made if "pattern" in call[1]]

    def _next(self, tools: list[str], words: str) -> Message:
        self.seen |= {number for number in range(LOGS) if f"{number}:000 the" in words}
        reference, asked, limit = (
            REFERENCE.search(words),
            QUESTION in words,
            LOGS if NEVER in words else LOGS // 2,
        )
        grep, read_file = ours(tools)
        if (
            (reference or SNAPSHOT in words)
            and not WORD.search(words)
            and (asked or not self.looked)
        ):
            self.looked = True
            return calls((grep, {"pattern": "code word is"}))
        unread = [number for number in range(limit) if number not in self.seen]
        if not unread:
            return self._answer(words, grep) if asked else self.finish(READY)
        reads = [self.read(self.folder / f"part{number}.log") for number in unread[:2]]
        made = [read for read in reads if not isinstance(read, str)]
        if len(made) < len(reads):
            return text(str(reads[0]))
        if reference and len(unread) == LOGS // 2:
            return mixed("All at once.", (read_file, {"path": reference[1], "limit": 3}), *made)
        return calls(made[0])

    def _answer(self, words: str, grep: str) -> Message:
        word, key = WORD.search(words), BAY.search(words)
        if not key:
            return calls((grep, {"pattern": "bay key is"}))
        return self.finish(
            f"{word and word[1]}, {key[1]}, {NEVER if NEVER in words else 'no rule'}"
        )


def ours(tool_names: list[str]) -> tuple[str, str]:
    """The names of the proxy's tools in a request with these tools."""
    prefix = "offload_" if "offload_grep" in tool_names else ""
    return f"{prefix}grep", f"{prefix}read_file"


def is_summary(asked: Asked) -> bool:
    return "private scratchpad" in asked.texts[-1]


def is_work(asked: Asked) -> bool:
    return "Read the logs 0" in asked.shown and not is_summary(asked)
