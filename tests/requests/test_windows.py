"""What refused and accepted requests and lists of models teach, for whom and for how long. No
upstream, no clock."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest

from proxy.errors import UpstreamUnreachable
from proxy.policies.tenants import Tenant
from proxy.policy import Policy, Upstream
from proxy.requests import windows
from proxy.requests.windows import LIST_AGAIN, STARTING, Known
from proxy.threads import Background, WorkPool
from proxy.upstream.headers import Headers
from tests.requests.scripted import JSON, ScriptedReply, ScriptedUpstream

ME, OTHER = "acme-1", "acme-2"
URL = "http://up/v1"


class Process:
    """One process that learns. Lists of models are asked for with `ask`."""

    def __init__(self) -> None:
        self.upstream = ScriptedUpstream()
        self.background = Background(10)
        self.threads = WorkPool("test")
        self.now = 1_000.0
        self.lessons: list[str] = []
        upstream: Any = self.upstream
        self.known = Known(
            upstream, self.background, self.threads, self.lessons.append, clock=lambda: self.now
        )

    def too_long(
        self, policy: Policy, named: int | None, counted: int, *, measured: bool = True
    ) -> int:
        return self.known.learn_window(ME, policy, "m", named, counted, measured=measured)

    def window(self, policy: Policy, model: str = "m", namespace: str = ME) -> int | None:
        return self.known.window(namespace, policy, model)

    async def ask(
        self, tenant: Tenant, *replies: ScriptedReply | Exception, headers: Headers | None = None
    ) -> int | None:
        """Ask, wait for the answer, and return the window of `m`."""
        self.upstream.replies += replies
        self.known.list_models(tenant, KEY if headers is None else headers)
        await asyncio.gather(*self.background._tasks.values())
        return self.window(tenant.policy, namespace=tenant.namespace)


@pytest.fixture
async def one() -> AsyncIterator[Process]:
    one = Process()
    yield one
    assert all(reply.closed for reply in one.upstream.read)
    one.threads.close()


def policy(window: int | None = None, url: str = URL) -> Policy:
    return Policy(upstream=Upstream(base_url=url, context_window=window))


# -- windows ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "named", "counted", "again", "window"),
    [
        (None, 4096, 9000, 4096, 4096),
        (8000, 4096, 9000, 4096, 4096),
        (None, None, 9000, 7200, 7200),
        (128_000, None, 9000, 7200, 7200),
        (8000, None, 9000, 8000, 8000),
        (4096, 4096, 4000, 3200, 3200),
        (2000, 4096, 9000, 2000, 2000),
        (None, 300, 9000, 300, None),
        (8000, 300, 9000, 300, 8000),
        (None, None, 1000, 800, None),
        (None, None, 0, 1, None),
    ],
)
async def test_window_of_a_refused_request(
    one: Process, given: int | None, named: int | None, counted: int, again: int, window: int | None
) -> None:
    """The request is planned again for upstream's own number, or for 0.8 of what was counted where
    that was to fit. Only a plausible window is remembered, and never more than was known before."""
    assert one.too_long(policy(given), named, counted) == again
    assert one.window(policy(given)) == window
    assert one.lessons == (["refused"] if again == window != given else [])


async def test_a_guess_is_remembered_only_where_everything_was_counted(one: Process) -> None:
    assert one.too_long(policy(), None, 9000, measured=False) == 7200
    assert one.window(policy()) is None and not one.lessons
    assert one.too_long(policy(), 4096, 9000, measured=False) == 4096
    assert one.window(policy()) == 4096, "upstream's own number says more than our count"


async def test_a_request_that_is_known_to_be_too_long_shrinks_no_window(one: Process) -> None:
    for _ in range(5):
        assert one.too_long(policy(), None, 10_000) == 8_000
    assert one.lessons == ["refused"]


async def test_a_window_is_learned_for_one_caller_upstream_and_model(one: Process) -> None:
    one.too_long(policy(), None, 10_000)
    for namespace, where, model in (
        (OTHER, policy(), "m"),
        (ME, policy(url="http://o/v1"), "m"),
        (ME, policy(), "n"),
    ):
        assert one.window(where, model, namespace) is None
    assert one.window(policy()) == 8_000
    assert one.known.learned([ME]) == [(ME, {"upstream": URL, "model": "m", "window": 8_000})]
    assert not one.known.learned([OTHER])


# -- prompts that are cut --------------------------------------------------------------------------

GROWING = [3_000 + 1_500 * number for number in range(12)]
"""The tokens of a conversation's requests, by our count."""


def cut_to(window: int, left: int) -> Callable[[int], int]:
    return lambda counted: counted if counted <= window else left


