"""What this process knows of its upstreams: context windows, how they count tokens, and which additions they refuse.

Upstreams show it by their lists of models, and by the requests that they refuse and take. Windows, factors and
refusals are kept by namespace, upstream and model: what one caller provokes changes no other caller's requests.
Nothing is shared with other processes. Each pays for what it learns with a refused request.

An upstream counts more tokens than we do where its vocabulary is not one of OpenAI's: Qwen's takes 1.2 times as many
for German. So the window is divided by a *factor*, which is 1 where we count exactly. As a new factor can change the
plan, and so break the prompt cache, factors come from a coarse grid, rise only after a large prompt, and fall only
after many. Thresholds of the policy are in our tokens and do not depend on it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

import msgspec

from proxy.dialects.messages import MESSAGES
from proxy.errors import ProxyError, UpstreamBroken
from proxy.lru import Lru
from proxy.plan.plan import WINDOW_MARGIN
from proxy.plan.turn import Addition
from proxy.policies.tenants import KEY_HEADERS, Tenant
from proxy.policy import Policy
from proxy.telemetry import logs
from proxy.upstream import models
from proxy.upstream.client import UpstreamRequest, decoded
from proxy.upstream.headers import Headers, url_for

if TYPE_CHECKING:
    from proxy.threads import Background, WorkPool
    from proxy.upstream.client import UpstreamClient

log = logging.getLogger(__name__)

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

NAMESPACES, MODELS, REFUSALS = 10_000, 100, 200
"""The most namespaces that are remembered, and the most models and refusals of each. Clients may name any model."""

LEAST = 1_024
"""The fewest tokens that are believed to be a window. No model that is used for chats takes fewer."""

TELLING = LEAST // 4
"""Prompts that we count as smaller teach nothing: upstream, too, counts them as smaller than any window."""

SHRINK = 0.8
"""The window to assume, as a share of the refused tokens, if upstream names no smaller one."""

STEP, MOST = 0.1, 3.0
"""The grid of factors, and the largest: the highest ratio that was measured for a kind of text is 2.3."""

SHARE = 0.25
"""The share of the window that a prompt must fill to teach a factor. In small ones, chat templates weigh as much."""

FALLS_AFTER = 8
"""Prompts in a row that allow a smaller factor, before it falls."""

ENOUGH, FORGOTTEN_AFTER = 2, 600.0
"""The requests that must be refused with an addition and taken without it before it is left out, and for how many
seconds it then is. The first one may have been refused by chance."""

LIST_SECONDS, LIST_AGAIN = 5.0, 600.0
"""Seconds for one list of models, and until an upstream that did not answer is asked again."""

CREDENTIALS, LISTED = 10_000, 200_000
"""The most credentials whose lists are remembered, and the most windows in them. Long public lists name some 500."""

INLINE_BYTES = 32 << 10
"""The most bytes of a list that are parsed on the event loop."""


class Refusable(msgspec.Struct, frozen=True):
    """What upstream may refuse: an addition to one namespace's requests of one shape."""

    namespace: str
    upstream: str
    model: str
    addition: Addition
    shape: str


class Window(msgspec.Struct, frozen=True):
    """A window that an upstream has shown by refusing a request."""

    upstream: str
    model: str
    window: int


