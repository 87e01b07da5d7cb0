"""`replay --verify`: asks the model captured requests again, twice as they were sent and once as
planned, and says whether it does the same next, writes more, and costs less.

The requests go to the policy's upstream, with its key or the user's own, which the environment has.
Before anything is sent it says what that costs at most, and no request is begun that the budget may
not hold. Requests are drawn by their digests, so that the same captures give the same ones, and from
as many sessions as there are.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from bisect import insort
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from math import ceil
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from msgspec.structs import replace

from proxy.apps.replay.formats import ADDRESSED, ANTHROPIC_BATCH, HAR
from proxy.apps.replay.recordings import BODY, RecordedRequest
from proxy.apps.replay.tally import SessionKey, planned_by
from proxy.apps.report import card, document, element, tiles
from proxy.apps.verify.asking import (
    REPLY_TOKENS,
    Asker,
    Meter,
    ModelReply,
    Purse,
    as_observed,
    blamed,
    compared,
)
from proxy.apps.verify.pairs import NEEDED, figures, missing
from proxy.dialects import Dialect
from proxy.dialects.messages import MESSAGES
from proxy.errors import OffloadError, UserMistake
from proxy.plan.forecast import cost
from proxy.plan.prices import is_loopback
from proxy.policies.tenants import KEY_HEADERS, Tenant
from proxy.policy import Policy
from proxy.requests.cache import MessageCache
from proxy.requests.exchange import RAW, Account, Exchange
from proxy.requests.observing import foreseen
from proxy.requests.planned import OUR_TOOLS_TOKENS, Planned
from proxy.requests.prepared import Prepared
from proxy.requests.rounds import Services
from proxy.requests.versions import Refusal
from proxy.server.process import Process
from proxy.settings import Settings
from proxy.terminal import in_money, several

logger = logging.getLogger(__name__)

MOST = 300
"""Most requests that are asked again, and so kept in memory."""
AT_ONCE = 4
"""Requests that are asked again at the same time."""
TRIES = 3
LONGEST_PAUSE = 60.0
"""How often a request is asked that upstream does not take now, and most seconds between."""
SECONDS = 900.0
"""Seconds that the three replies to one request may take."""
IN_A_ROW = 5
"""So many requests that fail one after the other end it: the next ones would, too."""

WHOLE = frozenset((BODY, ADDRESSED, HAR, ANTHROPIC_BATCH))
"""The forms of records that have all that was sent."""
NOT_WHOLE = "a session's file lacks some of what was sent: give captures, or files of requests"
NAMESPACE = "replay"

_PATHS = {
    "chat": b"/v1/chat/completions",
    "responses": b"/v1/responses",
    "messages": b"/v1/messages",
}
_VERSION = b"2023-06-01"
_KEYS = {"messages": "ANTHROPIC_API_KEY"}
"""The environment's variable with the user's key for an API; OPENAI_API_KEY for the others."""


class Drawn(NamedTuple):
    """A request that may be asked again. Its three replies cost at `least` so much, if upstream's
    cache has all that it can have and nobody writes a word, and at `most` so much, in USD."""

    digest: bytes
    session: SessionKey
    recorded: RecordedRequest
    least: float
    most: float


@dataclass
class Draw:
    """The requests that a policy changes: of each session the first ones by their digests, the same
    number of each as far as it goes, and `MOST` in all."""

    policy: Policy
    read: int = 0
    changed: int = 0
    """Requests that can be asked again, whether or not they are kept."""
    sessions: dict[SessionKey, list[Drawn]] = field(default_factory=dict)
    left_out: Counter[str] = field(default_factory=Counter)
    unpriced: set[str] = field(default_factory=set)
    """The models whose price is not known."""

    async def add(self, recorded: RecordedRequest, reader: MessageCache) -> None:
        self.read += 1
        if recorded.source not in WHOLE or recorded.expanded:
            self.left_out[NOT_WHOLE] += 1
            return
        planned, why = await planned_by(self.policy, recorded, reader)
        reason = f"not planned: {why}" if planned is None else planned.unrepeatable
        if planned is not None and planned.plan.boundaries:
            reason = "its plan has a summary, and nobody has written it"
        if planned is None or reason:
            self.left_out[reason] += 1
            return
        if planned.policy.offload.input_price is None:
            self.unpriced.add(planned.request.model)
            self.left_out["the price of its model is not known"] += 1
            return
        self.changed += 1
        session = SessionKey.of(planned, recorded.caller)
        of_session = self.sessions.setdefault(session, [])
        digest = sha256(b"verify" + planned.chain[-1]).digest()
        if all(one.digest != digest for one in of_session):  # a client may have repeated it
            drawn = Drawn(digest, session, recorded, *prices(planned))
            insort(of_session, drawn, key=lambda one: one.digest)
        if sum(map(len, self.sessions.values())) > MOST:  # without the one that would come last
            max(self.sessions.values(), key=lambda ones: (len(ones), ones[-1].digest)).pop()

    def order(self) -> list[Drawn]:
        """Return the requests in the order in which they are asked: one of each session, then
        another one of each."""
        every = [
            (at, one.digest, one) for ones in self.sessions.values() for at, one in enumerate(ones)
        ]
        return [one for _, _, one in sorted(every, key=lambda each: each[:2])]


def prices(planned: Planned) -> tuple[float, float]:
    """Return what a request costs, asked twice as it is and once as planned, in USD: at least, and
    at most if its replies have no more than `REPLY_TOKENS` and nothing is read back."""
    offload = planned.policy.offload
    meter = Meter(Purse(), offload, planned.request.reply_tokens)
    forecast = foreseen(planned)
    whole = planned.tokens_before
    after = planned.before_history + forecast.tokens + (OUR_TOOLS_TOKENS if forecast.ours else 0)
    cached = cost(offload, whole, whole) * 2 + cost(offload, after, after)
    least = cached * (offload.input_price or 0.0) / 1_000_000
    return least, 2 * meter.most(whole) + meter.most(after)


# -- asking ----------------------------------------------------------------------------------------


def check(drawn: Sequence[Drawn], draw: Draw, budget: float | None) -> None:
    """Raise UserMistake if no figure can come of these requests within this budget."""
    unpriced = ", ".join(sorted(draw.unpriced))
    if len(drawn) < NEEDED:
        because = (
            f"; the price of {unpriced} is not known: give a --policy with `offload.input_price`"
            if unpriced
            else ""
        )
        raise UserMistake(
            f"--verify: {several(len(drawn), 'request')} of {draw.read:,} can be asked again, and a figure needs "
            f"{NEEDED}{because}{_listed(draw.left_out)}"
        )
    least = sum(one.least for one in drawn[:NEEDED])
    most = ceil(100 * sum(one.most for one in drawn[:NEEDED])) / 100
    if least > (budget or 0.0) or (budget is None and most):
        raise UserMistake(
            f"--verify: {NEEDED} requests, the fewest of which a figure is shown, cost at least {in_money(least)}: "
            f"give --budget {most:.2f}, which is nearly always enough. What turns out cheaper is not spent"
        )


def _listed(reasons: Counter[str]) -> str:
    return "".join(f"\n  {number:,} left out: {why}" for why, number in reasons.most_common())


@dataclass
class Proof:
    """Asks drawn requests again, and adds up what comes of it. `policy` and `environment` have the
    credentials."""

    policy: Policy
    environment: Mapping[str, str]
    purse: Purse
    sums: Counter[str] = field(default_factory=Counter)
    sessions: dict[SessionKey, Counter[str]] = field(default_factory=dict)
    """The sums of each session of which requests were asked."""
    failed: Counter[str] = field(default_factory=Counter)
    ended: str = ""
    """Why it ended before all drawn requests were asked."""
    _reserved: float = 0.0
    _in_a_row: int = 0
    """Failures since the last success."""

    @property
    def asked(self) -> int:
        return self.sums["asked"]

    def tenant(self, dialect: Dialect, model: str) -> Tenant:
        policy = self.policy.for_api(dialect.name).for_model(model).planning
        header = KEY_HEADERS[-1] if dialect is MESSAGES else KEY_HEADERS[0]
        return Tenant(policy, NAMESPACE, key_header=header)

    def client(self, dialect: Dialect, model: str, beta: str = "") -> Exchange:
        """Return a client that asks this model with the user's key, and wants `beta` beyond its
        API. Raises UserMistake if there is no key, and the upstream is not this machine."""
        tenant = self.tenant(dialect, model)
        upstream = tenant.policy.upstream
        headers = [(b"content-type", b"application/json")]
        if dialect.version_header:
            headers.append((dialect.version_header, _VERSION))
        if upstream.api_key is None:
            variable = _KEYS.get(dialect.name, "OPENAI_API_KEY")
            key = self.environment.get(variable, "").strip().encode()
            if not key and not is_loopback(urlsplit(upstream.base_url).hostname or ""):
                raise UserMistake(
                    f"--verify asks {upstream.base_url} with your key: set {variable}"
                )
            scheme = b"Bearer " if tenant.key_header == KEY_HEADERS[0] else b""
            headers += [(tenant.key_header, scheme + key)] if key else []
        headers += [(MESSAGES.beta_header, beta.encode("latin-1", "replace"))] if beta else []
        path = _PATHS[dialect.name]
        scope: dict[str, Any] = {
            "type": "http",
            "method": "POST",
            "raw_path": path,
            "query_string": b"",
            "headers": headers,
            "extensions": {RAW: _Nobody(path)},
        }
        client = Exchange(scope, _silence, _silence)
        client.api = client.dialect = dialect.name
        return client

    async def ask(self, services: Services, drawn: Iterable[Drawn]) -> None:
        """Ask as many of these requests as there is money for."""
        waiting = iter(drawn)
        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(self._work(services, waiting))

    async def _work(self, services: Services, waiting: Iterator[Drawn]) -> None:
        for one in waiting:
            if self._reserved + one.most > self.purse.left:
                self.ended = self.ended or "the next request may have cost more than was left"
            if self.ended:
                return
            self._reserved += one.most
            try:
                found = {"asked": 1, **await self._ask(services, one.recorded)}
                self.sums.update(found)
                self.sessions.setdefault(one.session, Counter()).update(found)
                self._in_a_row = 0
            except (OffloadError, TimeoutError) as error:
                _, why = blamed(error)
                self._fail(why)
            except Exception as error:  # what was paid for the others is not lost
                logger.exception("a bug, in asking a request again")
                self._fail(f"a bug of the proxy: {type(error).__name__}")
            finally:
                self._reserved -= one.most
            _progress(f"{self.asked:,} asked, {in_money(self.purse.spent)} spent")

    def _fail(self, why: str) -> None:
        self.failed[why] += 1
        self._in_a_row += 1
        if self._in_a_row >= IN_A_ROW and not self.ended:
            self.ended = f"{IN_A_ROW} requests failed one after the other"

    async def _ask(self, services: Services, recorded: RecordedRequest) -> dict[str, int]:
        planned, _ = await planned_by(self.policy, recorded, services.reader)
        assert planned is not None
        request = planned.request
        tenant = self.tenant(planned.dialect, request.model)
        prepared = Prepared(request.body, tenant, request, observed=True, planned=planned)
        client = self.client(planned.dialect, request.model, recorded.beta)
        rendered = await as_observed(services, prepared, planned)
        asker = Asker(services, client, prepared, rendered, self.purse)
        async with asyncio.timeout(SECONDS):
            seen = await _patiently(asker.unchanged)
            again = await _patiently(asker.unchanged)
            other = await _patiently(asker.planned)
        forecast = foreseen(planned, recorded.reported)
        costs = forecast.before, forecast.after
        return compared(planned, seen, again, other, costs, observed=True)


async def _patiently(ask: Callable[[], Awaitable[ModelReply]]) -> ModelReply:
    """Ask, and again after a while if upstream cannot answer now. Raises OffloadError."""
    for attempt in range(1, TRIES):
        try:
            return await ask()
        except Refusal as refusal:
            if refusal.status != 429 and refusal.status < 500:
                raise
            said = refusal.headers.get(b"retry-after")
            pause = float(said) if said.isdigit() else 5.0 * attempt
            await asyncio.sleep(min(pause, LONGEST_PAUSE))
    return await ask()


class _Nobody:
    """The client's side of requests that no client has sent."""

    fault = None

    def __init__(self, target: bytes) -> None:
        self.target = target

    def watch(self, left: Callable[[], object], /) -> Callable[[], object]:
        return lambda: None

    def admit(self, accounts: Sequence[Account]) -> None: ...

    def hold(self, size: int) -> None: ...

    def release(self, size: int) -> None: ...

    def let_go(self) -> None: ...


