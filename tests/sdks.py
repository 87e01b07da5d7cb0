"""The SDKs, which are imported when a test first uses them: together that takes 5 s of CPU time on
a slow machine. A test whose SDK is not installed skips.

from tests.sdks import openai
"""

from __future__ import annotations

from typing import Any

import pytest


class Lazy:
    """A module in the place of which this stands until it is used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest asks everything in a module whether it is a fixture
            raise AttributeError(name)
        return getattr(
            pytest.importorskip(self._name, reason=f"{self._name} is not installed"), name
        )


anthropic = Lazy("anthropic")
httpx2 = Lazy("httpx2")
openai = Lazy("openai")
redis = Lazy("redis")
