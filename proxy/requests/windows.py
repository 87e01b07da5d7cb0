"""The context windows of upstreams, as far as this process knows them.

Upstreams show them by their lists of models and by the requests that they refuse. They are kept by
namespace, upstream and model: what one caller provokes changes no other caller's requests. Nothing
is shared with other processes. Each pays for what it learns with refused requests.

Some upstreams take a prompt that is too long, read only part of it, and say so nowhere but in their
count of it: Ollama (ollama/ollama#3839, #17889), and LM Studio by its overflow policy.
`PromptCounts` watches these counts.

Windows are in our tokens. Where upstream counts more of them than we do, it refuses a request that
fits its window by our count, and the smaller window that follows is what we take for it from then
on.
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
from collections.abc import Callable, Collection, Hashable
from contextlib import aclosing
from functools import partial
from typing import Any, Generic, TypeVar

import msgspec

from proxy.dialects.messages import MESSAGES
from proxy.errors import ProxyError, UpstreamBroken, UpstreamUnreachable
from proxy.lru import Lru
from proxy.policies.tenants import KEY_HEADERS, Tenant
from proxy.policy import Policy
from proxy.requests import relay
from proxy.telemetry import logs
from proxy.threads import NEW, Background, WorkPool
from proxy.upstream.client import UpstreamClient, UpstreamRequest
from proxy.upstream.headers import Headers, url_for
from proxy.upstream.models import Listed, listed_windows, window_of

log = logging.getLogger(__name__)

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

NAMESPACES = 10_000
LEARNED = 200
"""The most namespaces that are remembered, and the most that is learned of each. Clients may name
any model."""

LEAST = 1_024
"""The fewest tokens that are believed to be a window. No model that is used for chats takes
fewer."""

SHRINK = 0.8
"""The window to assume, as a share of the refused tokens, if upstream names no smaller one."""

AGREES = 0.25
"""The share by which upstream's count of a prompt may differ from ours if it has read all of it."""

CUTS = 3
"""The growing prompts in a row that must have been cut before that is believed."""

LIST_SECONDS = 5.0
LIST_AGAIN = 600.0
"""Seconds for one list of models, and until an upstream that did not answer is asked again."""
STARTING = 5.0
"""Seconds until one that could not be reached is asked again: it may be about to start."""

CREDENTIALS = 10_000
LISTED = 200_000
"""The most credentials whose lists are remembered, and the most models in them. Long public lists
name some 500."""


_UNPRINTED = re.compile(r"[^\w./:@-]", re.ASCII)
"""What no model's name has, so that nobody can write into a header."""


class PromptCounts(msgspec.Struct):
    """How much upstream has read of one caller's prompts for one model, by its own count. Tokens.

    A count that stays where it is while prompts grow may mean that they are cut, or that upstream
    leaves out what its cache held, as Ollama did until June 2026 (ollama/ollama#16428). The second
    kind counts what a prompt is longer than the one before, so it never shows a window.
    """

    counted: int = 0
    """The newest prompt, by our count."""
    read: int = 0
    """The same by upstream's."""
    most: int = 0
    """The most that upstream has read since the history last became shorter."""
    agreed: int = 0
    """The longest prompt of which it has read all."""
    cuts: int = 0
    """Prompts in a row, each longer than the last, of which it has read no more than that."""
    certain: bool = False
    """Whether nothing else than a cut explains any of them."""
    learned: int = 0
    """The window that these counts have taught; 0: none."""

    def follow(self, counted: int, read: int) -> None:
        """Take the counts of the next prompt, ours and upstream's."""
        grown = counted - self.counted
        self.counted = counted
        self.read = read
        agrees = abs(counted - read) <= AGREES * counted
        if agrees:
            self.agreed = max(self.agreed, counted)
        if agrees or grown <= 0 or read > self.most:
            self.most = read if grown <= 0 else max(read, self.most)
            self.cuts = 0
            self.certain = True
            return
        self.cuts += 1
        # Ollama leaves half of its window when it cuts (ollama/ollama#17427).
        explained = 2 * read < self.most or read <= (1 + AGREES) * grown
        self.certain = self.certain and not explained

    @property
    def stuck(self) -> bool:
        """Whether upstream's count no longer grows. One that is too small for a model is none."""
        return self.cuts >= CUTS and self.read >= LEAST

    @property
    def window(self) -> int | None:
        """The window that these counts show; None if they leave it open."""
        shown = self.stuck and self.certain and 0 < self.agreed < self.counted
        return self.most if shown else None


