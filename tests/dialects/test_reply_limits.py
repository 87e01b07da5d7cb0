"""A request's limit for the reply is lowered to what the window leaves, in every round."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec import Raw

from proxy import rawjson
from proxy.dialects import DIALECTS, Dialect
from proxy.dialects.request import LEAST_REPLY, lowered

LIMITS = ("max_tokens", "max_completion_tokens")


def members(**values: Any) -> dict[str, Raw]:
    return rawjson.members(json.dumps(values).encode())


def changed(left: int | None, added: int = 0, **values: Any) -> dict[str, int]:
    found = lowered(members(**values), LIMITS, left, [b"x" * added])
    return {key: int(bytes(raw)) for key, raw in found.items()}


@pytest.mark.parametrize(
    ("left", "values", "expected"),
    [
        (5_000, {"max_tokens": 9_000}, {"max_tokens": 5_000}),
        (5_000, {"max_tokens": 5_000}, {}),
        (5_000, {"max_tokens": 9_000, "max_completion_tokens": 4_000}, {"max_tokens": 5_000}),
        (5_000, {}, {}),
        (None, {"max_tokens": 9_000}, {}),
        (-300, {"max_tokens": 9_000}, {"max_tokens": LEAST_REPLY}),
        (-300, {"max_tokens": 500}, {}),
        (2_000, {"max_tokens": 9_000, "thinking": {"type": "enabled", "budget_tokens": 4_000}}, {"max_tokens": 4_001}),
        (2_000, {"max_tokens": 9_000, "reasoning": {"max_tokens": 4_000}}, {"max_tokens": 4_001}),
        (2_000, {"max_tokens": 9_000, "thinking_budget": 4_000}, {"max_tokens": 4_001}),
        (2_000, {"max_tokens": 9_000, "thinking": "on", "reasoning": None, "extra_body": [1]}, {"max_tokens": 2_000}),
        (2_000, {"max_tokens": "many"}, {}),
    ],
)
def test_a_limit_is_lowered_to_what_is_left(left: int | None, values: dict[str, Any], expected: dict[str, int]) -> None:
    assert changed(left, **values) == expected


def test_what_a_later_round_adds_leaves_less() -> None:
    assert changed(5_000, 6_000, max_tokens=9_000) == {"max_tokens": 3_000}


ENTRIES = {"chat": "messages", "responses": "input", "messages": "messages"}
FIELDS = {"chat": "max_completion_tokens", "responses": "max_output_tokens", "messages": "max_tokens"}


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
def test_every_dialect_lowers_its_own_limit_and_nothing_else(dialect: Dialect) -> None:
    field, entries = FIELDS[dialect.name], ENTRIES[dialect.name]
    sent = {"model": "m", entries: [{"role": "user", "content": "hi"}], field: 9_000, "odd": {"a": 1}}
    asked = dialect.parse(json.dumps(sent).encode())
    assert dialect.reply_limit(asked, 5_000) == 5_000
    assert dialect.reply_limit(asked, 9_000) is None
    assert json.loads(dialect.with_lower_limit(asked, 5_000)) == sent | {field: 5_000}
    for left, expected in ((5_000, 5_000), (None, 9_000), (20_000, 9_000)):
        assert json.loads(dialect.turn(asked, asked.entries, [], 8, left=left).request())[field] == expected
