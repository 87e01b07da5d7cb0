"""The SDKs, which are imported when a test first uses them: together that takes 5 s of CPU time on a slow machine.

from tests.sdks import openai
"""

from __future__ import annotations

from importlib import import_module
from typing import Any


class Lazy:
    """A module in the place of which this stands until it is used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest asks everything in a module whether it is a fixture
            raise AttributeError(name)
        return getattr(import_module(self._name), name)


anthropic, openai = Lazy("anthropic"), Lazy("openai")
