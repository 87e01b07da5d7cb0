"""How many files of ours a request visits in a warm process: `python -m bench.visited`.

A file is visited if one of its functions runs, in any thread, until the outcome of the request is
recorded. *Moves* are calls from one file into another. The policy is the default one, with a
ceiling of 3,000 tokens.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import httpx

import proxy
from tests.fake_upstream import Recorded, Reply, StrictUpstream, calls, text
from tests.serving import Proxy, served

OURS = str(Path(proxy.__file__).parent) + "/"

PATH = re.compile(r"/context_store/[\w.-]+txt")

TOOL = {
    "type": "function",
    "function": {"name": "search", "parameters": {"type": "object", "properties": {}}},
}

SETTLED = 0.1
"""Seconds after a reply in which its records and its outcome are written."""

RUNS = 4
"""The one with the fewest files counts: what runs by the clock, such as looking for changed
policies, is in few."""


class Visits:
    """Notes the files of every call in threads that start after it."""

    def __init__(self) -> None:
        self.files: dict[str, int] = {}
        self.moves = 0
        self._noting = False
        self._last = ""

    def install(self) -> None:
        threading.setprofile(self._note)

    def of(self, work: Any) -> tuple[dict[str, int], int]:
        """Return how often each file was called during this work, and the moves between them."""
        self.files = {}
        self.moves = 0
        self._last = ""
        self._noting = True
        try:
            work()
            time.sleep(SETTLED)
        finally:
            self._noting = False
        return self.files, self.moves

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if not self._noting or event != "call":
            return
        name = frame.f_code.co_filename
        if name.startswith(OURS):
            self.files[name] = self.files.get(name, 0) + 1
            self.moves += name != self._last
            self._last = name


def answer(request: Recorded) -> Reply:
    """Read one moved result back, if the user asks for that."""
    moved = PATH.search(str(request.messages))
    if request.messages[-1]["content"] == "Read it." and moved:
        return calls(("read_file", {"path": moved[0]}))
    return text("Yes.")


def history(steps: int, last: str) -> list[Any]:
    messages: list[Any] = [{"role": "user", "content": "Find out what it is."}]
    for number in range(steps):
        call = {
            "id": f"c{number}",
            "type": "function",
            "function": {"name": "search", "arguments": "{}"},
        }
        messages += [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {
                "role": "tool",
                "tool_call_id": f"c{number}",
                "content": f"{number} " + "one word after the other " * 200,
            },
        ]
    return [*messages, {"role": "assistant", "content": "Well."}, {"role": "user", "content": last}]


REQUESTS: dict[str, dict[str, Any]] = {
    "hi, passed through": {"messages": [{"role": "user", "content": "hi"}]},
    "an offloaded turn": {"messages": history(12, "Go on."), "tools": [TOOL]},
    "an offloaded turn that reads back": {"messages": history(12, "Read it."), "tools": [TOOL]},
}


def ask(one: Proxy, body: dict[str, Any], key: str) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    reply = httpx.post(
        f"{one.url}/chat/completions", json={"model": "gpt-4o", **body}, headers=headers, timeout=30
    )
    assert reply.status_code == 200, reply.text
    return reply


def counts() -> dict[str, tuple[dict[str, int], int]]:
    """Return the visits of each kind of request, by file, and the moves between files."""
    found = {}
    visits = Visits()
    with StrictUpstream() as up:
        up.respond(answer)
        policy = {
            "upstream": {"base_url": up.url},
            "offload": {"mode": "compact", "max_total_tokens": 3_000},
        }
        visits.install()
        try:
            with served({"default": policy}) as one:
                for body in REQUESTS.values():  # warm
                    for _ in range(2):
                        ask(one, body, "k")
                time.sleep(SETTLED)
                for name, body in REQUESTS.items():
                    runs = [visits.of(lambda body=body: ask(one, body, "k")) for _ in range(RUNS)]
                    found[name] = min(runs, key=lambda run: len(run[0]))
        finally:
            threading.setprofile(None)  # type: ignore[arg-type]
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.visited", description=(__doc__ or "").partition(":")[0]
    )
    parser.add_argument("--files", action="store_true", help="name them, with the number of calls")
    options = parser.parse_args(arguments)
    print("| request | files of ours | moves between them |\n|---|---|---|")
    found = counts()
    for name, (files, moves) in found.items():
        print(f"| {name} | {len(files)} | {moves:,} |")
    if options.files:
        short = {
            name: {path.removeprefix(OURS): times for path, times in files.items()}
            for name, (files, _) in found.items()
        }
        print(json.dumps(short, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
