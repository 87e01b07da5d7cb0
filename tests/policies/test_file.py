"""One policy file: what it may say, what it becomes, and the words for what is wrong with it."""

import hashlib
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from proxy.errors import PolicyError
from proxy.policies import overlay, parse
from proxy.policies.format import SECTIONS, PolicyFile, definitions, duration, reference, schema
from proxy.policy import LISTED, Mode, Policy, Upstream, Wait

DIGEST = "0cf11aba70590ecf45f06e6a47b6ba1d3d9f3c6f62a8d19ad9d5fd2b7a0c9c52"
ENVIRONMENT = {
    "CLIENT": "sk-client",
    "KEY": "sk-upstream",
    "EMPTY": "",
    "NEWLINE": "sk-x\n",
    "UMLAUT": "schlüssel",
}
KEYED = "api_keys: [{env: CLIENT}]\n"

DEFAULTS = Policy(listed=LISTED)

# The example of the design, every key of it.
WHOLE = f"""
tenant: acme
api_keys:
  - sha256: {DIGEST}
  - env: CLIENT
upstream:
  base_url: https://api.example.com/v1
  api_key: ${{KEY}}
  idle_timeout: 301
  context_window: 128000
upstreams:
  messages: {{base_url: https://api.anthropic.com, api_key: sk-other}}
offload:
  mode: compress
  profile: frugal
  keep_views: 4
  max_total_tokens: 20001
  max_tool_message_tokens: 2001
  compact_ratio_threshold: 0.5
  keep_recent_count: 3
  cached_read: 0.2
  cache_write: 1.5
  store_dir: /elsewhere
  exclude_tools: ["load_*"]
  results: [gptme, {{role: user, prefix: "Result:"}}, {{role: system, after: first_user}}]
  pin_user_tokens: 8002
  compress:
    model: small
    wait: always
    snapshot_tokens: 1501
    group_token_threshold: 5
tools:
  inject: always
  max_rounds: 9
  max_retrieved_tokens: 18001
limits: {{concurrent_requests: 257}}
store_originals: false
capture: true
dashboard_content: true
retention: 12h
share_namespace: true
compaction: serve
relay: [/files/*]
rules:
  - model: "gpt-4.1*"
    offload: {{max_total_tokens: 100000, compress: {{wait: never}}}}
    tools: {{max_rounds: 2}}
"""


def taken(text: str, stem: str = "acme", base_url: str | None = None) -> Policy:
    return parse(text, f"{stem}.yaml", stem, ENVIRONMENT, base_url).policy


def refused(text: str, stem: str = "acme") -> str:
    with pytest.raises(PolicyError) as caught:
        taken(text, stem)
    assert not any(secret in str(caught.value) for secret in ("sk-client", "sk-upstream", "sk-x"))
    return str(caught.value)


def assert_holds(part: Any, written: dict[str, Any]) -> None:
    for key, value in written.items():
        if isinstance(value, dict):
            assert_holds(getattr(part, key), value)
        else:
            found = msgspec.json.decode(msgspec.json.encode(getattr(part, key)))
            if key == "results":  # a rule has more keys than are written
                found[1:] = [
                    {name: one[name] for name in rule}
                    for one, rule in zip(found[1:], value[1:], strict=True)
                ]
            assert found == value, key


def test_every_key_is_taken() -> None:
    policy, written = taken(WHOLE), parse(WHOLE, "acme.yaml", "acme", ENVIRONMENT).document.value
    apart = ("api_keys", "upstreams", "retention", "rules")
    assert_holds(policy, {key: value for key, value in written.items() if key not in apart})
    assert (policy.retention, policy.listed) == (12 * 3600, {"input_price"})
    [rule] = policy.rules
    compress = msgspec.structs.replace(policy.offload.compress, wait=Wait.NEVER)
    assert rule.offload == msgspec.structs.replace(
        policy.offload, max_total_tokens=100_000, compress=compress
    )
    assert rule.tools == msgspec.structs.replace(policy.tools, max_rounds=2)
    assert (rule.model, rule.upstream, rule.listed) == ("gpt-4.1*", policy.upstream, policy.listed)
    messages = policy.for_api("messages")
    other = Upstream(base_url="https://api.anthropic.com", api_key="sk-other", idle_timeout=301)
    assert (messages.upstream, messages.offload, messages.rules[0].upstream) == (
        other,
        policy.offload,
        other,
    )


