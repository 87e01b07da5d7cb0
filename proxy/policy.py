"""The frozen policy of one tenant, and its overlay for one model. Times are seconds, sizes tokens
unless stated.

`proxy.policies` parses and checks the files; instances of these classes are valid.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from proxy.plan import texts
from proxy.plan.prices import Prices, price_of
from proxy.plan.texts import PRESETS, ResultPreset, ResultRule


def says(text: str, **bounds: Any) -> Meta:
    """What the schema, the reference and errors say of a key, and msgspec's bounds of its value."""
    return Meta(description=text, **bounds)


_MOST = 10**12
Tokens = Annotated[int, Meta(ge=0, le=_MOST)]
Seconds = Annotated[float, Meta(gt=0, le=86_400)]
Count = Annotated[int, Meta(ge=0, le=_MOST)]
Price = Annotated[float, Meta(ge=0, le=100)]

# The end of the text. Python's `$` also matches before a final newline.
_END = r"$(?!\n)"
_NAME = r"(?!\.\.?(/|$))[A-Za-z0-9_.-]+"
# Visible ASCII without `?` and `#`, because the client's path and query are appended. No
# user:password@ either, and no endpoint, which many providers show with their address.
_HOST = r"([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])"
_PORT = r"([0-9]{1,4}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"
_NO_ENDPOINT = r"(?!.*/(completions|responses|messages|embeddings)/?$)"
BASE_URL = rf'^{_NO_ENDPOINT}https?://{_HOST}(:{_PORT})?(/[!"$->@-~]*)?' + _END

REPLY_SHARE = 8
LEAST_REPLY = 1_000
MOST_REPLY = 16_000
"""The room for a reply: one part in so many of the window, and its bounds in tokens. Few replies of
agents are longer than some thousand tokens, and models with small windows write shorter ones."""

MOST_UNSEEN = 20_000
UNSEEN_SHARE = 4
"""The largest result that is sent before the model has seen it, in tokens, and the part of a known
window that it may be. Nothing else would make a single result fit that the model has not
answered."""


class Mode(StrEnum):
    OFF = "off"
    COMPACT = "compact"
    COMPRESS = "compress"
    AUTO = "auto"
    OBSERVE = "observe"
    """Planned as `auto`, but sent as it came."""


class Wait(StrEnum):
    NEVER = "never"
    ALWAYS = "always"


class SnapshotRole(StrEnum):
    """The message that carries a snapshot."""

    AUTO = "auto"
    """The system message, or the first user message of a conversation that has no system
    message."""
    SYSTEM = "system"
    USER = "user"


class Inject(StrEnum):
    WHEN_OFFLOADING = "when_offloading"
    AGENTS = "agents"
    """From the start for requests that bring tools of their own, and where the policy names
    `results`, as the clients that need this describe their tools in the prompt. `WHEN_OFFLOADING`
    for the others, and for a first request whose history upstream keeps."""
    ALWAYS = "always"
    NEVER = "never"


class ArchiveUse(StrEnum):
    """What the model may find of this caller's earlier conversations without a name that the
    request quotes."""

    NONE = "none"
    SEARCH = "search"


class Profile(StrEnum):
    """Presets of `keep_views` and `max_total_tokens`, and careful of `tools.inject`."""

    CAREFUL = "careful"
    BALANCED = "balanced"
    FRUGAL = "frugal"


class Upstream(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where requests go. Times are seconds."""

    base_url: Annotated[
        str,
        says(
            "an address without endpoint and query, such as https://api.openai.com/v1; "
            "a key or password goes into `api_key`, or clients send it",
            pattern=BASE_URL,
        ),
    ] = "https://api.openai.com/v1"
    api_key: Annotated[
        # It becomes a header's value: a stray newline from a secrets file would make every request
        # fail.
        Annotated[str, Meta(pattern=r"^(?!\$)[!-~]+" + _END)] | None,
        says(
            "a key of visible ASCII characters, such as ${NAME}; left out: the client's own goes through"
        ),
    ] = None
    connect_timeout: ClassVar[float] = 5
    idle_timeout: Annotated[
        Seconds, says("seconds without a byte of the reply or of an upload, and for one summary")
    ] = 300
    context_window: Annotated[
        Annotated[int, Meta(gt=0, le=_MOST)] | None,
        says("tokens that the model takes; null: upstream is asked for it"),
    ] = None
    members: Annotated[
        tuple[str, ...],
        says(
            "harmless members that the proxy does not know: of the body, or of what is in it, as `messages[].timestamp`"
        ),
    ] = ()

    def reply_room(self, window: int | None) -> int:
        """The tokens of this window that are kept free for the reply, whatever limit a request
        sets."""
        return 0 if window is None else min(max(window // REPLY_SHARE, LEAST_REPLY), MOST_REPLY)

    def __repr__(self) -> str:
        """Omits the key, because such texts end up in logs and tracebacks."""
        return f"Upstream(base_url={self.base_url!r}, api_key={'…' if self.api_key else None})"


class Compress(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How old history becomes a snapshot."""

    model: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        says("the model that writes it; null: the request's own"),
    ] = None
    wait: Annotated[
        Wait, says("whether a request waits for its snapshot also where it fits the window without")
    ] = Wait.NEVER
    snapshot_tokens: Annotated[int, says("tokens of one snapshot", ge=100)] = 1500
    group_token_threshold: Annotated[
        Tokens, says("tokens of history for one summary call at most; 0: as much as fits")
    ] = 0
    max_calls: ClassVar[int] = 4
    """Calls for one summary, failed ones included. Longer history is shortened first, so that no
    summary costs more."""