_Source = tuple[str, str]
"""An upstream, and whose credential it gets: that of a caller, named by the namespace, or a
tenant's, of which only Python's salted hash is kept."""


class PerNamespace(Generic[K, V]):
    """What was learned for each namespace. Nothing that one learns pushes out what another has."""

    def __init__(self) -> None:
        self._all: Lru[str, Lru[K, V]] = Lru(NAMESPACES)

    def of(self, namespace: str) -> Lru[K, V]:
        """Return what was learned for this namespace, to be read. Who has learned nothing takes no
        place."""
        return self._all.get(namespace) or Lru(LEARNED)

    def put(self, namespace: str, key: K, value: V) -> None:
        ours = self.of(namespace)
        ours.put(key, value)
        self._all.put(namespace, ours)


class Known:
    """What one process knows of its upstreams. `count` is called with what taught it a window, for
    each change."""

    def __init__(
        self,
        upstream: UpstreamClient,
        background: Background,
        reading: WorkPool,
        count: Callable[[str], None] = lambda lesson: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._upstream = upstream
        self._background = background
        self._reading = reading
        self._count = count
        self._clock = clock
        self._shown: PerNamespace[tuple[str, str], int] = PerNamespace()
        """By upstream and model, as the next one."""
        self._prompts: PerNamespace[tuple[str, str], PromptCounts] = PerNamespace()
        self._asked_until: Lru[_Source, float] = Lru(CREDENTIALS)
        self._listed: Lru[_Source, Listed] = Lru(LISTED)

    # -- windows --

    def window(self, namespace: str, policy: Policy, model: str) -> int | None:
        """Return the context window, None if it is not known.

        The policy's comes before that in the list of models. A smaller one that a refusal showed
        still counts.
        """
        upstream = policy.upstream
        listed = window_of(self._listed.get(_source(namespace, policy)) or {}, model)
        shown = self._shown.of(namespace).get((upstream.base_url, model))
        return min(
            (window for window in (upstream.context_window or listed, shown) if window),
            default=None,
        )

    def learned(self, namespaces: Collection[str]) -> list[tuple[str, dict[str, str | int]]]:
        """Return the windows that refusals have shown to these namespaces, for the dashboard."""
        return [
            (name, {"upstream": url, "model": model, "window": size})
            for name in sorted(namespaces)
            for (url, model), size in sorted(self._shown.of(name).items())
        ]

    def learn_window(
        self,
        namespace: str,
        policy: Policy,
        model: str,
        named: int | None,
        counted: int,
        *,
        measured: bool,
    ) -> int:
        """Learn from a request of `counted` tokens that was refused as too long, and return the
        window for which to plan it again.

        `named` is the window that upstream named, if it did. `measured` tells whether every part of
        the request could be counted; otherwise our count says little.

        A request that was known to be too long teaches nothing unless upstream names a smaller
        window. Otherwise a client that keeps asking for too much would shrink its window without
        end.
        """
        before = self.window(namespace, policy, model)
        if named is not None and (before is None or named < before):
            again = named
            believed = True
        elif before is not None and counted > before:
            return before
        else:
            again = max(int(SHRINK * counted), 1)
            believed = measured
        if believed and again >= LEAST:
            upstream = policy.upstream.base_url
            name = model[: logs.LONGEST]
            self._shown.put(namespace, (upstream, model), again)
            self._count("refused")
            logs.event(
                log,
                "context window",
                namespace=namespace,
                upstream=upstream,
                model=name,
                window=again,
            )
        return again

    def note_read(
        self, namespace: str, policy: Policy, model: str, counted: int, read: int
    ) -> None:
        """Learn from the tokens that upstream says it has `read` of a prompt of `counted`
        tokens."""
        place = policy.upstream.base_url, model
        prompts = self._prompts.of(namespace)
        counts = prompts.get(place) or PromptCounts()
        before = self.window(namespace, policy, model)
        counts.follow(counted, read)
        if 0 < counts.learned < read:  # somebody has given the model a larger context
            self._shown.of(namespace).discard(place)
            counts.learned = 0
        window = counts.window
        if window is not None and (before is None or window < before):
            counts.learned = window
            self._shown.put(namespace, place, window)
            self._count("cut")
        self._prompts.put(namespace, place, counts)
        if counts.stuck and counts.cuts == CUTS:
            logs.event(
                log,
                "upstream cuts prompts" if window else "upstream may cut prompts",
                logging.WARNING,
                namespace=namespace,
                upstream=place[0],
                model=model[: logs.LONGEST],
                prompt=counted,
                read=read,
                **({"window": window} if window else {}),
            )

    def remark(self, namespace: str, policy: Policy, model: str) -> str:
        """Return a sentence on an upstream that cuts prompts, or may do so; else nothing."""
        counts = self._prompts.of(namespace).get((policy.upstream.base_url, model))
        if counts is None:
            return ""
        name = _UNPRINTED.sub("?", model[: logs.LONGEST])
        if counts.learned:
            return (
                f"Upstream reads only {counts.learned:,} tokens of a prompt for {name}, and does not "
                "say so; that counts as its window."
            )
        if not counts.stuck:
            return ""
        return (
            f"Upstream counted {counts.read:,} tokens of a prompt of {counts.counted:,} for {name}: "
            "perhaps it cuts the prompt off. If so, give the model a larger context, or set "
            "`upstream.context_window`."
        )

    # -- lists of models --

    def list_models(self, tenant: Tenant, headers: Headers) -> None:
        """Fetch the list of models in the background, unless that was done or the policy needs
        none.

        `tenant` has the policy for the request's model, and `headers` are the request's.
        """
        if tenant.policy.upstream.context_window is not None:
            return
        source = _source(tenant.namespace, tenant.policy)
        if self._clock() < (self._asked_until.get(source) or 0.0):
            return
        fetch = partial(self._fetch, source, tenant, headers)
        if self._background.start(f"models of {source[0]} for {source[1]}", fetch):
            self._asked_until.put(source, self._clock() + LIST_AGAIN)

    async def _fetch(self, source: _Source, tenant: Tenant, headers: Headers) -> None:
        told: dict[str, Any] = {"upstream": source[0], "tenant": tenant.name}
        try:
            question = _question(tenant, headers)
            async with (
                asyncio.timeout(LIST_SECONDS),
                aclosing(await self._upstream.send(question)) as reply,
            ):
                # it may have a list for us later
                if reply.status >= 500 or reply.status in (408, 429):
                    raise UpstreamBroken(f"Upstream answered {reply.status}")
                body = await relay.body(reply) if reply.status == 200 else b""
        except (ProxyError, TimeoutError) as error:
            logs.event(log, "no list of models", reason=str(error) or "silence", **told)
            if isinstance(error, UpstreamUnreachable):
                self._asked_until.put(source, self._clock() + STARTING)
            return
        self._asked_until.put(source, math.inf)
        listed = await self._reading.run(
            tenant.namespace, partial(listed_windows, body), NEW * len(body)
        )
        windows = sum(window is not None for window in listed.values())
        self._listed.put(source, listed, len(listed) + 1)
        logs.event(log, "list of models", **told, models=len(listed), windows=windows)
        if windows:
            self._count("listed")


def _source(namespace: str, policy: Policy) -> _Source:
    upstream = policy.upstream
    if upstream.api_key is None:
        return upstream.base_url, namespace
    return upstream.base_url, f"tenant {policy.tenant}, key {hash(upstream.api_key):x}"


def _question(tenant: Tenant, headers: Headers) -> UpstreamRequest:
    """Return the request for the list, with the caller's or the tenant's credential. Anthropic's
    list has pages."""
    base_url = tenant.policy.upstream.base_url
    anthropic = MESSAGES.version_header in headers.names()
    own = tenant.credential(tenant.policy.upstream, anthropic=anthropic)
    kept = (
        (MESSAGES.version_header,) if own is not None else (*KEY_HEADERS, MESSAGES.version_header)
    )
    found = headers.only(kept) if own is None else Headers((own, *headers.only(kept)))
    path = b"/v1/models?limit=1000" if anthropic else b"/v1/models"
    return UpstreamRequest(
        method="GET",
        url=url_for(base_url, path, anthropic=anthropic),
        headers=Headers((*found, (b"accept", b"application/json"))),
        content=b"",
        connect_timeout=LIST_SECONDS,
        first_byte_timeout=LIST_SECONDS,
        idle_timeout=LIST_SECONDS,
    )
