"""Answers a model's calls of our tools from the files of its own request."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from proxy import regex
from proxy.dialects.files import Files
from proxy.plan.message import ToolCall
from proxy.policy import ArchiveUse
from proxy.regex import Budget, sliced
from proxy.requests.archive import Archive
from proxy.telemetry.outcome import ToolUse
from proxy.tools import answer as tools

if TYPE_CHECKING:
    from proxy.requests.cache import MessageCache
    from proxy.requests.planned import Rendered
    from proxy.requests.prepared import Prepared
    from proxy.requests.records import Records
    from proxy.stores.guarded import Guarded
    from proxy.threads import WorkPool

T = TypeVar("T")


class OurTools:
    """Answers the calls of one request. It adds them to `prepared.uses`, as the outcome reports them."""

    def __init__(
        self,
        threads: WorkPool,
        reader: MessageCache,
        store: Guarded,
        prepared: Prepared,
        rendered: Rendered,
        records: Records,
    ) -> None:
        self._threads = threads
        self._store = store
        self._prepared = prepared
        self._rendered = rendered
        self._planned = planned = rendered.planned
        self._records = records
        self._names = planned.names
        self._store_dir = planned.policy.offload.store_dir
        self._count = reader.counter(planned.request.model)
        self._searching = Budget(planned.policy.tools.max_search_seconds)
        self._files: Files | None = None
        self._kept: Mapping[str, tuple[str, bytes]] | None = None  # what the caller's last conversations moved
        self._answered: set[tuple[str | bytes, ...]] = set()  # what each call asked for that got a whole answer

    async def resolve(self, calls: Sequence[ToolCall]) -> list[tools.ToolAnswer]:
        """Answer the calls in order. Each call gets an equal share of the tokens that the turn may still read."""
        if self._files is None:  # a long history has thousands
            self._files = await self._run(self._rendered.files)
        limits = self._planned.policy.tools
        first, rest = calls[: limits.max_calls], calls[limits.max_calls :]
        left = max(0, self._budget())
        share, answers, uses = min(limits.max_answer_tokens, left // len(first)), [], self._prepared.uses
        for call in first:
            answers.append(await self._answer(call, self._files, min(share, left), left))
            left -= answers[-1].tokens
        for call, answer in zip(first, answers, strict=True):
            uses.append(ToolUse(self._tool(call), answer.result, answer.tokens))
        if rest:
            too_many = tools.too_many(limits.max_calls, self._count)
            for tool, number in Counter(map(self._tool, rest)).items():
                uses.append(ToolUse(tool, too_many.result, number * too_many.tokens, number))
            answers += [too_many] * len(rest)
        return answers

    def _budget(self) -> int:
        read, room = sum(use.tokens for use in self._prepared.uses), self._planned.room
        left = self._planned.policy.tools.max_retrieved_tokens - read
        return left if room.window is None else min(left, room.left(self._rendered.tokens + read))

    async def _answer(self, call: ToolCall, files: Files, budget: int, left: int) -> tools.ToolAnswer:
        """Answer a call. The same call again, however it names the file, gets a line that points to the first answer,
        so that no model goes in circles."""
        tool, names = self._tool(call), self._names
        asked = await self._run(partial(tools.meaning, tool, call.arguments, files.index, names))
        if asked in self._answered:
            return tools.repeated(self._count)
        recalled = await self._recalled(call, files)
        if recalled is None:
            return tools.gone(tools.asks_for(tool, call.arguments, names), self._count)
        if not recalled and self._planned.quoted:
            return tools.elsewhere(sorted(self._planned.quoted), self._store_dir, self._count)
        answer = await self._found(call, recalled, budget, left)
        if answer.result in ("ok", "empty"):
            self._answered.add(asked)
        return answer

    async def _recalled(self, call: ToolCall, files: Files) -> Files | None:
        """Return the files that a call is about; None if what it names is not kept.

        These are this request's. A call that names a file which the request quotes in full and does not have is about
        one of the caller's earlier conversations, and a search without a path may go through the last of them. Callers
        without a key are many, so they have none.
        """
        tool, place = self._tool(call), self._store_dir
        path = tools.asks_for(tool, call.arguments, self._names)
        kept = await self._kept_of_others()
        if kept and tool == "grep" and path.strip("/ ") in ("", place.strip("/")):
            return files.beside(kept, place)
        earlier = [name for name in (*self._planned.quoted, *kept) if f"{place}/{name}" not in files]
        name = next((name for name in sorted(earlier) if name.removesuffix(".txt") in path), None)
        if name is None:
            return files
        text = None if self._prepared.tenant.anonymous else await self._records.original(name)
        if text is None:
            return None
        return files.recalled(f"{place}/{name}", text, place)

    async def _kept_of_others(self) -> Mapping[str, tuple[str, bytes]]:
        """Return what the caller's last conversations moved, if the policy lets the model search it.

        An identity for which no listed key vouches opens only what the request names.
        """
        tenant, namespace = self._prepared.tenant, self._records.namespace
        if self._planned.policy.tools.archive is not ArchiveUse.SEARCH or tenant.anonymous:
            return {}
        if tenant.namespace != namespace:
            return {}
        if self._kept is None:
            self._kept = await Archive(self._store.visit(), namespace, self._run).last()
        return self._kept

    async def _found(self, call: ToolCall, files: Files, budget: int, left: int) -> tools.ToolAnswer:
        tool, searching = self._tool(call), self._searching
        material = tools.Material(
            files,
            files.index,
            self._store_dir,
            budget,
            self._count,
            lambda pattern: regex.compile(pattern, searching),
            self._names,
            max(left, 0),
            files.media,
        )
        steps = tools.answering(tool, call.arguments, material)
        time = searching if tool == "grep" else Budget(math.inf)
        return await sliced(self._threads, self._prepared.tenant.namespace, steps, time)

    def _tool(self, call: ToolCall) -> tools.Tool:
        """Return which of our two tools the call is for."""
        return "grep" if call.name == self._names[0] else "read_file"

    async def _run(self, work: Callable[[], T]) -> T:
        return await self._threads.run(self._prepared.tenant.namespace, work, begun=True)