async def _silence(*_: Any) -> Any: ...


def _progress(said: str, end: str = " ") -> None:
    if sys.stderr.isatty():
        sys.stderr.write(f"\r{said}{end}")


def run(proof: Proof, settings: Settings, drawn: Sequence[Drawn], runner: asyncio.Runner) -> None:
    """Ask these requests, until they end, the money ends, or somebody presses Ctrl-C: what has come
    of it by then counts."""

    async def asked(folder: str) -> None:
        plain = replace(settings, store=folder, policies=None, dashboard=None, replica_url=None)
        process = Process(plain)
        async with process.running():
            await proof.ask(process.services, drawn)

    with TemporaryDirectory(prefix="offload-verify-") as folder:
        try:
            runner.run(asked(folder))
        except KeyboardInterrupt:
            proof.ended = "it was interrupted"
        finally:
            _progress("", end="\n")


# -- saying it -------------------------------------------------------------------------------------


def before(proof: Proof, draw: Draw, drawn: Sequence[Drawn]) -> str:
    """Say what will be asked, of whom, and what it costs at most. Raises UserMistake if a key is
    missing."""
    where = set()
    for dialect, model in {(one.recorded.dialect, one.session.model) for one in drawn}:
        if dialect is not None:
            proof.client(dialect, model)
            where.add(proof.tenant(dialect, model).policy.upstream.base_url)
    needed = sum(one.most for one in drawn[:NEEDED])
    most = min(sum(one.most for one in drawn), proof.purse.budget)
    short = ": if the money ends before, no figure is shown" if needed > most else ""
    return (
        f"Asks {' and '.join(sorted(where))} again: up to {several(len(drawn), 'request')} of "
        f"{several(len(draw.sessions), 'session')}, each twice as it was sent and once as planned.\n"
        f"This costs at most {in_money(most)}; only what {AT_ONCE} replies have beyond {REPLY_TOKENS:,} tokens each "
        "can exceed that. "
        f"{NEEDED} requests cost at most {in_money(needed)}{short}. No reply is kept.\n"
    )