UPSTREAMS: dict[str, tuple[Callable[[int], int], int | None]] = {
    # what it says of a prompt of so many tokens, and the window that this shows
    "reads all": (lambda counted: counted, None),
    "counts a quarter more": (lambda counted: counted * 5 // 4, None),
    "counts half throughout": (lambda counted: counted // 2, None),
    "says nothing": (lambda counted: 0, None),
    "always says the same": (lambda counted: 50, None),
    "fills its window, as LM Studio does": (cut_to(8_192, 8_150), 8_150),
    # ollama/ollama#17427: what is left of a longer prompt fills half of the window
    "leaves half of its window, as Ollama does": (cut_to(8_192, 4_098), 7_500),
    "leaves more at one time than at another": (
        lambda counted: min(counted, 7_000 - counted % 900),
        7_000,
    ),
    "leaves no more than the prompt grows": (cut_to(4_096, 1_600), None),
    # ollama/ollama#16428
    "leaves out what its cache held": (
        lambda counted: counted if counted == 3_000 else 1_500,
        None,
    ),
    "leaves out most of that": (lambda counted: counted if counted == 3_000 else 1_870, None),
    "writes all anew at times": (lambda counted: counted if counted % 4 == 0 else 2_600, None),
}


@pytest.mark.parametrize(("says", "shows"), UPSTREAMS.values(), ids=UPSTREAMS.keys())
def test_window_that_only_the_count_of_prompts_shows(
    one: Process, says: Callable[[int], int], shows: int | None
) -> None:
    for counted in GROWING:
        if read := says(counted):
            one.known.note_read(ME, policy(), "m", counted, read)
    assert one.window(policy()) == shows
    assert one.lessons == (["cut"] if shows else [])
    assert one.window(policy(), namespace=OTHER) is None and one.window(policy(), "n") is None


def read(one: Process, *counts: tuple[int, int], model: str = "m") -> None:
    for counted, seen in counts:
        one.known.note_read(ME, policy(), model, counted, seen)


def test_cut_prompts_are_told_once_in_the_log_and_in_each_reason(
    one: Process, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "proxy.requests.windows")
    read(one, (3_000, 3_100), (9_000, 4_000), (10_000, 4_000), (11_000, 4_000))
    assert one.known.remark(ME, policy(), "m") == "" and not caplog.records
    read(one, (12_000, 4_000), (13_000, 4_000))
    [said] = caplog.records
    assert (said.getMessage(), said.levelname) == ("upstream cuts prompts", "WARNING")
    assert one.known.remark(ME, policy(), "m") == (
        "Upstream reads only 4,000 tokens of a prompt for m, and does not say so; that counts as its window."
    )
    assert one.window(policy(32_000)) == 4_000, "what it does goes before what it was said to do"
    read(one, (2_500, 2_400), (3_600, 3_500))
    assert "4,000 tokens" in one.known.remark(ME, policy(), "m"), "it is still planned for"
    read(one, (5_000, 5_100))
    assert one.known.remark(ME, policy(), "m") == "" and one.window(policy()) is None


def test_what_may_be_a_cut_is_only_told(one: Process, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "proxy.requests.windows")
    read(one, *((counted, 2_050) for counted in GROWING))
    assert one.window(policy()) is None, "no prompt was read whole, so that our count may be wrong"
    [said] = caplog.records
    assert (said.getMessage(), said.levelname) == ("upstream may cut prompts", "WARNING")
    told = one.known.remark(ME, policy(), "m")
    assert told.startswith(
        f"Upstream counted 2,050 tokens of a prompt of {GROWING[-1]:,} for m: perhaps it cuts"
    )
    read(one, (3_000, 3_000))
    assert one.known.remark(ME, policy(), "m") == ""


def test_conversations_side_by_side_show_no_window(one: Process) -> None:
    """Requests in a row must be longer each time."""
    for step in range(10):
        read(one, (3_000 + step, 3_000), (60_000 + 100 * step, 4_000))
    assert one.window(policy()) is None and one.known.remark(ME, policy(), "m") == ""


def test_a_longer_prompt_that_was_read_whole_speaks_against_a_window(one: Process) -> None:
    read(
        one,
        (30_000, 30_000),
        (9_000, 4_000),
        *((number, 4_000) for number in range(10_000, 15_000, 1_000)),
    )
    assert one.window(policy()) is None


def test_a_models_name_in_a_reason_writes_nothing_into_a_header(one: Process) -> None:
    name = "org/qwen3.5:9b\r\nx-evil: é"
    read(one, *((counted, 2_050) for counted in GROWING), model=name)
    assert "for org/qwen3.5:9b??x-evil:??:" in one.known.remark(ME, policy(), name)


async def test_no_namespace_pushes_out_what_another_has_learned(one: Process) -> None:
    one.known.learn_window(ME, policy(), "m", 4096, 9000, measured=True)
    for number in range(2 * windows.LEARNED):
        one.known.learn_window("mallory", policy(), f"m{number}", 4096, 9000, measured=True)
    assert one.window(policy()) == 4096
    assert one.window(policy(), "m0", "mallory") is None


async def test_who_has_learned_nothing_takes_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "NAMESPACES", 10)
    one = Process()
    one.known.learn_window(ME, policy(), "m", 4096, 9000, measured=True)
    for number in range(20):
        assert one.window(policy(), "m", f"made-up-{number}") is None
    assert one.window(policy()) == 4096
    one.threads.close()


# -- lists of models -------------------------------------------------------------------------------

KEY = Headers([(b"Authorization", b"Bearer mine"), (b"Cookie", b"a=1"), (b"X-Offload", b"on")])
LIST = json.dumps({"data": [{"id": "m", "max_model_len": 32_768}, {"id": "unknown"}]}).encode()


def tenant(namespace: str = ME, **upstream: Any) -> Tenant:
    return Tenant(
        Policy(tenant="acme", upstream=Upstream(base_url="http://up/v1/", **upstream)), namespace
    )


def reply(body: bytes = LIST, status: int = 200, *headers: tuple[bytes, bytes]) -> ScriptedReply:
    return ScriptedReply(body, status=status, headers=[JSON, *headers])


async def test_a_callers_own_key_asks_for_that_caller(one: Process) -> None:
    assert await one.ask(tenant(), reply()) == 32_768
    [asked] = one.upstream.requests
    assert (asked.method, asked.url, asked.content) == ("GET", "http://up/v1/models", b"")
    assert asked.headers == [(b"Authorization", b"Bearer mine"), (b"accept", b"application/json")]
    assert one.window(tenant().policy, namespace=OTHER) is None
    assert one.window(tenant().policy, "unknown") is None
    assert one.lessons == ["listed"]


async def test_a_tenants_key_asks_for_all_its_callers(one: Process) -> None:
    keyed = tenant(api_key="sk-acme")
    assert await one.ask(keyed, reply()) == 32_768
    assert one.upstream.requests[0].headers[0] == (b"authorization", b"Bearer sk-acme")
    assert one.window(keyed.policy, namespace=OTHER) == 32_768
    assert one.window(tenant(api_key="sk-other").policy) is None
    assert one.window(tenant().policy) is None


async def test_anthropic_is_asked_as_it_expects(one: Process) -> None:
    claude = msgspec.structs.replace(tenant(api_key="sk-acme"), key_header=b"authorization")
    body = json.dumps(
        {"data": [{"id": "m", "max_input_tokens": 200_000, "max_tokens": 64_000}]}
    ).encode()
    headers = Headers([*KEY, (b"anthropic-version", b"2023-06-01")])
    assert await one.ask(claude, reply(body), headers=headers) == 200_000
    [asked] = one.upstream.requests
    assert asked.url == "http://up/v1/models?limit=1000"
    assert asked.headers[:2] == [(b"x-api-key", b"sk-acme"), (b"anthropic-version", b"2023-06-01")]


async def test_the_policy_and_refusals_know_better_than_the_list(one: Process) -> None:
    where = tenant().policy
    assert await one.ask(tenant(), reply()) == 32_768
    given = msgspec.structs.replace(
        where, upstream=msgspec.structs.replace(where.upstream, context_window=64_000)
    )
    assert one.window(given) == 64_000
    one.too_long(where, 8_000, 9_000)
    assert one.window(where) == 8_000


async def test_it_is_asked_once_for_each_credential_and_never_waited_for(one: Process) -> None:
    late = asyncio.Event()
    one.upstream.replies = [ScriptedReply(LIST, late, headers=[JSON])]
    for _ in range(3):
        one.known.list_models(tenant(), KEY)
    assert one.window(tenant().policy) is None
    late.set()
    assert await one.ask(tenant()) == 32_768
    one.now += 1e9
    assert await one.ask(tenant()) == 32_768
    assert len(one.upstream.requests) == 1
    await one.ask(tenant(OTHER), reply())
    assert len(one.upstream.requests) == 2


@pytest.mark.parametrize(
    ("fault", "later"),
    [
        (UpstreamUnreachable("gone"), STARTING),
        (reply(b"", 503), LIST_AGAIN),
        (reply(b"", 429), LIST_AGAIN),
        (ScriptedReply(60.0, headers=[JSON]), LIST_AGAIN),
    ],
    ids=["no connection", "a server's fault", "too many requests", "silence"],
)
async def test_an_upstream_that_fails_is_asked_again_later(
    one: Process, fault: Any, later: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(windows, "LIST_SECONDS", 0.01)
        assert await one.ask(tenant(), fault) is None
    one.now += later - 1.0
    assert await one.ask(tenant()) is None and len(one.upstream.requests) == 1
    one.now += 1.0
    assert await one.ask(tenant(), reply()) == 32_768


@pytest.mark.parametrize(
    "answer", [reply(b"{}", 401), reply(b"{}", 404), reply(b"<html>"), reply(b"[" * 9_999)]
)
async def test_an_answer_without_a_list_is_final(one: Process, answer: ScriptedReply) -> None:
    assert await one.ask(tenant(), answer) is None
    one.now += 2 * LIST_AGAIN
    assert await one.ask(tenant()) is None
    assert len(one.upstream.requests) == 1 and not one.lessons


async def test_compressed_and_large_lists(one: Process) -> None:
    many = [{"id": f"model-{number}", "context_length": 1_000 + number} for number in range(1_100)]
    body = json.dumps({"data": [*many, {"id": "m", "context_window": 9_000}]}).encode()
    coded = reply(gzip.compress(body), 200, (b"Content-Encoding", b"gzip"))
    assert await one.ask(tenant(), coded) == 9_000
    assert one.window(tenant().policy, "model-1007") == 2_007
