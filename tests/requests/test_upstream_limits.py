"""What one refused request teaches, and for how long."""

from __future__ import annotations

import pytest

from proxy.core.policy import Policy, Upstream
from proxy.dialects.chat import CHAT
from proxy.requests import upstream_limits
from proxy.requests.upstream_limits import UpstreamLimits


def policy(window: int | None = None, url: str = "http://up/v1") -> Policy:
    return Policy(upstream=Upstream(base_url=url, context_window=window))


@pytest.mark.parametrize(
    ("known", "body", "counted", "window"),
    [
        (None, b"maximum context length is 4096 tokens", 9000, 4096),
        (8000, b"maximum context length is 4096 tokens", 9000, 4096),
        (None, b"prompt is too long", 9000, 7200),
        (128_000, b"prompt is too long", 9000, 7200),
        (8000, b"prompt is too long", 9000, 8000),
        (4096, b"maximum context length is 4096 tokens", 4000, 3200),
        (2000, b"maximum context length is 4096 tokens", 9000, 2000),
        (None, b"prompt is too long", 0, 1),
    ],
)
def test_window_learned_from_a_refused_request(known: int | None, body: bytes, counted: int, window: int) -> None:
    """Upstream's own word, or 0.8 of what was counted where that was to fit; never more than was known before."""
    one = UpstreamLimits()
    one.overflowed(policy(known), "m", CHAT.window(body), counted)
    assert one.window(policy(known), "m") == window


def test_limits_are_learned_for_one_upstream_and_model() -> None:
    one = UpstreamLimits()
    one.overflowed(policy(), "m", None, 1000)
    one.refused(policy(), "m")
    for other, model in ((policy(), "n"), (policy(url="http://other/v1"), "m")):
        assert one.window(other, model) is None
        assert not one.refuses(other, model)
    assert one.refuses(policy(), "m")


def test_oldest_model_is_forgotten_above_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream_limits, "MODELS", 3)
    one = UpstreamLimits()
    for model in "abcd":
        one.refused(policy(), model)
    assert [one.refuses(policy(), model) for model in "abcd"] == [False, True, True, True]