class _PerNamespace(Generic[K, V]):
    """A bounded mapping in which no namespace can push out another's keys."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._namespaces: Lru[str, dict[K, V]] = Lru(NAMESPACES)

    def of(self, namespace: str) -> Mapping[K, V]:
        return self._namespaces.get(namespace) or {}

    def put(self, namespace: str, key: K, value: V) -> None:
        known = self._namespaces.get(namespace)
        if known is None:
            self._namespaces.put(namespace, known := {})
        known[key] = value
        if len(known) > self._limit:
            del known[next(iter(known))]

    def discard(self, namespace: str, key: K) -> None:
        if known := self._namespaces.get(namespace):
            known.pop(key, None)


class _Model(msgspec.Struct):
    """What one namespace's upstream has shown of a model.

    A window that upstream named is compared with what upstream counts, and one that we guessed with what we count:
    the two may differ by a third.
    """

    window: int = 0
    """0 if no refusal has shown one."""
    guessed: bool = False
    taken: int = 0
    counted: int = 0
    """The largest prompts that were taken, as upstream and as we counted them."""
    factor: float = 1.0
    smaller: tuple[float, ...] = ()
    """The factors that the latest prompts in a row allow, all of them below `factor`."""


class _Refused(msgspec.Struct):
    times: int = 0
    until: float = 0.0


class Known:
    """What one process knows of its upstreams. `count` is called with what taught it a window, for each change."""

    def __init__(
        self,
        upstream: UpstreamClient,
        background: Background,
        reading: WorkPool,
        count: Callable[[str], None] = lambda lesson: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lists = _Lists(upstream, background, reading, partial(count, "listed"), clock)
        self._count = count
        self._clock = clock
        self._models: _PerNamespace[tuple[str, str], _Model] = _PerNamespace(MODELS)
        self._refusals: _PerNamespace[Refusable, _Refused] = _PerNamespace(REFUSALS)

    def ask(self, tenant: Tenant, headers: Headers) -> None:
        """Fetch the list of models in the background, unless that was done or the policy needs none.

        `tenant` has the policy for the request's model, and `headers` are the request's.
        """
        self._lists.ask(tenant, headers)

    # -- windows --

    def window(self, namespace: str, policy: Policy, model: str) -> int | None:
        """Return the context window in upstream's tokens, None if it is not known.

        The policy's comes before that in the list of models. A smaller one that a refusal showed still counts.
        """
        known = self._model(namespace, policy, model)
        given = policy.upstream.context_window
        if given is None:
            given = self._lists.window(namespace, policy, model)
            if given is not None and given < max(LEAST, known.taken):
                given = None
        return min((window for window in (given, known.window) if window), default=None)

    def factor(self, namespace: str, policy: Policy, model: str) -> float:
        """Return how many tokens upstream counts for one of ours, beyond the margin of every window; 1 or more."""
        return self._model(namespace, policy, model).factor

    def shown(self, namespace: str) -> Iterator[Window]:
        """Yield the windows that refusals have shown to this namespace."""
        for (upstream, model), known in self._models.of(namespace).items():
            if known.window:
                yield Window(upstream, model, known.window)

    def too_long(
        self, namespace: str, policy: Policy, model: str, named: int | None, counted: int, *, measured: bool
    ) -> int:
        """Learn from a request of `counted` tokens that was refused as too long, and return the window for which to
        plan it again.

        `named` is the window that upstream named, if it did. `measured` tells whether every part of the request could
        be counted; otherwise our count says little.

        A request that was known to be too long teaches nothing unless upstream names a smaller window. Otherwise a
        client that keeps asking for too much would shrink its window without end.
        """
        known, before = self._model(namespace, policy, model), self.window(namespace, policy, model)
        if named is not None and (before is None or named < before):
            if named >= max(LEAST, known.taken):
                self._learn(namespace, policy, model, named, guessed=False)
            return named
        if before is not None and counted > before:
            return before
        guess = int(SHRINK * counted)
        fitting = max(guess, known.counted)  # so much did fit
        if measured and LEAST <= fitting < counted:
            self._learn(namespace, policy, model, fitting, guessed=True)
            return fitting
        return max(guess, 1)

    def took(
        self, namespace: str, policy: Policy, model: str, tokens: int, counted: int, ours: int | None = None
    ) -> None:
        """Learn that upstream took a prompt of `tokens`, as it counted them, whose messages have `counted` in what we
        take for its tokens. `ours` is what we count for all of the prompt, None if a part could not be counted.
        """
        if max(tokens, counted) < LEAST:
            return  # no window is so small
        known = self._model(namespace, policy, model)
        known.taken, known.counted = max(known.taken, tokens), max(known.counted, counted)
        self._models.put(namespace, (policy.upstream.base_url, model), known)
        if 0 < known.window < (known.counted if known.guessed else known.taken):
            self._learn(namespace, policy, model, 0, guessed=False)
        window = self.window(namespace, policy, model)
        if ours and window is not None and tokens >= SHARE * window:
            _calibrate(known, tokens / ours)

    def _learn(self, namespace: str, policy: Policy, model: str, window: int, *, guessed: bool) -> None:
        """Remember a window, or with 0, that upstream took a larger prompt."""
        known, upstream = self._model(namespace, policy, model), policy.upstream.base_url
        known.window, known.guessed = window, guessed
        self._models.put(namespace, (upstream, model), known)
        lesson = "refused" if window else "superseded"
        self._count(lesson)
        logs.event(
            log,
            "context window",
            lesson=lesson,
            namespace=namespace,
            upstream=upstream,
            model=model[: logs.LONGEST],
            window=window,
            accepted=known.taken,
        )

    def _model(self, namespace: str, policy: Policy, model: str) -> _Model:
        return self._models.of(namespace).get((policy.upstream.base_url, model)) or _Model()

    # -- refused additions --

    def has_refusals(self, namespace: str) -> bool:
        """Whether upstream has refused anything of this namespace's requests."""
        return bool(self._refusals.of(namespace))

    def refuses(self, what: Refusable) -> bool:
        """Whether to leave the addition out. Once that has lasted long enough, the next requests try again."""
        known = self._refusals.of(what.namespace).get(what)
        return known is not None and known.times >= ENOUGH and self._clock() < known.until

    def refused(self, what: Refusable) -> None:
        """Note that a request was refused with the addition and taken without it."""
        known = self._refusals.of(what.namespace).get(what) or _Refused()
        known.times += 1
        known.until = self._clock() + FORGOTTEN_AFTER
        self._refusals.put(what.namespace, what, known)
        if known.times >= ENOUGH:
            logs.event(
                log,
                "upstream refuses what we add",
                logging.WARNING,
                namespace=what.namespace,
                upstream=what.upstream,
                model=what.model[: logs.LONGEST],
                addition=what.addition.value,
                shape=what.shape,
                left_out_seconds=FORGOTTEN_AFTER,
            )

    def accepted(self, what: Refusable) -> None:
        """Note that a request with the addition was taken."""
        self._refusals.discard(what.namespace, what)


