"""The one value in which a request results. Metrics show its enums as labels, and the log line has
all of it."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from proxy.errors import Fault
from proxy.plan.history import Irregular
from proxy.plan.turn import Addition, Reason

DECIMALS = 6
"""Times are rounded to the microsecond."""


class Kind(StrEnum):
    """How a request was served."""

    RELAY = "relay"
    """Passed on: a request to any path except those for chats."""
    UNTOUCHED = "untouched"
    """A chat request that went upstream as the client sent it; the next one was rewritten."""
    OFFLOADED = "offloaded"
    OBSERVED = "observed"
    """A chat request that went upstream as the client sent it, while its plan was only recorded."""
    OPERATION = "operation"
    REFUSED = "refused"
    SUMMARY = "summary"
    """A summary made for a conversation, apart from its requests."""
    VERIFY = "verify"
    """A request asked again, in the same bytes and as planned or as it came, to compare what the
    model does next."""


class Holdout(StrEnum):
    """The group of a conversation whose policy leaves a share of conversations as they come."""

    NONE = ""
    KEPT = "kept"
    """It is left as it comes, and only observed."""
    PLANNED = "planned"


class Basis(StrEnum):
    """What the costs of a request rest on."""

    NONE = ""
    BILLED = "billed"
    """Upstream said how many tokens it counted, and how many of them it had cached."""
    UNKNOWN = "unknown"
    """It did not, or not of all rounds: everything that the request before this one had counts as
    cached."""


class CacheMiss(StrEnum):
    """Why upstream's cache lacked what it could have had of a prompt."""

    NONE = ""
    FIRST = "first"
    """It was the first request of this conversation that this process saw."""
    CLIENT = "client"
    """The client changed its own history, or went on from an earlier request of it."""
    EXPIRED = "expired"
    """Too much time had passed since the request before."""
    EVENT = "event"
    """We changed what is sent: an event, or an answer of our tools that became a pointer."""
    OTHER = "other"
    """None of these: upstream lost it earlier, or caches no prompt of this kind."""


class StoreOperation(StrEnum):
    GET = "get"
    PUT = "put"
    LIST = "list"
    DELETE = "delete"


class NoAnswer(StrEnum):
    """Why a store operation gave no answer."""

    FAILED = "failed"
    TIMEOUT = "timeout"
    BUDGET = "budget"
    """The request had no time left for the operation."""
    OPEN = "open"
    """The breaker did not let the operation through to the engine."""


class ToolUse(msgspec.Struct, frozen=True, omit_defaults=True):
    """A call of our tools: `tool` is grep or read_file, `result` one of ok, empty, refused, budget.

    A model in a loop makes thousands of calls in a round. All those that were refused for their
    number are one of this.
    """

    tool: str
    result: str
    tokens: int
    calls: int = 1


class Outcome(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The result of one request. It contains no content and no key. Times are in seconds, sizes in
    tokens."""

    request_id: str
    tenant: str
    namespace: str
    kind: Kind
    method: str
    path: str
    dialect: str = ""
    """The API of a request that asks for a model's reply; empty for others."""
    model: str = ""
    stream: bool = False
    mode: str = "off"
    reason: Reason = Reason.NONE
    obstacle: str = ""
    """For `Reason.FIELD`: the field of the request that rules out our tools."""
    status: int = 0
    """0 if the client left before there was a status."""
    fault: Fault = Fault.NONE
    detail: str = ""
    """For an upstream fault: the network's error message, with upstream's address."""
    messages: int = 0
    left_alone: Mapping[Irregular, int] = {}
    """Messages whose calls and results do not pair, or that are sealed, and so stay as they
    came."""
    tokens_before: int = 0
    """The whole prompt as the client sent it, in tokens: instructions, tools and history."""
    tokens_after: int = 0
    """The whole prompt as it went upstream in the first round, our tools included."""
    cost_before: int = 0
    """Of the input as it came, in plain input tokens under the policy's prices; 0 if upstream did
    not say what it counted, unless the request was only observed."""
    cost_after: int = 0
    """The same as it was sent, all rounds and the output of those that only used our tools
    included; for a summary, what it cost. If only observed, as the plan would have sent it: then
    the other values also say what it would do."""
    usage: Basis = Basis.NONE
    holdout: Holdout = Holdout.NONE
    compacted: int = 0
    unfollowed: bool = False
    """Whether the request's `tool_choice` keeps the model from reading moved texts."""
    compressed: int = 0
    events: int = 0
    moved: int = 0
    """Messages that moved at this very request."""
    new_event: bool = False
    """Whether something newly moved at this very request."""
    reinserted: int = 0
    rounds: int = 0
    tool_uses: tuple[ToolUse, ...] = ()
    prompt_tokens: int = 0
    """Input of all rounds, as upstream counted it. It had `cached_tokens` of them, and wrote
    `written_tokens`."""
    completion_tokens: int = 0
    cached_tokens: int = 0
    written_tokens: int = 0
    miss: CacheMiss = CacheMiss.NONE
    """Why upstream's cache lacked a part of the prompt that was not new."""
    missed_tokens: int = 0
    """That part, as upstream counted it."""
    summary_prompt_tokens: int = 0
    summary_completion_tokens: int = 0
    verify_cost: int = 0
    """What it cost to ask a request again, as its budget counts that, in plain input tokens."""
    again_tools: int = 0
    """For a request asked again in the same bytes: 1 if the model called the same tools, or none
    again. See `proxy.apps.verify.pairs` for these and the next ones."""
    again_exact: int = 0
    """1 if it also called them with the same arguments."""
    whole_tools: int = 0
    """The same with its whole history, where its client got the reply to the plan; where it was only
    observed, the other way round."""
    whole_exact: int = 0
    both_tools: int = 0
    """1 if both of these were."""
    both_exact: int = 0
    measured: int = 0
    """1 if the replies' tokens and the costs are known: those that follow."""
    whole_reply: int = 0
    """Tokens that the model wrote with the whole history; the mean, if it was asked twice."""
    planned_reply: int = 0
    """The same as planned, hidden rounds included."""
    reply_ratio: int = 0
    """The logarithm of planned to whole, in thousandths, and its square."""
    reply_ratio_squared: int = 0
    whole_cost: int = 0
    """The input and the reply, in plain input tokens."""
    planned_cost: int = 0
    cost_ratio: int = 0
    cost_ratio_squared: int = 0
    refused: tuple[Addition, ...] = ()
    """What upstream refused of our additions and took the request without."""
    store_errors: Mapping[str, int] = {}
    """How often each store operation had no answer, as `StoreOperation:NoAnswer`."""
    seconds: float = 0.0
    added_seconds: float = 0.0
    """Time within `seconds` for the proxy's own work before the first round was sent."""
    first_byte_seconds: float | None = None
    """From the request's first byte to the reply's first."""
    cause: str = ""
    """Why something newly moved: one of `forecast.CAUSES`."""
    words: str = ""
    """What the plan did at this very request, and why, in sentences with figures; or what it waits
    for."""
