"""What users would do instead of the proxy, as ways to send a recorded run: `tests.bench.replay.Way`."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from proxy.core.plan import Role
from proxy.core.policy import Offload
from proxy.tokens import Tokens
from tests.bench.caches import Prompt, Segment
from tests.bench.replay import (
    SUMMARY,
    SUMMARY_OUTPUT,
    TASK,
    Call,
    Kind,
    Recorded,
    Way,
    content_blocks,
    measured,
    prompt,
    whole,
)
from tests.transcripts import Json

PLACEHOLDER = 20
"""Tokens of a message that says that its text was left out, its frame included."""


def window(results: int) -> Way:
    """The last `results` tool results are whole, older ones a placeholder.

    As SWE-agent's history processor `last_n_observations`, in its paper with five, and many agents after it.
    """

    def calls(run: Recorded) -> Iterator[Call]:
        tools = [index for index, item in enumerate(run.items) if item.role is Role.TOOL]
        for point in run.points:
            seen = [index for index in tools if index < point]
            old = set(seen[:-results])
            messages = [_elided(run, index) if index in old else _whole(run, index) for index in range(point)]
            yield Call(prompt(run, messages))

    return calls


PEERS = Path(__file__).parents[2] / ".peers"
"""Where `make bench-peers` installs them, each in an environment of its own."""


def missing(peers: Iterable[str] = ("headroom", "awecompress")) -> list[str]:
    """Those of them that are not installed."""
    return [peer for peer in peers if not _interpreter(peer).exists()]


@contextmanager
def headroom(tokens: Tokens) -> Iterator[Way]:
    """The library of headroom-ai, called by a client with its whole history before each request; offline."""
    settings = {"HEADROOM_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    with _library("headroom", settings) as ask:
        segment = _segments(tokens)

        def calls(run: Recorded) -> Iterator[Call]:
            for point in run.points:
                yield Call(prompt(run, map(segment, ask(run.messages[:point]))))

        yield calls


@contextmanager
def awecompress(tokens: Tokens) -> Iterator[Way]:
    """What awecompress makes of each request by its own plan and defaults, its summaries canned.

    A summary's call holds its own task and a transcript, so that nothing of it is cached.
    """
    with _library("awecompress", {}) as ask:
        segment = _segments(tokens)

        def calls(run: Recorded) -> Iterator[Call]:
            for point in run.points:
                answer = ask({"run": run.id, "messages": run.messages[:point]})
                if answer["transcript"]:
                    task = (("transcript", point), tokens.count(answer["transcript"], "gpt-4o"), 1)
                    yield Call(Prompt([task], head=0), output=SUMMARY, kind=Kind.SUMMARY)
                yield Call(prompt(run, map(segment, answer["messages"])))

        yield calls


def _segments(tokens: Tokens) -> Callable[[Json], Segment]:
    @cache
    def segment(raw: bytes) -> Segment:
        return raw, measured(raw, tokens).tokens, content_blocks(json.loads(raw))

    return lambda message: segment(json.dumps(message).encode())


@contextmanager
def _library(peer: str, settings: dict[str, str]) -> Iterator[Callable[[Any], Any]]:
    """What asks a peer's library, in a process of its own: JSON in, JSON out."""
    with TemporaryDirectory(prefix="offload-peer-") as home:
        command = [str(_interpreter(peer)), str(Path(__file__).with_name(f"{peer}_library.py"))]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        with subprocess.Popen(command, env={"HOME": home, **settings}, text=True, **pipes) as process:
            asked, answers = process.stdin, process.stdout
            assert asked and answers

            def ask(question: Any) -> Any:
                asked.write(json.dumps(question) + "\n")
                asked.flush()
                return json.loads(answers.readline())

            yield ask


def _interpreter(peer: str) -> Path:
    return PEERS / peer / "bin/python"


def redeciding(offload: Offload) -> Way:
    """`/context_offload` in auto mode on the client's whole history before each request, nothing of it adopted.

    What is large and old is compacted; where that leaves too much, all but the recent messages become a summary, anew
    each time. Its prompt is the history before the task, so that it has a cached prefix as well.
    """
    return lambda run: _Redeciding(run, offload).calls()


class _Redeciding:
    def __init__(self, run: Recorded, offload: Offload) -> None:
        self._run = run
        self._offload = offload

    def calls(self) -> Iterator[Call]:
        for point in self._run.points:
            compacted = list(self._compacted(point))
            recent = self._recent(point, self._offload.keep_for_compression())
            if self._too_much(point, compacted, recent):
                yield Call(prompt(self._run, self._summary_call(recent)), output=SUMMARY_OUTPUT, kind=Kind.SUMMARY)
                yield Call(prompt(self._run, self._compressed(point, recent)))
            else:
                yield Call(prompt(self._run, compacted))

    def _compacted(self, point: int) -> Iterator[Segment]:
        items, offload = self._run.items, self._offload
        above = sum(item.tokens for item in items[:point]) > offload.max_total_tokens
        recent = self._recent(point, offload.keep_for_compaction())
        for index in range(point):
            item = items[index]
            large = item.role is Role.TOOL and item.tokens > offload.max_tool_message_tokens
            if above and large and index < recent:
                yield (index, "brief"), item.preview, self._run.blocks[index]
            else:
                yield _whole(self._run, index)

    def _too_much(self, point: int, compacted: list[Segment], recent: int) -> bool:
        items, offload = self._run.items, self._offload
        before, after = sum(item.tokens for item in items[:point]), sum(size for _, size, _ in compacted)
        old = sum(compacted[index][1] for index in range(recent) if items[index].role is not Role.SYSTEM)
        return old > offload.max_total_tokens and after / before > offload.compact_ratio_threshold

    def _summary_call(self, recent: int) -> Iterator[Segment]:
        for index in range(recent):
            yield ("rendered", index), self._run.items[index].tokens, 0
        yield ("task", recent), TASK, 1

    def _compressed(self, point: int, recent: int) -> Iterator[Segment]:
        for index in range(recent):
            if self._run.items[index].role is Role.SYSTEM:
                yield _whole(self._run, index)
        yield ("snapshot", point), SUMMARY, 1
        yield from whole(self._run, range(recent, point))

    def _recent(self, point: int, keep: int) -> int:
        """Where the recent messages begin, whole steps."""
        start = max(point - keep, 0)
        while start and self._run.items[start].role is Role.TOOL:
            start -= 1
        return start


def _whole(run: Recorded, index: int) -> Segment:
    return index, run.items[index].tokens, run.blocks[index]


def _elided(run: Recorded, index: int) -> Segment:
    key: Hashable = (index, "elided")
    return key, min(PLACEHOLDER, run.items[index].tokens), run.blocks[index]