def test_an_api_of_another_address_gets_neither_key_nor_window() -> None:
    text = (
        KEYED + "upstream: {api_key: '${KEY}', context_window: 9000, idle_timeout: 7}\nupstreams:\n"
    )
    policy = taken(
        f"{text}  messages: {{base_url: http://a}}\n  responses: {{context_window: 8000}}\n  chat:\n"
    )
    messages, responses = policy.for_api("messages"), policy.for_api("responses")
    assert messages.upstream == Upstream(base_url="http://a", idle_timeout=7)
    assert responses.upstream == msgspec.structs.replace(policy.upstream, context_window=8_000)
    assert policy.for_api("chat").upstream == policy.for_api("").upstream == policy.upstream


def test_rules_go_for_every_api() -> None:
    rule = "rules:\n- model: big\n  upstream: {context_window: 5000}\n"
    policy = taken(
        f"{KEYED}upstreams: {{messages: {{base_url: http://a, api_key: '${{KEY}}'}}}}\n{rule}"
    )
    chosen = policy.for_api("messages").for_model("big").upstream
    assert chosen == Upstream(base_url="http://a", api_key="sk-upstream", context_window=5_000)
    assert policy.for_model("big").upstream == Upstream(context_window=5_000)
    assert [upstream.base_url for upstream in policy.upstreams] == [
        *[Upstream().base_url] * 2,
        *["http://a"] * 2,
    ]


def test_a_rules_own_address_gets_the_key_of_no_api() -> None:
    """It has what it would have without `upstreams`, or its own."""
    shared = "upstream: {api_key: '${KEY}', context_window: 9000}\n"
    own = "upstreams: {messages: {base_url: http://a, api_key: sk-a, context_window: 7000, idle_timeout: 7}}\n"
    rules = "rules:\n- model: local\n  upstream: {base_url: http://local}\n"
    rules += "- model: other\n  upstream: {base_url: http://other, api_key: sk-b}\n"
    policy = taken(f"{KEYED}{shared}{own}{rules}").for_api("messages")
    local, other = (policy.for_model(model).upstream for model in ("local", "other"))
    expected = Upstream(
        base_url="http://local", api_key="sk-upstream", context_window=9_000, idle_timeout=7
    )
    assert local == expected
    assert other == msgspec.structs.replace(expected, base_url="http://other", api_key="sk-b")
    assert (
        taken(f"{KEYED}{own}{rules}").for_api("messages").for_model("local").upstream.api_key
        is None
    )


def test_the_whole_example_has_every_key_there_is() -> None:
    """Else the test above would not notice one that is dropped on the way."""
    written = msgspec.to_builtins(
        msgspec.convert(parse(WHOLE, "", "", ENVIRONMENT).document.value, PolicyFile)
    )
    defaults = msgspec.to_builtins(PolicyFile())
    unsaid = {key for key in defaults if written[key] == defaults[key]}
    assert unsaid == {"open", "identity"}


CALLERS_AND_PLACES = {"tenant", "open", "base_url", "api_key"}
"""Keys that say who calls, and where requests go. The others decide what happens to a request."""


def test_a_policy_has_few_keys() -> None:
    """The tables have 64 rows; 38 of them decide something, beside sections and what their lists
    consist of."""
    tables = {
        name: made.get("properties", {})
        for name, made in definitions().items()
        if name != "Upstreams"
    }
    assert sum(map(len, tables.values())) <= 64
    sections = {"PolicyFile", "Upstream", "Offload", "Compress", "Tools", "Limits"}
    deciding = {
        (name, key)
        for name in sections
        for key in tables[name].keys() - SECTIONS.keys() - CALLERS_AND_PLACES
        | ({"results"} & tables[name].keys())
    }
    assert len(deciding) <= 38, sorted(deciding)


