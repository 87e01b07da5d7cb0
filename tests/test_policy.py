"""The frozen policy: what follows from its values, and what its types refuse."""

import msgspec
import pytest

from proxy.policy import Inject, Limits, Mode, Offload, Policy, Tools, Upstream

CHEAP = Policy(
    tenant="acme",
    limits=Limits(concurrent_requests=3),
    model="*-mini",
    upstream=Upstream(context_window=8_000),
    offload=Offload(mode=Mode.COMPACT),
    tools=Tools(max_rounds=2),
)
NONE = Policy(model="gpt-*", offload=Offload(mode=Mode.OFF))
POLICY = Policy(tenant="acme", limits=Limits(concurrent_requests=3), rules=(CHEAP, NONE))


@pytest.mark.parametrize(
    ("model", "mode"),
    [
        ("gpt-5-mini", Mode.COMPACT),
        ("gpt-5", Mode.OFF),
        ("GPT-5", Mode.AUTO),
        ("llama", Mode.AUTO),
        ("", Mode.AUTO),
    ],
)
def test_the_first_rule_that_matches_the_model_counts(model: str, mode: Mode) -> None:
    assert POLICY.for_model(model).offload.mode is mode


def test_without_a_rule_the_policy_is_itself() -> None:
    assert POLICY.for_model("llama") is POLICY


@pytest.mark.parametrize(("given", "compact", "compress"), [(None, 1, 2), (0, 0, 0), (7, 7, 7)])
def test_recent_messages_kept_by_default_and_as_configured(
    given: int | None, compact: int, compress: int
) -> None:
    modes = (Mode.COMPACT, Mode.COMPRESS, Mode.AUTO)
    kept = [Offload(mode=mode, keep_recent_count=given).keep_recent() for mode in modes]
    assert kept == [compact, compress, compress]


@pytest.mark.parametrize(
    ("tool", "excluded"), [("load_skill", True), ("todo", True), ("Todo", False), ("loader", False)]
)
def test_excluded_tools_are_globs(tool: str, excluded: bool) -> None:
    assert Offload(exclude_tools=("load_*", "todo")).excludes(tool) is excluded


def test_a_key_is_never_shown() -> None:
    policy = Policy(upstream=Upstream(api_key="sk-very-secret"), rules=(CHEAP,))
    assert "very-secret" not in f"{policy!r} {policy} {[policy]} {policy.upstream!s}"
    assert "api_key=None" in repr(Upstream())


TAKEN = {
    "base_url": ["https://api.openai.com/v1", "http://127.0.0.1:8080", "http://[::1]:65535/v1/", "http://vllm:0/v1",
                 "https://a_b.example/openai/deployments/x~y"],
    "store_dir": ["/context_store", "context_store", "/a/b.c/d-e", "/..hidden"],
}  # fmt: skip
REFUSED = {
    "base_url": ["", "api.openai.com/v1", "ftp://x/v1", "https://", "https://:80/v1", "https://x:65536/v1",
                 "https://x:port/v1", "https://user:password@x/v1", "https://x/v1?key=1", "https://x/v1#top",
                 "https://x/v 1", "https://x/v1\n", "https://bücher.example/v1"],
    "store_dir": ["", "/", "/a/", "/a//b", "/a/../b", "..", "./a", "/a b", "/a\n", "/ä"],
    "api_key": ["", "sk-1 ", "sk-1\n", "ключ"],
}  # fmt: skip


def converted(key: str, value: str) -> object:
    return getattr(msgspec.convert({key: value}, Offload if key == "store_dir" else Upstream), key)


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, values in TAKEN.items() for value in values]
)
def test_texts_that_are_accepted(key: str, value: str) -> None:
    assert converted(key, value) == value


@pytest.mark.parametrize(
    ("key", "value"), [(key, value) for key, values in REFUSED.items() for value in values]
)
def test_texts_that_are_refused(key: str, value: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        converted(key, value)


@pytest.mark.parametrize(
    ("has_tools", "inject"), [(True, Inject.ALWAYS), (False, Inject.WHEN_OFFLOADING)]
)
def test_policy_for_one_request_injects_as_its_tools_say(has_tools: bool, inject: Inject) -> None:
    policy = Policy()
    chosen = policy.for_request(has_tools=has_tools)
    assert chosen == msgspec.structs.replace(
        policy, tools=msgspec.structs.replace(policy.tools, inject=inject)
    )
    assert chosen.for_request(has_tools=not has_tools) is chosen, "a mode that is named stays"
    assert chosen.for_request(has_tools=has_tools, unsent=True) is chosen
    assert (
        policy.for_request(has_tools=has_tools, unsent=True).tools.inject is Inject.WHEN_OFFLOADING
    )
