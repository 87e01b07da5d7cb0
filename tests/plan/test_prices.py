from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.plan.prices import ASSUMED, FREE, PRICE_LISTS, Prices, price_of

OPENAI, GATEWAY = "https://api.openai.com/v1", "http://litellm:4000"


@pytest.mark.parametrize(
    ("address", "model", "read", "write", "money"),
    [
        (OPENAI, "", 0.1, 1.25, None),
        (OPENAI, "gpt-5.7", 0.1, 1.25, None),
        (OPENAI, "gpt-5.6", 0.1, 1.25, 4.0),
        (OPENAI, "gpt-6.2-sol", 0.05, 1.25, 2.0),
        (OPENAI, "gpt-5.5", 0.1, 1.0, 5.0),
        (OPENAI, "gpt-5.5-mini", 0.1, 1.25, None),
        (OPENAI, "gpt-5-2025-08-07", 0.1, 1.0, 1.25),
        (OPENAI, "gpt-5-codex", 0.1, 1.0, 1.25),
        (OPENAI, "gpt-4o-mini-2024-07-18", 0.5, 1.0, 0.15),
        ("https://mine.openai.azure.com/openai/v1", "gpt-4.1", 0.25, 1.0, 2.0),
        ("https://mine.openai.azure.com/openai", "gpt-4o-prod", 0.5, 1.0, 2.5),
        (
            "https://us-east5-aiplatform.googleapis.com/v1",
            "claude-sonnet-4-5@20250929",
            0.1,
            1.25,
            3.0,
        ),
        (GATEWAY, "openai/gpt-5.4", 0.1, 1.0, 2.5),
        (GATEWAY, "openai/o3-mini", 0.5, 1.0, 1.1),
        ("https://openrouter.ai/api/v1", "anthropic/claude-opus-4.5", 0.1, 1.25, 5.0),
        ("http://10.0.0.3", "us.anthropic.claude-sonnet-4-5-20250929-v1:0", 0.1, 1.25, 3.0),
        ("https://api.anthropic.com", "claude-3-5-haiku-20241022", 0.1, 1.25, 0.8),
        ("https://api.anthropic.com", "claude-opus-5-5", 0.05, 1.25, 4.0),
        (
            "https://generativelanguage.googleapis.com/v1beta/openai",
            "gemini-2.5-flash-lite",
            0.1,
            1.0,
            0.1,
        ),
        ("https://api.deepseek.com", "deepseek-v4-pro", 0.033, 1.0, 0.66),
    ],
)
def test_the_models_name_finds_its_prices(
    address: str, model: str, read: float, write: float, money: float | None
) -> None:
    found = price_of(address, model)
    assert (found.cached_read, found.cache_write, found.input_price) == (read, write, money)
    assert found.source.startswith("https://")


@pytest.mark.parametrize(
    "address", ["http://127.0.0.1:8080/v1", "http://localhost:11434", "http://[::1]:1"]
)
def test_reading_is_free_on_loopback(address: str) -> None:
    assert price_of(address, "gpt-5.5") is FREE
    assert FREE.cached_read == 0


@pytest.mark.parametrize(
    ("address", "model"),
    [
        ("http://vllm:8000/v1", "qwen3"),
        ("http://192.168.1.5:8000", "llama"),
        ("https://notopenai.com", ""),
        ("https://api.openai.com.example.org", ""),
        ("https://x.example", "gpt-oss-120b"),
        ("https://x.example", "deepseek-v4-pro"),
        ("https://x.example", "turbo1"),
        ("http://[::1", ""),
    ],
)
def test_elsewhere_reading_is_not_free(address: str, model: str) -> None:
    assert price_of(address, model) is ASSUMED


def test_long_requests_cost_more_where_the_list_says_so() -> None:
    prices = price_of(OPENAI, "gpt-5.6-luna")
    assert [prices.factor(prompt) for prompt in (272_000, 272_001)] == [1, 2]
    assert price_of(OPENAI, "gpt-5.4-mini").factor(400_000) == 1
    assert price_of("https://api.anthropic.com", "claude-haiku-5-5").factor(100_001) == 5


@pytest.mark.parametrize("prices", PRICE_LISTS, ids=lambda one: one.provider)
def test_every_row_is_found_by_its_own_names(prices: object) -> None:
    assert isinstance(prices, type(PRICE_LISTS[0]))
    for row in prices.named:
        for name in row.models.split():
            assert price_of(f"https://{prices.hosts[0]}", name).models == row.models


@given(st.text(), st.text())
def test_any_text_has_prices(address: str, model: str) -> None:
    assert 0 <= price_of(address, model).cached_read <= price_of(address, model).cache_write


PROVIDERS = {
    "OpenAI": "openai",
    "Anthropic": "anthropic",
    "Gemini": "google",
    "xAI": "x-ai",
    "DeepSeek": "deepseek",
}

PRICED_UNLIKE = {
    "gpt-3.5": "it has no cache, and several prices",
    "gpt-6.2-sol": "not listed yet",
    "mythos-5": "not listed",
    "mythos-5.1": "not listed",
    "gemini-3-flash": "not listed under this name",
    "gemini-3-pro": "not listed under this name",
    "gemini-3.1-pro": "not listed under this name",
}
"""Names of rows that the other table does not have, and why ours has them."""

LAST = datetime(9999, 1, 1, tzinfo=UTC)
"""Prices change on announced dates. We have the last ones, so that no test changes with the
date."""


def test_the_newest_table_of_others_has_the_same_prices() -> None:
    """Pydantic's `genai-prices`, which reads the providers' pages, too."""
    data = pytest.importorskip("genai_prices.data", reason="genai-prices is not installed")
    theirs = {provider.id: provider for provider in data.providers}
    differ = dict[str, str]()
    for prices in PRICE_LISTS:
        for row in prices.named:
            for name in row.models.split():
                found = _found(theirs[PROVIDERS[prices.provider]], name)
                said = "not listed" if found is None else _difference(row, found)
                if said:
                    differ[name] = said
    assert differ.keys() == PRICED_UNLIKE.keys(), differ


def _found(provider: Any, name: str) -> Any:
    spellings = (name, f"claude-{name}", f"claude-{name}".replace(".", "-"))
    return next(filter(None, map(provider.find_model, spellings)), None)


def _difference(row: Prices, model: Any) -> str:
    """What the other table says otherwise. Of a tier it names the last token below, and we a round
    number."""
    found = model.get_prices(LAST)
    plain = _usual(found.input_mtok)
    read = _usual(found.cache_read_mtok or found.input_mtok) / plain
    write = _usual(found.cache_write_mtok or found.input_mtok) / plain
    tiers = getattr(found.input_mtok, "tiers", None) or ()
    long_above = round(tiers[0].start, -3) if tiers else None
    long_factor = float(tiers[0].price) / plain if tiers else row.long_factor
    ours = (
        row.cached_read,
        row.cache_write,
        row.input_price or plain,
        row.long_above,
        row.long_factor,
    )
    others = (read, write, plain, long_above, long_factor)
    return (
        ""
        if ours == pytest.approx(others, abs=0.004, nan_ok=True)
        else f"ours {ours}, theirs {others}"
    )


def _usual(price: Any) -> float:
    return float(getattr(price, "base", price))
