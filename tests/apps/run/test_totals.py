"""The sentence at the end of a run."""

from __future__ import annotations

import pytest

from proxy.apps.run.totals import Totals, rounded
from proxy.telemetry.outcome import Kind, Outcome, ToolUse


def outcome(kind: Kind = Kind.OFFLOADED, **fields: object) -> Outcome:
    known = {"request_id": "r", "tenant": "run", "namespace": "run", "method": "POST", "path": "/v1/messages"}
    return Outcome(kind=kind, **known, **fields)  # type: ignore[arg-type]


def told(*outcomes: Outcome, recall: bool = True) -> str:
    totals = Totals()
    for one in outcomes:
        totals.add(one)
    return totals.sentence(recall=recall)


def test_what_came_and_what_was_sent() -> None:
    read = ToolUse("read_file", "ok", 100, 3)
    first = outcome(
        model="claude-opus-5-5", tokens_before=900_000, tokens_after=300_000, moved=20,
        cost_before=200_000, cost_after=80_000, tool_uses=(read, ToolUse("grep", "refused", 0, 9)),
    )  # fmt: skip
    second = outcome(tokens_before=900_000, tokens_after=340_000, moved=1, tool_uses=(ToolUse("grep", "ok", 5),))
    said = told(first, second)
    assert said == (
        "1.8 M tokens came, 640 k were sent (64 % less, about $0.48 of $0.80); 21 results moved, 4 read back; "
        "`offload-proxy recall` shows them"
    )
    assert told(first, recall=False).endswith("20 results moved, 3 read back")


def test_a_conversation_that_goes_on_lacks_what_moved_earlier() -> None:
    said = told(outcome(tokens_before=9_000, tokens_after=3_000, moved=1, compacted=6, compressed=12))
    assert "6 results moved, 12 messages summarised, 0 read back" in said


def test_money_is_left_out_where_no_price_is_known() -> None:
    one = outcome(model="local", tokens_before=2_000, tokens_after=900, moved=1, cost_before=2_000, cost_after=900)
    assert told(one).startswith("2 k tokens came, 900 were sent (55 % less); 1 result moved, 0 read back")


def test_it_says_why_nothing_moved_in_the_words_of_the_largest_request() -> None:
    small = outcome(Kind.UNTOUCHED, tokens_before=100, tokens_after=100, words="waiting: small")
    large = outcome(Kind.UNTOUCHED, tokens_before=4_224, tokens_after=4_224, words="waiting: the history is 4,224")
    assert (
        told(small, large, small) == "4 k tokens came in 3 requests, and nothing moved: waiting: the history is 4,224"
    )


@pytest.mark.parametrize(
    ("outcomes", "said"),
    [
        ([], "no request came: the command asked no model, or its settings name another address"),
        ([outcome(Kind.RELAY)], "no request for a reply came that the proxy could serve; its log says what came"),
        ([outcome(Kind.UNTOUCHED, detail="connection refused")], "upstream did not answer: connection refused"),
    ],
)
def test_a_run_without_a_reply_says_what_was_wrong(outcomes: list[Outcome], said: str) -> None:
    assert told(*outcomes) == said


@pytest.mark.parametrize(
    ("tokens", "said"), [(0, "0"), (999, "999"), (1_000, "1 k"), (999_499, "999 k"), (999_500, "1.0 M")]
)
def test_rounded(tokens: int, said: str) -> None:
    assert rounded(tokens) == said