class Offload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When history is moved out of the context, and what stays."""

    mode: Annotated[Mode, says("how old history may be moved")] = Mode.AUTO
    profile: Annotated[
        Profile,
        says(
            "how soon results leave: it sets `keep_views` and `max_total_tokens` if left out; careful also "
            "`tools.inject: when_offloading`"
        ),
    ] = Profile.BALANCED
    max_total_tokens: Annotated[
        Tokens,
        says(
            "the ceiling: tokens of history, leading system messages aside, above which the oldest "
            "results move at any price, until half of it is left; at most 60 % of a known window"
        ),
    ] = 30_000
    max_tool_message_tokens: Annotated[
        Tokens, says("tool results up to this size stay, in tokens")
    ] = 500
    compact_ratio_threshold: Annotated[
        float, says("auto: compress where compaction leaves more than this share", ge=0, le=1)
    ] = 0.75
    keep_recent_count: Annotated[
        Count | None, says("last messages that stay; null: 1 for compact, 2 for compress and auto")
    ] = None
    keep_views: Annotated[
        int,
        says(
            "replies of the model that a tool result stays for; then it moves where seven more requests "
            "with it would cost more than writing the rest of the prompt again",
            ge=1,
            le=1_000,
        ),
    ] = 2
    cached_read: Annotated[Price, says("price of reading cached input; plain input is 1")] = 0.1
    cache_write: Annotated[Price, says("price of writing input to the cache; plain input is 1")] = (
        1.25
    )
    input_price: Annotated[
        Annotated[float, Meta(ge=0, le=1_000_000)] | None,
        says(
            "USD for a million tokens of plain input; null: what the price list says, or tokens only"
        ),
    ] = None
    holdout: Annotated[
        float,
        says("share of conversations that are left as they come, to be compared with", ge=0, le=1),
    ] = 0.0
    verify: Annotated[
        float,
        says(
            "share of requests that the plan changes, or would, that are asked twice more, to compare what follows",
            ge=0,
            le=1,
        ),
    ] = 0.0
    verify_budget: Annotated[
        float,
        says(
            "USD that `verify` may spend in a day, by `input_price` or the list", ge=0, le=1_000_000
        ),
    ] = 1.0
    # One spelling for models, files and tools, so no odd characters.
    store_dir: Annotated[
        str,
        says(
            "the directory name that references carry, such as /context_store",
            pattern=rf"^/?{_NAME}(/{_NAME})*" + _END,
        ),
    ] = "/context_store"
    exclude_tools: Annotated[
        tuple[str, ...], says("client tools whose results are never moved (globs)")
    ] = ()
    keep_errors: Annotated[bool, says("whether results that report an error stay as they are")] = (
        False
    )
    results: Annotated[
        tuple[ResultPreset | ResultRule, ...],
        says("messages that carry results in another role: smolagents, gptme, cline, or rules"),
    ] = ()
    said: Annotated[
        tuple[Annotated[str, Meta(min_length=1, max_length=200)], ...],
        says(
            "more tools whose results are the user's answers; or, with a space or a sign in it, the beginning "
            "of a line at which the user's own words begin in a result"
        ),
    ] = ()
    pin_user_tokens: Annotated[
        Tokens,
        says(
            "tokens of the user's messages that stay verbatim, and as many of later system messages; an "
            "older user message that is larger by itself leaves a preview and a reference"
        ),
    ] = 8_000
    compress: Annotated[Compress, says("how old history becomes a snapshot")] = msgspec.field(
        default_factory=Compress
    )

    def unseen_limit(self, window: int | None) -> int:
        """The tokens above which a result is moved before the model has seen it: none alone fills
        the context."""
        limit = MOST_UNSEEN if window is None else min(MOST_UNSEEN, window // UNSEEN_SHARE)
        return max(limit, self.max_tool_message_tokens)

    def keep_recent(self) -> int:
        if self.keep_recent_count is not None:
            return self.keep_recent_count
        return 1 if self.mode is Mode.COMPACT else 2

    def result_rules(self) -> tuple[ResultRule, ...]:
        """The rules of `results`, those of presets included."""
        if not self.results:
            return ()
        return tuple(
            rule
            for named in self.results
            for rule in ((named,) if isinstance(named, ResultRule) else PRESETS[named])
        )

    def excludes(self, tool: str) -> bool:
        return any(fnmatchcase(tool, glob) for glob in self.exclude_tools)

    def asks(self, tool: str) -> bool:
        """Whether the results of this tool are the user's answers."""
        return tool in texts.TOOLS or tool in self.said

    def factor(self, prompt: int) -> float:
        """How many times the usual price a prompt of so many tokens costs."""
        return 1.0