def test_keys_are_kept_as_digests() -> None:
    source = parse(WHOLE, "acme.yaml", "acme", ENVIRONMENT)
    assert [digest for digest, _ in source.keys] == [
        bytes.fromhex(DIGEST),
        hashlib.sha256(b"sk-client").digest(),
    ]
    umlaut = parse("api_keys: [{env: UMLAUT}]", "acme.yaml", "acme", ENVIRONMENT)
    assert umlaut.keys[0][0] == hashlib.sha256("schlüssel".encode()).digest()
    assert "sk-" not in repr(source)


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ("{}", (30_000, 2)),
        ("{profile: balanced}", (30_000, 2)),
        ("{profile: careful}", (60_000, 10)),
        ("{profile: frugal}", (20_000, 1)),
        ("{profile: frugal, max_total_tokens: 7}", (7, 1)),
        ("{keep_views: 5}", (30_000, 5)),
    ],
)
def test_a_profile_sets_what_is_left_out(section: str, expected: tuple[int, int]) -> None:
    found = taken(f"offload: {section}", "default").offload
    assert (found.max_total_tokens, found.keep_views) == expected


def warned(text: str) -> list[str]:
    return list(parse(text, "default.yaml", "default", ENVIRONMENT).warnings)


FREE = "upstream: {base_url: 'http://127.0.0.1:8080/v1'}\n"
RULE = "rules:\n- model: m\n  offload: "


WINDOW = "upstream: {context_window: 16000}\n"