def _calibrate(known: _Model, ratio: float) -> None:
    """Let the factor follow a prompt for which upstream counted `ratio` times our tokens."""
    steps = math.ceil(round((ratio * (1 - WINDOW_MARGIN) - 1) / STEP, 6))
    needed = min(1 + max(steps, 0) * STEP, MOST)
    known.smaller = (*known.smaller, needed) if needed < known.factor else ()
    if needed > known.factor:
        known.factor = needed
    elif len(known.smaller) >= FALLS_AFTER:
        known.factor, known.smaller = max(known.smaller), ()


# -- lists of models ---------------------------------------------------------------------------------------------------

_Source = tuple[str, str]
"""An upstream, and whose credential it gets: that of a caller, named by the namespace, or a tenant's, of which only
Python's salted hash is kept."""


class _Lists:
    """The windows in upstreams' lists of models. A list is asked for once with each credential, in the background."""

    def __init__(
        self,
        upstream: UpstreamClient,
        background: Background,
        reading: WorkPool,
        learned: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self._upstream = upstream
        self._background = background
        self._reading = reading
        self._learned = learned
        self._clock = clock
        self._again: Lru[_Source, float] = Lru(CREDENTIALS)
        self._windows: Lru[_Source, Mapping[str, int]] = Lru(LISTED)

    def ask(self, tenant: Tenant, headers: Headers) -> None:
        upstream = tenant.policy.upstream
        if upstream.context_window is not None:
            return
        source = _source(tenant.namespace, tenant.policy)
        again = self._again.get(source)
        if again is not None and self._clock() < again:
            return
        fetch = partial(self._fetch, source, tenant, headers)
        if self._background.start(f"models of {source[0]} for {source[1]}", fetch):
            self._again.put(source, self._clock() + LIST_AGAIN)

    def window(self, namespace: str, policy: Policy, model: str) -> int | None:
        return (self._windows.get(_source(namespace, policy)) or {}).get(model)

    async def _fetch(self, source: _Source, tenant: Tenant, headers: Headers) -> None:
        try:
            async with asyncio.timeout(LIST_SECONDS):
                body = await self._body(tenant, headers)
        except (ProxyError, TimeoutError) as error:
            logs.event(log, "no list of models", upstream=source[0], tenant=tenant.name, reason=str(error) or "silence")
            return
        self._again.put(source, math.inf)
        read = partial(models.windows, body)
        listed = await self._reading.run(tenant.namespace, read) if len(body) > INLINE_BYTES else read()
        windows = {model: window for model, window in listed.items() if window is not None}
        self._windows.put(source, windows, len(windows) + 1)
        found = {"models": len(listed), "windows": len(windows)}
        logs.event(log, "list of models", upstream=source[0], tenant=tenant.name, **found)
        if windows:
            self._learned()

    async def _body(self, tenant: Tenant, headers: Headers) -> bytes:
        """Return the list's bytes, or none if upstream has no list for us. Raises ProxyError."""
        whole = bytearray()
        async with aclosing(await self._upstream.send(_question(tenant, headers))) as reply:
            if reply.status >= 500 or reply.status in (408, 429):  # it may have a list for us later
                raise UpstreamBroken(f"Upstream answered {reply.status}")
            if reply.status != 200:
                return b""
            async with aclosing(decoded(reply)) as chunks:
                async for chunk in chunks:
                    whole += chunk
                    if len(whole) > models.LARGEST:
                        raise UpstreamBroken(f"The list of models is larger than {models.LARGEST} bytes")
        return bytes(whole)


def _source(namespace: str, policy: Policy) -> _Source:
    upstream = policy.upstream
    if upstream.api_key is None:
        return upstream.base_url, namespace
    return upstream.base_url, f"tenant {policy.tenant}, key {hash(upstream.api_key):x}"


def _question(tenant: Tenant, headers: Headers) -> UpstreamRequest:
    """Return the request for the list, with the caller's or the tenant's credential. Anthropic's list has pages."""
    base_url, anthropic = tenant.policy.upstream.base_url, MESSAGES.owns(b"", headers.names())
    own = tenant.credential(tenant.policy.upstream, anthropic=anthropic)
    kept = (MESSAGES.version_header,) if own is not None else (*KEY_HEADERS, MESSAGES.version_header)
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