def lines(proof: Proof, draw: Draw) -> list[str]:
    """Return the results in plain words, a line each."""
    shown = figures(proof.asked, proof.sums, [*proof.sessions.values()])
    found = [f"{one.title}: {one.value}, {'; '.join(one.lines)}" for one in shown]
    if short := missing(proof.asked):
        found.append(f"No figure: {short}")
    return [*found, "", *_account(proof, draw)]


def _account(proof: Proof, draw: Draw) -> list[str]:
    """Say how many were asked of how many, and what it cost."""
    sessions = several(len(proof.sessions), "session")
    said = [
        f"Asked again: {several(proof.asked, 'request')} of {sessions}, drawn from {draw.changed:,} that the plan "
        f"changes, of {draw.read:,} read",
        f"Spent: at most {in_money(proof.purse.spent)} of {in_money(proof.purse.budget)}",
    ]
    said += [f"Ended early: {proof.ended}"] if proof.ended else []
    said += [f"Not answered: {number:,}, {why}" for why, number in proof.failed.most_common()]
    said += [f"Left out: {number:,}, {why}" for why, number in draw.left_out.most_common()]
    return said


def page(proof: Proof, draw: Draw, policy: str) -> str:
    """Return the page that a person passes on."""
    asked = several(proof.asked, "recorded request")
    shown = figures(proof.asked, proof.sums, [*proof.sessions.values()])
    models = ", ".join(sorted({session.model for session in proof.sessions}))
    body = [
        element(
            "p",
            f"{asked} went to the model three times each: twice as they were, with the whole history, and once "
            "as the proxy would send them, with old tool results moved out.",
            class_="headline",
        ),
        element("p", f"Models: {models}; policy: {policy}", class_="faint"),
        tiles(*([one.title, one.value, *one.lines] for one in shown))
        if shown
        else element("p", f"No figure is shown: {missing(proof.asked)}."),
        card("How to read this", element("ul", *(element("li", note) for note in _READING))),
        card(
            "What was asked", element("ul", *(element("li", one) for one in _account(proof, draw)))
        ),
    ]
    return document("Does the model do the same?", body)