class ListedOffload(Offload, frozen=True, kw_only=True):
    """The section for one model, with what its price list says where the policy says nothing."""

    prices: Prices

    def factor(self, prompt: int) -> float:
        return self.prices.factor(prompt)


LISTED = frozenset(("cached_read", "cache_write", "input_price"))
"""The keys that a price list fills in."""


class Tools(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The tools with which the model reads back what was moved."""

    inject: Annotated[Inject, says("when requests get the tools")] = Inject.AGENTS
    max_rounds: Annotated[int, says("hidden rounds of one turn", ge=1, le=64)] = 8
    max_retrieved_tokens: Annotated[
        int, says("tokens of all answers of a turn; one answer has a third at most", ge=100)
    ] = 18_000
    archive: Annotated[
        ArchiveUse,
        says(
            "search: grep without a path also searches what this caller's last conversations moved"
        ),
    ] = ArchiveUse.NONE
    max_calls: ClassVar[int] = 16
    """Calls answered in a round. The others get one line that says so, which bounds what a round
    costs."""
    max_search_seconds: ClassVar[float] = 5
    """Seconds of processor time for all searches of a turn, so that no pattern takes a processor
    from others."""

    @property
    def max_answer_tokens(self) -> int:
        """The tokens of one answer, which leave room for two more in the turn."""
        return self.max_retrieved_tokens // 3


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The resources that one tenant may use."""

    concurrent_requests: Annotated[int, says("requests under way at once", ge=1)] = 256


class Compaction(StrEnum):
    """Who compacts where a client asks upstream to."""

    AUTO = "auto"
    """Upstream, where it is known to do so and the whole history fits; else the proxy."""
    SERVE = "serve"
    PASSTHROUGH = "passthrough"


class Identity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """By what a client is known whatever key it sends: one of the three. Left out, it is the
    key."""

    header: Annotated[
        Annotated[str, Meta(pattern=r"^[A-Za-z0-9-]+" + _END)] | None,
        says("the name of a header, such as chatgpt-account-id"),
    ] = None
    jwt: Annotated[
        Annotated[str, Meta(min_length=1)] | None, says("a claim of the bearer token, such as sub")
    ] = None
    body: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        says("a member of the body, such as safety_identifier or metadata.user_id.device_id"),
    ] = None

    @property
    def given(self) -> bool:
        return bool(self.header or self.jwt or self.body)

    def __str__(self) -> str:
        if self.header:
            return f"its header {self.header.lower()}"
        return f"the claim {self.jwt} of its token" if self.jwt else f"{self.body} in the body"