@pytest.mark.parametrize(
    ("text", "warning"),
    [
        (
            WINDOW + "offload: {max_total_tokens: 50000}",
            "2: offload.max_total_tokens: `max_total_tokens` (50,000) is more than 60% of `context_window` (16,000): "
            "history moves above 9,600 tokens",
        ),
        (
            "offload: {mode: compact, max_total_tokens: 500}",
            "1: offload.max_total_tokens: `max_tool_message_tokens` (500) is not below the ceiling (500): history can "
            "exceed it without a result that may move",
        ),
        (
            "upstream: {base_url: https://gateway.example/v1}\noffload: {verify: 0.1}",
            "2: offload.verify: `verify` (0.1) asks nothing again: its cost is not known, for want of `input_price`",
        ),
        (
            "tools: {inject: never}",
            "1: tools.inject: `inject` (never) leaves references that the model cannot follow",
        ),
        (
            "offload: {keep_recent_count: 50}",
            "1: offload.keep_recent_count: `keep_recent_count` (50) leaves the newest messages alone: history stays "
            "above 30,000 where these exceed it",
        ),
        (
            "offload: {max_total_tokens: 9000, pin_user_tokens: 10000}",
            "1: offload.pin_user_tokens: `pin_user_tokens` (10,000) is above the ceiling (9,000): the user's messages "
            "alone can keep history above it",
        ),
        (
            "offload: {max_total_tokens: 9000, compress: {snapshot_tokens: 5000}}",
            "1: offload.compress.snapshot_tokens: `snapshot_tokens` (5,000) takes more than half of the ceiling "
            "(9,000): summaries free little",
        ),
        (
            "offload: {mode: compact, compact_ratio_threshold: 0.5}",
            "1: offload.compact_ratio_threshold: `compact_ratio_threshold` (0.5) has no effect in the mode compact, "
            "only in auto",
        ),
        (
            "offload: {mode: compact, compress: {wait: always}}",
            "1: offload.compress: `compress` has no effect in the mode compact, which summarises nothing",
        ),
        (
            RULE + "{mode: compress, keep_views: 2}",
            "3: rules[0].offload.keep_views: `keep_views` (2) has no effect in the mode compress, where results do not "
            "move by themselves",
        ),
        (
            FREE + "offload: {max_total_tokens: 5000, keep_views: 1}",
            "2: offload.keep_views: `keep_views` (1) has no effect where cached input is free: history moves above "
            "`max_total_tokens` (5,000)",
        ),
        (
            "offload: {max_total_tokens: 9000}\n" + WINDOW + "tools: {max_retrieved_tokens: 9000}",
            "3: tools.max_retrieved_tokens: `max_retrieved_tokens` (9,000) is more than half of `context_window` "
            "(16,000): one turn's reading can fill it",
        ),
        (
            "offload: {verify: 0.1, verify_budget: 0}",
            "1: offload.verify_budget: `verify_budget` (0) leaves nothing to `verify`",
        ),
        (
            "offload: {cached_read: 0, cache_write: 0, keep_views: 3}",
            "1: offload.keep_views: `keep_views` (3) has no effect where cached input is free: history moves above "
            "`max_total_tokens` (30,000)",
        ),
        (
            "offload: {profile: careful, max_tool_message_tokens: 25000}\n"
            + RULE
            + "{profile: frugal}",
            "3: rules[0]: `max_tool_message_tokens` (25,000) is not below the ceiling (20,000): history can exceed it "
            "without a result that may move",
        ),
        (
            "offload: {profile: careful, pin_user_tokens: 25000}\n" + RULE + "{profile: frugal}",
            "3: rules[0]: `pin_user_tokens` (25,000) is above the ceiling (20,000): the user's messages alone can "
            "keep history above it",
        ),
        (
            "upstreams: {chat: {context_window: 60000}}\n" + RULE + "{max_total_tokens: 50000}",
            "4: rules[0].offload.max_total_tokens: `max_total_tokens` (50,000) is more than 60% of `context_window` "
            "(60,000): history moves above 36,000 tokens",
        ),
        (
            "offload: {holdout: 1}",
            "1: offload.holdout: `holdout` (1) leaves every conversation as it comes",
        ),
        (
            "upstreams: {messages: {base_url: 'http://a', context_window: 16000}}",
            "1: upstreams.messages.context_window: `max_total_tokens` (30,000) is more than 60% of `context_window` "
            "(16,000): history moves above 9,600 tokens",
        ),
        (
            "offload: {exclude_tools: [a, '*']}",
            "1: offload.exclude_tools: `exclude_tools` names every tool: no result ever moves",
        ),
        (
            "rules:\n- model: gpt-5*\n- model: gpt-5.6-luna",
            "3: rules[1].model: `gpt-5.6-luna` is for no model: `gpt-5*` comes first and matches all",
        ),
        (
            RULE + "{mode: compact, max_total_tokens: 400}",
            "3: rules[0].offload.max_total_tokens: `max_tool_message_tokens` (500) is not below the ceiling (400): "
            "history can exceed it without a result that may move",
        ),
    ],
)
def test_keys_that_contradict_each_other_are_named(text: str, warning: str) -> None:
    assert warned(text) == [f"default.yaml:{warning}"]


def test_the_price_of_keeping_no_texts_is_named() -> None:
    nothing, cost = warned("store_originals: false\ntools: {archive: search}")
    assert cost == (
        "default.yaml:1: store_originals: `store_originals` (false) leaves compaction that clients ask for to "
        "upstream, and nothing to read back of what a client itself left out of its history"
    )
    assert nothing == (
        "default.yaml:2: tools.archive: `archive` (search) finds nothing: without `store_originals`, no text is kept "
        "for later conversations"
    )


def test_a_policy_that_says_nothing_has_no_contradictions() -> None:
    silent = (
        "offload: {mode: off, max_total_tokens: 1}",
        FREE + "offload: {keep_views: 1, cached_read: 0.1}",
    )
    rules = "rules: [{model: 'gpt-?'}, {model: 'gpt-*'}, {model: '*'}]"
    for text in (
        "{}",
        "offload: {profile: frugal}",
        "offload: {max_total_tokens: 7000, keep_views: 2}",
        *silent,
        rules,
    ):
        assert warned(text) == []


