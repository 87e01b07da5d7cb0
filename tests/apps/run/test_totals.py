"""The sentence at the end of a run."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import pytest

from proxy.apps.run.totals import Adding, Totals
from proxy.policies import load
from proxy.telemetry.outcome import Kind, Outcome, ToolUse


def outcome(kind: Kind = Kind.OFFLOADED, **fields: object) -> Outcome:
    known = {
        "request_id": "r",
        "tenant": "run",
        "namespace": "run",
        "method": "POST",
        "path": "/v1/messages",
    }
    return Outcome(kind=kind, **known, **fields)  # type: ignore[arg-type]


def told(*outcomes: Outcome, recall: bool = True, price: float | None = 4.0) -> str:
    totals = Totals()
    for one in outcomes:
        totals.add(one, price)
    return totals.sentence(Path("/state/run.log"), recall=recall)


def test_what_came_and_what_was_sent() -> None:
    read = ToolUse("read_file", "ok", 100, 3)
    first = outcome(
        tokens_before=900_000, tokens_after=300_000, moved=20,
        cost_before=200_000, cost_after=80_000, tool_uses=(read, ToolUse("grep", "refused", 0, 9)),
    )  # fmt: skip
    second = outcome(
        tokens_before=900_000, tokens_after=340_000, moved=1, tool_uses=(ToolUse("grep", "ok", 5),)
    )
    said = told(first, second)
    assert said == (
        "1.8 M tokens came, 640 k were sent (64 % less, about $0.48 of $0.80); 21 results moved, 4 read back; "
        "`offload-proxy recall` shows them"
    )
    assert told(first, recall=False).endswith("20 results moved, 3 read back")


def test_a_conversation_that_goes_on_lacks_what_moved_earlier() -> None:
    said = told(
        outcome(tokens_before=9_000, tokens_after=3_000, moved=1, compacted=6, compressed=12)
    )
    assert "6 results moved, 12 messages summarised, 0 read back" in said


def test_what_was_only_observed_has_not_moved() -> None:
    one = outcome(
        Kind.OBSERVED, tokens_before=900_000, tokens_after=300_000, moved=20, compacted=20,
        compressed=5, cost_before=200_000, cost_after=80_000,
        words="Only observed; the plan: Moved 20 results.",
    )  # fmt: skip
    assert told(one) == (
        "900 k tokens came in 1 request, and nothing moved: Only observed; the plan: Moved 20 results."
    )


def test_a_run_that_cost_more_says_so() -> None:
    one = outcome(
        tokens_before=2_000, tokens_after=900, moved=1, cost_before=200_000,
        cost_after=220_000,
    )  # fmt: skip
    assert "(55 % less, but about $0.08 dearer than $0.80)" in told(one)


def test_money_is_left_out_where_no_price_is_known() -> None:
    one = outcome(
        model="local",
        tokens_before=2_000,
        tokens_after=900,
        moved=1,
        cost_before=2_000,
        cost_after=900,
    )
    said = told(one, price=None)
    assert said.startswith(
        "2 k tokens came, 900 were sent (55 % less); 1 result moved, 0 read back"
    )


def test_it_says_why_nothing_moved_in_the_words_of_the_largest_request() -> None:
    small = outcome(Kind.UNTOUCHED, tokens_before=100, tokens_after=100, words="waiting: small")
    large = outcome(
        Kind.UNTOUCHED,
        tokens_before=4_224,
        tokens_after=4_224,
        words="waiting: the history is 4,224",
    )
    assert (
        told(small, large, small)
        == "4 k tokens came in 3 requests, and nothing moved: waiting: the history is 4,224"
    )


@pytest.mark.parametrize(
    ("outcomes", "said"),
    [
        ([], "no request came: the command asked no model, or its settings name another address"),
        (
            [outcome(Kind.RELAY)],
            "no request for a reply went upstream; /state/run.log says what came",
        ),
        (
            [outcome(Kind.UNTOUCHED, detail="connection refused")],
            "upstream did not answer: connection refused",
        ),
        (
            [outcome(Kind.UNTOUCHED, status=429), outcome(Kind.UNTOUCHED, status=401)],
            "upstream answered with an error: 401",
        ),
    ],
)
def test_a_run_without_a_reply_says_what_was_wrong(outcomes: list[Outcome], said: str) -> None:
    assert told(*outcomes) == said


def test_no_log_is_named_where_none_stays() -> None:
    totals = Totals()
    totals.add(outcome(Kind.RELAY), None)
    assert totals.sentence(None, recall=False) == "no request for a reply went upstream"


def test_one_reply_is_enough_to_say_what_moved() -> None:
    refused = outcome(Kind.UNTOUCHED, status=401, tokens_before=1_000)
    served = outcome(Kind.UNTOUCHED, status=200, tokens_before=2_000, words="waiting: small")
    assert told(refused, served) == (
        "3 k tokens came in 2 requests, and nothing moved: waiting: small"
    )


@pytest.mark.parametrize(
    ("upstream", "offload", "money"),
    [
        ("https://api.anthropic.com", "{}", True),
        ("http://127.0.0.1:8080", "{}", False),
        ("https://api.anthropic.com", "{input_price: 0}", False),
        ("http://127.0.0.1:8080", "{input_price: 4}", True),
    ],
)
def test_prices_are_the_policys_or_those_of_the_upstream(
    upstream: str, offload: str, money: bool
) -> None:
    written = f"upstreams: {{messages: {{base_url: '{upstream}'}}}}\noffload: {offload}\n"
    policies = load(None, {}, None, {"default": written})
    totals = Totals()
    log = logging.getLogger("test.totals")
    log.addHandler(Adding(totals, policies))
    made = outcome(
        dialect="messages",
        model="claude-opus-5-5",
        tokens_before=9,
        moved=1,
        cost_before=900_000,
        cost_after=90,
    )
    log.warning("request", extra={"fields": msgspec.structs.replace(made, tenant="default")})
    log.warning("request", extra={"fields": msgspec.structs.replace(made, tenant="gone")})
    log.warning("something else")
    assert totals.requests == 2
    assert (totals.money_before > 1) is money
