"""What the end of a relayed reply says about the prompt, and what all rounds of a reply used."""

from __future__ import annotations

import json

import pytest
from msgspec import Raw

from proxy.dialects.usage import Reported, UsageLedger, merged, reported
from proxy.rawjson import object_of

USAGE = {
    "prompt_tokens": 120,
    "completion_tokens": 5,
    "prompt_tokens_details": {"cached_tokens": 64},
}


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
    said = reported(end.encode())
    assert (said.prompt if said else 0) == tokens


OPENAI = {"cached_tokens": 64, "cache_write_tokens": 32}
HIT = {"prompt_cache_hit_tokens": 64, "prompt_cache_miss_tokens": 56}
LITELLM = {"cache_creation_input_tokens": 32, "cache_read_input_tokens": 64}
USAGES: dict[str, tuple[dict[str, object], Reported]] = {
    "chat, to GPT-5.5": (USAGE, Reported(120, 5, 64)),
    "chat, from GPT-5.6": ({**USAGE, "prompt_tokens_details": OPENAI}, Reported(120, 5, 64, 32)),
    "chat, DeepSeek": ({"prompt_tokens": 120, "completion_tokens": 5, **HIT}, Reported(120, 5, 64)),
    "chat, LiteLLM": ({**USAGE, **LITELLM}, Reported(120, 5, 64, 32)),
    "Responses": (
        {"input_tokens": 120, "output_tokens": 5, "input_tokens_details": OPENAI},
        Reported(120, 5, 64, 32),
    ),
    "Messages": ({"input_tokens": 24, "output_tokens": 5, **LITELLM}, Reported(120, 5, 64, 32)),
    "a server without a cache": (
        {"prompt_tokens": 120, "completion_tokens": 5},
        Reported(120, 5, None),
    ),
}


@pytest.mark.parametrize(("usage", "said"), USAGES.values(), ids=USAGES)
def test_reads_and_writes_of_the_cache_in_all_spellings(
    usage: dict[str, object], said: Reported
) -> None:
    """Both of a relayed reply and of the rounds of one that we follow."""
    raw = json.dumps(usage).encode()
    assert reported(b'{"usage": ' + raw + b"}") == said
    ledger = UsageLedger()
    ledger.add(Raw(raw))
    ledger.add(Raw(raw))
    spent = ledger.spent
    once = (said.prompt, said.completion, said.cached or 0, said.written or 0)
    assert (spent.prompt, spent.completion, spent.cached, spent.written) == tuple(
        2 * count for count in once
    )
    assert (spent.cache_told, spent.largest, spent.counted_rounds) == (
        said.cached is not None,
        said.prompt,
        2,
    )


def test_a_stream_says_what_it_read_at_its_beginning_and_what_it_wrote_at_its_end() -> None:
    begun = {"input_tokens": 5, **LITELLM, "output_tokens": 1}
    ended = {"output_tokens": 7, "input_tokens": None}
    stream = "".join(f"data: {json.dumps({'usage': usage})}\n\n" for usage in (begun, ended))
    assert reported(stream.encode()) == Reported(101, 7, 64, 32)
    whole = merged(object_of(Raw(json.dumps(begun).encode())), Raw(json.dumps(ended).encode()))
    assert {key: int(bytes(raw)) for key, raw in whole.items()} == begun | {"output_tokens": 7}


def told(*rounds: object) -> object:
    """What the client sees of the last round's usage after the others."""
    ledger = UsageLedger()
    *earlier, last = (Raw(json.dumps(usage).encode()) for usage in rounds)
    for usage in earlier:
        ledger.carry(usage)
    return json.loads(bytes(ledger.total(last)))


def test_what_every_round_used_is_added_up_and_the_prompt_is_the_last_rounds() -> None:
    first = {
        **USAGE,
        "total_tokens": 125,
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
        "completion_tokens_details": {
            "reasoning_tokens": 3,
            "accepted_prediction_tokens": 1,
            "audio_tokens": 4,
        },
        "cost": 0.3,
        "cost_details": {"upstream_inference_cost": 1},
        "server_tool_use": {"web_search_requests": 2},
        "is_byok": True,
    }


def test_details_of_an_earlier_round_stay_if_the_last_one_has_none() -> None:
    shown = told({**USAGE, "completion_tokens_details": {"reasoning_tokens": 3}}, USAGE)
    assert isinstance(shown, dict) and shown["completion_tokens_details"] == {"reasoning_tokens": 3}


@pytest.mark.parametrize(
    "odd", ["7", [7], "x" * 100, {"a": {"b": {"c": {"d": {"e": 1}}}}}, -1, True, 10**30, 1e300]
)
def test_what_is_no_number_is_the_last_rounds(odd: object) -> None:
    shown = told({**USAGE, "cost": odd, "server_tool_use": odd}, {**USAGE, "cost": odd})
    assert isinstance(shown, dict) and json.dumps(shown["cost"]) == json.dumps(odd)