@pytest.mark.parametrize(
    ("address", "prices"),
    [
        ("https://api.openai.com/v1", (0.1, 1.25)),
        ("https://api.anthropic.com", (0.1, 1.25)),
        ("http://127.0.0.1:8080/v1", (0.0, 1.0)),
        ("http://vllm:8000/v1", (0.1, 1.25)),
    ],
)
def test_prices_follow_the_upstream(address: str, prices: tuple[float, float]) -> None:
    def found(section: str) -> tuple[float, float]:
        offload = taken(
            f"upstream: {{base_url: '{address}'}}\noffload: {section}", "default"
        ).offload
        return offload.cached_read, offload.cache_write

    assert found("{}") == prices
    assert found("{cached_read: 0.5, cache_write: 2}") == (0.5, 2)


def test_each_apis_upstream_has_its_own_prices() -> None:
    text = "upstreams: {chat: {base_url: 'https://api.x.ai/v1'}}"
    assert taken(text, "default").offload.cached_read == 0.1
    assert taken(text, "default").for_api("chat").offload.cached_read == 0.25


def test_a_models_prices_come_from_the_list_unless_the_policy_says() -> None:
    """The same ones for the same model at any time, as replicas must plan alike."""
    text = "offload: {cached_read: 0.3}\nrules: [{model: 'gpt-4o*', upstream: {base_url: 'http://gate:1'}}]"
    policy = taken(text, "default")

    def prices(model: str) -> tuple[float, float, float | None]:
        offload = policy.for_model(model).offload
        return offload.cached_read, offload.cache_write, offload.input_price

    assert prices("gpt-5.5") == (0.3, 1.0, 5.0)
    assert prices("gpt-4o") == (0.3, 1.0, 2.5)
    assert prices("odd") == (0.3, 1.25, None)
    assert policy.for_model("gpt-4o") is policy.for_model("gpt-4o-2024-08-06")
    assert policy.for_model("gpt-4o").upstream.base_url == "http://gate:1"
    free = (
        taken("upstream: {base_url: 'http://127.0.0.1:1'}", "default").for_model("gpt-5.5").offload
    )
    assert (free.cached_read, free.cache_write, free.input_price) == (0, 1, 0)
    unsaid = taken("offload: {input_price: null}", "default").for_model("gpt-5.5")
    assert unsaid.offload.input_price == 5


def test_a_rule_may_have_a_profile_of_its_own() -> None:
    text = "offload: {profile: careful, max_total_tokens: 9}\nrules: [{model: m, offload: {profile: frugal}}]"
    careful, frugal = taken(text, "default"), taken(text, "default").for_model("m")
    assert [one.offload.keep_views for one in (careful, frugal)] == [10, 1]
    assert [one.offload.max_total_tokens for one in (careful, frugal)] == [9, 9]
    assert [one.tools.inject for one in (careful, frugal)] == ["when_offloading", "agents"]


@pytest.mark.parametrize(
    "section",
    ["{profile: [frugal]}", "{profile: bold}", "{keep_views: 0}", "{keep_views: two}", "7"],
)
def test_a_profile_that_there_is_not_is_refused(section: str) -> None:
    with pytest.raises(PolicyError, match="offload"):
        taken(f"offload: {section}", "default")


def test_what_is_left_out_has_its_default() -> None:
    assert taken("{}", "default") == DEFAULTS
    assert taken(KEYED, "globex") == msgspec.structs.replace(DEFAULTS, tenant="globex")


@pytest.mark.parametrize("section", ["upstream", "offload", "rules", "relay", "tenant"])
def test_a_section_with_everything_commented_out_is_all_defaults(section: str) -> None:
    assert taken(f"{section}:\n  # nothing\n", "default") == DEFAULTS
    assert taken("offload: {compress: , exclude_tools: }", "default") == DEFAULTS


def test_numbers_may_be_written_as_text_as_those_of_variables_are() -> None:
    text = "upstream: {context_window: '${NUMBER}'}\noffload: {max_total_tokens: '7', cached_read: '${SHARE}'}\n"
    text += "open: '${YES}'\nrules: [{model: m, tools: {max_rounds: '${ROUNDS}'}}]"
    variables = {"NUMBER": "128000", "SHARE": "0.5", "YES": "true", "ROUNDS": "9"}
    policy = parse(text, "default.yaml", "default", variables).policy
    assert (policy.upstream.context_window, policy.offload.max_total_tokens) == (128_000, 7)
    assert (policy.offload.cached_read, policy.rules[0].tools.max_rounds) == (0.5, 9)
    with pytest.raises(PolicyError, match=r"offload\.cached_read: expected a number >= 0"):
        parse(text, "default.yaml", "default", {**variables, "SHARE": "nan"})


