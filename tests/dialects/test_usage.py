"""What the end of a relayed reply says about the prompt, and what all rounds of a reply used."""

from __future__ import annotations

import json

import pytest
from msgspec import Raw

from proxy.dialects.chat.client_reply import USAGE as CHAT
from proxy.dialects.usage import UsageLedger, prompt_tokens

USAGE = {"prompt_tokens": 120, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 64}}


@pytest.mark.parametrize(
    ("end", "tokens"),
    [
        (json.dumps({"choices": [], "usage": USAGE}), 120),
        (json.dumps({"choices": [], "usage": USAGE}, separators=(",", ":")), 120),
        (f"data: {json.dumps({'usage': USAGE})}\n\ndata: [DONE]\n\n", 120),
        ('data: {"usage":{"prompt_tokens":7}}\n\ndata: {"usage":{"prompt_tokens":120}}\n\n', 120),
        ('{"usage": {"input_tokens": 120}}', 120),
        (json.dumps({"content": 'says "prompt_tokens": 999999', "usage": USAGE}), 120),
        (json.dumps({"arguments": json.dumps({"prompt_tokens": 999999})}), 0),
        ('{"usage": {"prompt_tokens": "120"}}', 0),
        ('{"usage": {"prompt_tokens": 1234567890123}}', 0),
        ('{"usage": null}', 0),
        ("", 0),
    ],
)
def test_prompt_of_a_relayed_reply(end: str, tokens: int) -> None:
    assert prompt_tokens(end.encode()) == tokens


def told(*rounds: object) -> object:
    """What the client sees of the last round's usage after the others."""
    ledger = UsageLedger(CHAT)
    *earlier, last = (Raw(json.dumps(usage).encode()) for usage in rounds)
    for usage in earlier:
        ledger.carry(usage)
    return json.loads(bytes(ledger.total(last)))


def test_what_every_round_used_is_added_up_and_the_prompt_is_the_last_rounds() -> None:
    first = {
        **USAGE,
        "completion_tokens_details": {"reasoning_tokens": 3, "audio_tokens": None},
        "cost": 0.1,
        "cost_details": {"upstream_inference_cost": None},
        "server_tool_use": {"web_search_requests": 2},
    }
    last = {
        **USAGE,
        "prompt_tokens": 200,
        "total_tokens": 205,
        "completion_tokens_details": {"accepted_prediction_tokens": 1, "audio_tokens": 4},
        "cost": 0.2,
        "cost_details": {"upstream_inference_cost": 1},
        "server_tool_use": None,
        "is_byok": True,
    }
    assert told(first, last) == {
        "prompt_tokens": 200,
        "prompt_tokens_details": {"cached_tokens": 64},
        "completion_tokens": 10,
        "total_tokens": 210,
        "completion_tokens_details": {"reasoning_tokens": 3, "accepted_prediction_tokens": 1, "audio_tokens": 4},
        "cost": 0.3,
        "cost_details": {"upstream_inference_cost": 1},
        "server_tool_use": {"web_search_requests": 2},
        "is_byok": True,
    }


def test_details_of_an_earlier_round_stay_if_the_last_one_has_none() -> None:
    shown = told({**USAGE, "completion_tokens_details": {"reasoning_tokens": 3}}, USAGE)
    assert isinstance(shown, dict) and shown["completion_tokens_details"] == {"reasoning_tokens": 3}


@pytest.mark.parametrize("odd", ["7", [7], "x" * 100, {"a": {"b": {"c": {"d": {"e": 1}}}}}, -1, True, 10**30, 1e300])
def test_what_is_no_number_is_the_last_rounds(odd: object) -> None:
    shown = told({**USAGE, "cost": odd, "server_tool_use": odd}, {**USAGE, "cost": odd})
    assert isinstance(shown, dict) and json.dumps(shown["cost"]) == json.dumps(odd)
