"""Which key is recommended by what upstreams report of their caches, and when."""

from __future__ import annotations

import logging

import pytest

from proxy.policy import Offload
from proxy.requests.advice import ENOUGH, LARGE, LATER, MOST, Adviser, Seen, advice
from proxy.telemetry.outcome import Kind, Outcome

HOST = "http://gate:4000"


@pytest.mark.parametrize(
    ("model", "prices", "seen", "said"),
    [
        ("m", (0.1, 1.25), Seen(ENOUGH, 0, 0), "cached_read: 1, cache_write: 1}"),
        ("m", (0.1, 1.25), Seen(ENOUGH - 1, 0, 0), ""),
        ("m", (1.0, 1.0), Seen(ENOUGH, 0, 0), ""),
        ("m", (0.1, 1.25), Seen(ENOUGH, 9, 9), ""),
        ("m", (0.1, 1.25), Seen(ENOUGH, 9, 0), "{cache_write: 1}"),
        ("m", (0.1, 1.0), Seen(1, 9, 9), "{cache_write: 1.25}"),
        ("m", (0.1, 1.0), Seen(ENOUGH, 9, 0), ""),
        ("m", (0.0, 1.0), Seen(ENOUGH, 0, 0), ""),
        ("openai/gpt-5.5", (0.0, 1.0), Seen(ENOUGH, 9, 0), "{cached_read: 0.1, cache_write: 1}"),
    ],
)
def test_the_key_is_named_that_fits_what_was_seen(
    model: str, prices: tuple[float, float], seen: Seen, said: str
) -> None:
    text = advice(HOST, model, Offload(cached_read=prices[0], cache_write=prices[1]), seen)
    assert text.startswith(f"{HOST} with {model}: ") if said else not text
    assert said in text


def ended(prompt: int = LARGE, cached: int = 0, model: str = "m", messages: int = LATER + 1) -> Outcome:
    return Outcome(
        request_id="r",
        tenant="acme",
        namespace="acme-1",
        kind=Kind.OFFLOADED,
        method="POST",
        path="/",
        prompt_tokens=prompt,
        cached_tokens=cached,
        model=model,
        messages=messages,
    )


def test_it_is_logged_once_and_withdrawn_when_it_no_longer_fits(caplog: pytest.LogCaptureFixture) -> None:
    adviser, offload = Adviser(), Offload(cached_read=0.1, cache_write=1.0)
    with caplog.at_level(logging.WARNING):
        for _ in range(ENOUGH + 5):
            adviser.note(ended(), HOST, offload)
    assert len(caplog.records) == 1 and "prices of a policy" in caplog.text
    assert list(adviser.given) == [("acme", HOST, "m")]
    adviser.note(ended(cached=9), HOST, offload)
    assert not adviser.given


def test_small_and_first_requests_say_nothing() -> None:
    adviser = Adviser()
    for _ in range(2 * ENOUGH):
        adviser.note(ended(prompt=LARGE - 1), HOST, Offload())
        adviser.note(ended(messages=LATER), HOST, Offload())
    assert not adviser.given


def test_names_of_models_that_clients_make_up_are_forgotten() -> None:
    adviser = Adviser()
    for number in range(MOST + 50):
        adviser.note(ended(model=f"m{number}" * 100), HOST, Offload())
    assert len(adviser._seen) == MOST and all(len(model) <= 200 for _, _, model in adviser._seen)