@pytest.mark.parametrize("off", ["off", "'off'"])
def test_off_is_off_however_yaml_reads_it(off: str) -> None:
    text = f"offload: {{mode: {off}}}\nrules: [{{model: x, offload: {{mode: {off}}}}}]"
    policy = taken(text, "default")
    assert policy.offload.mode is Mode.OFF
    assert policy.rules[0].offload.mode is Mode.OFF


def test_the_address_from_outside_holds_where_the_file_gives_none() -> None:
    local = "http://127.0.0.1:8080/v1"
    assert taken("{}", "default", local).upstream.base_url == local
    assert taken("upstream: {idle_timeout: 9}", "default", local).upstream == Upstream(
        base_url=local, idle_timeout=9
    )
    assert (
        taken("upstream: {base_url: 'http://x/v1'}", "default", local).upstream.base_url
        == "http://x/v1"
    )
    rule = taken("rules: [{model: x}]", "default", local).rules[0]
    assert rule.upstream.base_url == local


def test_a_tenant_may_be_named_otherwise_than_its_file() -> None:
    assert taken(KEYED + "tenant: a-b_9", "Whatever it is").tenant == "a-b_9"


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("12h", 43_200), ("2w", 1_209_600), ("forever", None)]
)
def test_retention(text: str, seconds: float | None) -> None:
    assert taken(f"retention: {text}", "default").retention == seconds


