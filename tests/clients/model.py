"""A scripted model that reads logs with its client's tool, and follows the proxy's references.

It decides only by the request that it gets: by the messages and tools in it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fake_upstream import Call, Message, Pieces, Recorded, calls, error, mixed, text

LOGS = 6
"""Files to read. Each is near the tests' `max_total_tokens`; together they are far above it."""
REFERENCE = re.compile(r"\(detailed result is stored in (/context_store/[\w.-]+)")
FACT = re.compile(r"the code word is (\w+-\d+)")

Json = dict[str, Any]


def log(number: int, fact: str) -> str:
    """About 1,800 tokens in 99 lines; `fact` is the middle of log 0."""
    lines = [
        f"{number}:{at:03} the quick worker {at * 37 % 101} moved {at * 53 % 997} crates to bay {at % 7}"
        for at in range(99)
    ]
    if number == 0:
        lines[50] += f"; {fact}"
    return "\n".join(lines) + "\n"


@dataclass
class Reader:
    """Reads every log, greps the first reference, opens it together with its last read, and reports the code word.

    So a run has a round of the proxy's tools alone, a turn that mixes them with the client's, and later requests that
    must carry the answers of both: the model asks again for a text that it cannot see.
    """

    tool: str
    """The client's tool that reads a file."""
    arguments: Callable[[Path], Json]
    """File → the arguments of the call that reads it."""
    workspace: Path
    finish: Callable[[str], Message] = text
    said: list[Message] = field(default_factory=list)

    def __call__(self, request: Recorded) -> Message | Pieces:
        if not request.is_chat:
            return error(404)  # the proxy asks for the list of models
        if not request.json.get("tools"):
            return text("A title.")
        self.said.append(self._next(request))
        return self.said[-1]

    def _next(self, request: Recorded) -> Message:
        made = [name for name, _ in called(request.messages)]
        reads = made.count(self.tool)
        reference = REFERENCE.search("\n".join(results(request.messages)))
        grep, read_file = ours(request.tool_names)
        if reference and grep not in made:
            return calls((grep, {"pattern": "code word is", "path": reference[1]}))
        if reads < LOGS:
            read: Call = (self.tool, self.arguments(self.workspace / f"part{reads}.log"))
            if reference and reads == LOGS - 1:
                return mixed("Both at once.", (read_file, {"path": reference[1], "limit": 3}), read)
            return calls(read)
        found = FACT.search("\n".join(results(request.messages)))
        return self.finish(f"The code word was {found[1]}." if found else "I never saw it.")

    def calls_of(self, name: str) -> int:
        return sum(call[0] == name for message in self.said for call in message.calls)


def ours(tool_names: list[str]) -> tuple[str, str]:
    """The names of the proxy's tools in a request with these tools."""
    prefix = "offload_" if "offload_grep" in tool_names else ""
    return f"{prefix}grep", f"{prefix}read_file"


def called(messages: list[Json]) -> list[tuple[str, str]]:
    """Name and id of every call in a history."""
    made = [call for message in messages for call in message.get("tool_calls") or ()]
    return [(call["function"]["name"], call["id"]) for call in made]


def results(messages: list[Json], ids: set[str] | None = None) -> list[str]:
    """The texts of the tool results in a history; those that answer `ids`, if given."""
    answers = [message for message in messages if message["role"] == "tool"]
    return [_text(answer["content"]) for answer in answers if ids is None or answer["tool_call_id"] in ids]


def _text(content: str | list[Json]) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)
