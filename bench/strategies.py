"""What users could do instead of running the proxy: other strategies (`bench.replay.Strategy`) to
send a run."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from bench.caches import Segment
from bench.replay import (
    SUMMARY,
    SUMMARY_OUTPUT,
    TASK,
    Call,
    Kind,
    Recorded,
    Strategy,
    prompt,
    whole,
)
from proxy.plan.plan import Role
from proxy.policy import Offload

PLACEHOLDER = 20
"""Tokens of the message that replaces an omitted result, its frame included."""


def window(results: int) -> Strategy:
    """Send the last `results` tool results whole and a placeholder for each older one.

    SWE-agent's history processor `last_n_observations` does this (its paper uses five), and so do
    many later agents.
    """

    def calls(run: Recorded) -> Iterator[Call]:
        tools = [index for index, item in enumerate(run.items) if item.role is Role.TOOL]
        for point in run.points:
            seen = [index for index in tools if index < point]
            old = set(seen[:-results])
            messages = [
                _elided(run, index) if index in old else _whole(run, index)
                for index in range(point)
            ]
            yield Call(prompt(run, messages))

    return calls


def redeciding(offload: Offload) -> Strategy:
    """`/context_offload` in auto mode before each request, on the client's whole history, whose
    result it never adopts.

    Large old results are compacted. If that leaves too much, all but the recent messages become a
    summary, anew each time. The summary's prompt is the history followed by the task, so it has a
    cached prefix too.
    """
    return lambda run: _Redeciding(run, offload).calls()


class _Redeciding:
    def __init__(self, run: Recorded, offload: Offload) -> None:
        self._run = run
        self._offload = offload

    def calls(self) -> Iterator[Call]:
        for point in self._run.points:
            compacted = list(self._compacted(point))
            recent = self._recent(point, 2)
            if self._too_much(point, compacted, recent):
                yield Call(
                    prompt(self._run, self._summary_call(recent)),
                    output=SUMMARY_OUTPUT,
                    kind=Kind.SUMMARY,
                )
                yield Call(prompt(self._run, self._compressed(point, recent)))
            else:
                yield Call(prompt(self._run, compacted))

    def _compacted(self, point: int) -> Iterator[Segment]:
        items = self._run.items
        offload = self._offload
        above = sum(item.tokens for item in items[:point]) > offload.max_total_tokens
        recent = self._recent(point, 1)
        for index in range(point):
            item = items[index]
            large = item.role is Role.TOOL and item.tokens > offload.max_tool_message_tokens
            if above and large and index < recent:
                yield (index, "brief"), item.preview, self._run.blocks[index]
            else:
                yield _whole(self._run, index)

    def _too_much(self, point: int, compacted: list[Segment], recent: int) -> bool:
        items = self._run.items
        offload = self._offload
        before = sum(item.tokens for item in items[:point])
        after = sum(size for _, size, _ in compacted)
        old = sum(
            compacted[index][1] for index in range(recent) if items[index].role is not Role.SYSTEM
        )
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
        """Where the recent messages begin; a step (a call and its results) is not split."""
        start = max(point - keep, 0)
        while start and self._run.items[start].role is Role.TOOL:
            start -= 1
        return start


def _whole(run: Recorded, index: int) -> Segment:
    return index, run.items[index].tokens, run.blocks[index]


def _elided(run: Recorded, index: int) -> Segment:
    key: Hashable = (index, "elided")
    return key, min(PLACEHOLDER, run.items[index].tokens), run.blocks[index]