@pytest.mark.parametrize("text", ["", "0d", "1.5h", "30", "1y", "30d\n"])
def test_bad_durations(text: str) -> None:
    with pytest.raises(ValueError, match="such as 30d"):
        duration(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        # types and bounds
        ("- a", "acme.yaml:1: expected a mapping, got a list"),
        ("offload: 3", "acme.yaml:1: offload: expected a mapping, got a whole number"),
        (
            "offload: {compress: {model: ''}}",
            "offload.compress.model: expected text of length >= 1 (the model that",
        ),
        *(
            (
                f"upstream: {{base_url: 'https://x/v1/{end}'}}",
                "expected an address without endpoint and query",
            )
            for end in (
                "chat/completions",
                "responses",
                "messages",
                "messages/",
                "completions",
                "embeddings",
            )
        ),
        (
            "offload:\n  max_total_tokens: 20k",
            "acme.yaml:2: offload.max_total_tokens: expected a whole number, got text (the ceiling: tokens of",
        ),
        (
            "offload:\n\n  max_total_tokens: -1",
            "acme.yaml:3: offload.max_total_tokens: expected a whole number >= 0",
        ),
        (
            f"upstream: {{context_window: {'9' * 400}}}",
            "upstream.context_window: expected a whole number <= 1000000000000",
        ),
        ("offload: {cached_read: .nan}", "offload.cached_read: expected a number >= 0"),
        (r'offload: {cached_read: "\ud800"}', "acme.yaml:1: 'utf-8' codec can't encode"),
        (
            "offload: {exclude_tools: [no]}",
            "offload.exclude_tools[0]: expected text, got true or false",
        ),
        (
            "offload: {mode: atuo}",
            "offload.mode: expected one of auto, compact, compress, observe, off",
        ),
        (
            "offload: {mode: on}",
            "offload.mode: expected one of auto, compact, compress, observe, off",
        ),
        (
            "tools: {inject: no}",
            "tools.inject: expected one of agents, always, never, when_offloading",
        ),
        (
            "upstream: {api_key: $KEY}",
            "upstream.api_key: expected a key of visible ASCII characters, such as ${NAME}",
        ),
        (
            "offload: {store_dir: ../x}",
            "offload.store_dir: expected the directory name that references carry",
        ),
        (
            "upstream: {base_url: api.openai.com}",
            "expected an address without endpoint and query, such as https://api.openai.com/v1",
        ),
        (
            "upstream: {base_url: 'https://user:pw@host/v1'}",
            "such as https://api.openai.com/v1; a key or password goes into `api_key`, or clients send it",
        ),
        (
            "upstream: {api_key: '${NEWLINE}'}",
            "upstream.api_key: expected a key of visible ASCII characters",
        ),
        (
            "tools: {max_rounds: 65}",
            "tools.max_rounds: expected a whole number <= 64 (hidden rounds of one turn)",
        ),
        (
            "retention: 30 days",
            "retention: expected how long records are kept, such as 30d, 12h or 90s",
        ),
        (
            "relay: [files/*]",
            "relay[0]: expected more paths to relay with the tenant's key: globs such as /files/*",
        ),
        # unknown keys
        ("offlaod: {}", "acme.yaml:1: offlaod: unknown key; did you mean `offload`?"),
        (
            "tenant: x\noffload:\n  mode: auto\n  max_tokens: 3",
            "acme.yaml:4: offload.max_tokens: unknown key; did you mean",
        ),
        ("max_total_tokens: 3", "max_total_tokens: unknown key here; it belongs under `offload`"),
        ("tools: {open: true}", "tools.open: unknown key here; it belongs at the top level"),
        # rules and keys
        ("rules: [{offload: {}}]", "acme.yaml:1: rules[0]: expected the key `model`"),
        (
            "rules:\n- model: x\n  offload:\n    mode: x",
            "acme.yaml:4: rules[0].offload.mode: expected one of",
        ),
        (
            "api_keys: [{sha256: 5f2c}]",
            "api_keys[0].sha256: expected 64 hexadecimal digits: the SHA-256 of the key",
        ),
        (
            "api_keys:\n- env: CLIENT\n- {}",
            "acme.yaml:3: api_keys[1]: expected either `sha256` or `env`",
        ),
        (
            f"api_keys: [{{sha256: {DIGEST}, env: CLIENT}}]",
            "api_keys[0]: expected either `sha256` or `env`",
        ),
        ("api_keys: [{env: UNSET}]", "api_keys[0].env: the environment variable UNSET is not set"),
        (
            "api_keys: [{env: sk-proj-1}]",
            "api_keys[0].env: expected the name of the environment variable",
        ),
        (
            "api_keys: [{env: EMPTY}]",
            "the environment variable EMPTY is empty or has white space at its ends",
        ),
        (
            KEYED + "offload: {results: [aider]}",
            "offload.results[0]: expected messages that carry results",
        ),
        (
            KEYED + "offload: {results: [{role: user, prefx: x}]}",
            "offload.results[0].prefx: unknown key; did you mean `prefix`?",
        ),
        # what does not go together
        (
            KEYED + "offload:\n  results: [gptme, {role: user}]",
            "acme.yaml:3: offload.results[1]: expected a `prefix`",
        ),
        ("tenant: x", "acme.yaml:1: expected `api_keys`: without any, nobody can be this tenant"),
        (
            KEYED + "identity: {header: a, jwt: sub}",
            "acme.yaml:2: identity: expected one of `header`, `jwt` and `body`",
        ),
        (
            KEYED + "share_namespace: true\nidentity: {jwt: sub}",
            "acme.yaml:3: identity: contradicts `share_namespace`",
        ),
        (
            KEYED + "identity: {header: 'a b'}",
            "acme.yaml:2: identity.header: expected the name of a header",
        ),
        (KEYED + "open: true", "acme.yaml:2: open: only default.yaml can be open to strangers"),
        (
            KEYED + "tenant: acme-0123456789abcdef",
            "acme.yaml:2: tenant: a name that ends like this could be taken",
        ),
        (
            KEYED + "offload: {cached_read: 1, cache_write: 0.5}",
            "acme.yaml:2: offload.cache_write: expected at least",
        ),
        (
            KEYED + "upstream: {context_window: 1500}",
            "acme.yaml:1: offload.compress.snapshot_tokens: expected less than `upstream.context_window` (1500 tokens)",
        ),
        (
            KEYED + "upstream: {base_url: 'http://[::1/v1'}",
            "acme.yaml:2: upstream.base_url: expected an address",
        ),
        (
            "upstreams: {chat: 5}",
            "upstreams.chat: expected a mapping or nothing, got a whole number",
        ),
    ],
)
def test_bad_files_are_named_with_line_key_and_what_was_expected(text: str, message: str) -> None:
    said = refused(text)
    assert said.startswith("acme.yaml:")
    assert message in said


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "api_keys: [{env: CLIENT}]",
            "default.yaml:1: api_keys: default.yaml is for callers without a file of their own",
        ),
        (
            "open: true\nupstream: {api_key: '${KEY}'}\nidentity: {jwt: sub}",
            "default.yaml:3: identity: only upstream could tell that these callers are who they say",
        ),
        (
            "upstream: {api_key: '${KEY}'}",
            "default.yaml:1: upstream.api_key: every stranger could use this key",
        ),
        (
            "upstreams:\n  messages: {api_key: '${KEY}'}",
            "default.yaml:2: upstreams.messages.api_key: every stranger could use this key",
        ),
        (
            "rules:\n- model: x\n  upstream: {api_key: '${KEY}'}",
            "default.yaml:3: rules[0].upstream.api_key: every stranger could use this key",
        ),
    ],
)
def test_a_default_that_would_be_an_open_relay(text: str, message: str) -> None:
    assert refused(text, "default").startswith(message)