_READING = (
    "A model does not always do the same when it is asked the same thing twice. So each figure about the next "
    "action stands beside how often it does. Only what goes beyond that is due to the proxy.",
    "The next action is which tools the model calls, with which arguments, or that it stops. Whether the whole task "
    "would succeed as often is not measured here.",
    "Each range is an interval of 95 %: of a hundred such ranges, about 95 have the true value in them. Judge by its "
    "far end. No figure is shown of fewer than 30 requests.",
    "Replies are counted in upstream's tokens, with the calls that read moved text back. The cost is that of the "
    "input, as if what was sent before came from upstream's cache, and of the reply at five times the price of input.",
    "Requests are drawn from as many sessions as there are. Those of one session are alike, which widens the ranges.",
)


def found(proof: Proof, draw: Draw) -> dict[str, object]:
    """Return the results by name."""
    return {
        "asked": proof.asked,
        "figures": [
            one._asdict() for one in figures(proof.asked, proof.sums, [*proof.sessions.values()])
        ],
        "missing": missing(proof.asked),
        "sums": proof.sums,
        "read": draw.read,
        "changed": draw.changed,
        "sessions": len(proof.sessions),
        "spent": proof.purse.spent,
        "budget": proof.purse.budget,
        "ended": proof.ended,
        "failed": proof.failed,
        "left_out": draw.left_out,
    }