class Sections(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a policy says in its file as in force."""

    upstream: Upstream = msgspec.field(default_factory=Upstream)
    offload: Offload = msgspec.field(default_factory=Offload)
    tools: Tools = msgspec.field(default_factory=Tools)
    limits: Limits = msgspec.field(default_factory=Limits)
    store_originals: Annotated[
        bool, says("keep moved texts for later conversations, compactions and people")
    ] = True
    capture: Annotated[
        bool, says("keep whole requests for `replay`, if `serve --capture` gives them room")
    ] = False
    dashboard_content: Annotated[
        bool,
        says(
            "keep texts of messages on the dashboard, if `serve --dashboard-content` allows it too"
        ),
    ] = False
    compaction: Annotated[
        Compaction, says("who compacts where the client asks upstream to; auto: upstream if it can")
    ] = Compaction.AUTO
    identity: Identity = msgspec.field(default_factory=Identity)
    share_namespace: Annotated[bool, says("one namespace for all keys of this tenant")] = False
    relay: Annotated[
        tuple[Annotated[str, Meta(pattern=r"^[/*]")], ...],
        says("more paths to relay with the tenant's key: globs such as /files/*"),
    ] = ()


class Policy(Sections, frozen=True, kw_only=True, dict=True):
    """One tenant's valid policy. `retention` is in seconds; None keeps records forever."""

    tenant: str = "default"
    model: str = ""
    """Of one of the `rules`: the models that it is for (a glob)."""
    by_api: Mapping[str, Policy] = {}
    retention: float | None = 30 * 86_400
    rules: tuple[Policy, ...] = ()
    listed: frozenset[str] = frozenset()
    """The prices that it leaves to the upstream's list. Those in `offload` are of the list's newest
    models."""

    @property
    def planning(self) -> Policy:
        """The policy by which requests are planned: for `observe`, the one that it shows, which is
        `auto`."""
        if self.offload.mode is not Mode.OBSERVE:
            return self
        return msgspec.structs.replace(
            self, offload=msgspec.structs.replace(self.offload, mode=Mode.AUTO)
        )

    @cached_property
    def may_be_off(self) -> bool:
        """Whether the mode is `off` for some model."""
        return any(part.offload.mode is Mode.OFF for part in (self, *self.rules))

    def for_request(self, *, has_tools: bool, unsent: bool = False) -> Policy:
        """The policy for one request, which may bring tools of its own: `inject` is never `AGENTS`
        in it.

        A client whose history is `unsent` may leave it to upstream: the next request would then
        lack our tools again.
        """
        if self.tools.inject is not Inject.AGENTS:
            return self
        agent = (has_tools or self.offload.results) and not unsent
        inject = Inject.ALWAYS if agent else Inject.WHEN_OFFLOADING
        return msgspec.structs.replace(
            self, tools=msgspec.structs.replace(self.tools, inject=inject)
        )

    def for_api(self, name: str) -> Policy:
        return self.by_api.get(name, self)

    @property
    def upstreams(self) -> tuple[Upstream, ...]:
        own = (self.upstream, *(rule.upstream for rule in self.rules))
        return own + tuple(
            upstream for policy in self.by_api.values() for upstream in policy.upstreams
        )

    def for_model(self, model: str) -> Policy:
        """The policy of the first rule that matches this model, or this one, with the model's
        prices."""
        part = next((rule for rule in self.rules if fnmatchcase(model, rule.model)), self)
        if not part.listed:
            return part
        prices = price_of(part.upstream.base_url, model)
        if (made := part._by_prices.get(prices)) is None:
            given = {name: getattr(part.offload, name) for name in part.offload.__struct_fields__}
            given |= {name: getattr(prices, name) for name in part.listed}
            made = msgspec.structs.replace(
                part, offload=ListedOffload(**given, prices=prices), listed=frozenset()
            )
            part._by_prices[prices] = made
        return made

    def shadowing(self, index: int) -> str:
        """Return the glob of an earlier rule that takes all models of this one; empty if there is
        none."""
        plain = (rule.model for rule in self.rules[:index] if not set(rule.model) & set("?["))
        return next((glob for glob in plain if fnmatchcase(self.rules[index].model, glob)), "")

    @cached_property
    def _by_prices(self) -> dict[Prices, Policy]:
        """One for each row of the price list that was asked for."""
        return {}


PROFILES: Mapping[Profile, tuple[Mapping[str, int], Mapping[str, Inject]]] = {
    Profile.CAREFUL: (
        {"keep_views": 10, "max_total_tokens": 60_000},
        {"inject": Inject.WHEN_OFFLOADING},
    ),
    Profile.BALANCED: ({"keep_views": 2, "max_total_tokens": 30_000}, {}),
    Profile.FRUGAL: ({"keep_views": 1, "max_total_tokens": 20_000}, {}),
}
"""What each profile sets in `offload` and `tools` where the policy says nothing. Tuned on half of
the recorded runs; docs/benchmarks.md shows the other half.

Our tools from the start save the first event from writing the whole prompt again, as tools come
before messages. `careful` goes without, because it leaves most requests as they came.
"""