def test_an_open_relay_that_is_meant() -> None:
    assert (
        taken("open: true\nupstream: {api_key: '${KEY}'}", "default").upstream.api_key
        == "sk-upstream"
    )


def test_a_files_name_that_is_no_tenants() -> None:
    assert refused(KEYED, "Acme").startswith(
        "Acme.yaml:1: tenant: expected a name of 1 to 64 characters"
    )


# --- overlays -------------------------------------------------------------------------------------


def test_an_overlay_has_every_leaf_of_both_and_the_upper_one_wins() -> None:
    below, above = {"a": 1, "s": {"a": 1, "b": [1]}}, {"b": 2, "s": {"b": [2], "c": {}}}
    assert overlay(below, above) == {"a": 1, "b": 2, "s": {"a": 1, "b": [2], "c": {}}}
    assert (below["s"], above["s"]) == ({"a": 1, "b": [1]}, {"b": [2], "c": {}})


# --- the schema -----------------------------------------------------------------------------------

SHIPPED = Path(__file__).parents[2] / "policies"


def test_the_schema_in_the_repository_is_the_types() -> None:
    """Else: offload-proxy check --schema > policies/schema.json"""
    assert (SHIPPED / "schema.json").read_bytes() == schema()


def test_the_reference_in_the_docs_is_generated() -> None:
    """Else put what `offload-proxy check --reference` prints at the end of the page."""
    assert (
        (SHIPPED.parent / "docs/policies.md")
        .read_text(encoding="utf-8")
        .endswith(f" below.\n\n{reference()}")
    )


def test_default_yaml_names_every_key_of_its_own() -> None:
    """Left out are the keys of known callers, two APIs beside `messages`, and a part of a rule for
    results."""
    definitions = msgspec.json.decode(schema())["$defs"]
    keys = {key for definition in definitions.values() for key in definition.get("properties", {})}
    named = set(re.findall(r"(\w+):", (SHIPPED / "default.yaml").read_text(encoding="utf-8")))
    assert keys - named == {"api_keys", "sha256", "env", "chat", "responses", "without"}


def test_every_key_of_the_schema_is_described() -> None:
    definitions = msgspec.json.decode(schema())["$defs"]
    for name, definition in definitions.items():
        for key, about in definition.get("properties", {}).items():
            described = {
                **definitions.get(about.get("$ref", "").removeprefix("#/$defs/"), {}),
                **about,
            }
            assert described.get("description"), f"{name}.{key}"
