"""Results in user messages: every dialect knows them by the policy's rules."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.dialects import Dialect
from proxy.dialects.chat import CHAT
from proxy.dialects.messages import MESSAGES
from proxy.dialects.responses import RESPONSES
from proxy.plan.message import Reading
from proxy.plan.preview import Shape
from proxy.plan.texts import PRESETS, Carries, ResultPreset

SHAPE = Shape(store_dir="/context_store", preview_chars=100)
READING = Reading(SHAPE, 20_000, PRESETS[ResultPreset.SMOLAGENTS])


@pytest.mark.parametrize("dialect", [CHAT, RESPONSES, MESSAGES], ids=lambda dialect: dialect.name)
@pytest.mark.parametrize(
    ("texts", "carries"),
    [
        (["Observation:\nfound"], Carries.YES),
        (["Observation:\n", "found"], Carries.YES),
        (["Found"], Carries.NO),
        (["Observation:\nfound\nNew task:\nNever write to /etc."], Carries.NO),
        (["Observation:\nfound", "\nNew task:\nNever write to /etc."], Carries.NO),
    ],
)
def test_observations_are_results(dialect: Dialect, texts: list[str], carries: Carries) -> None:
    kind = "input_text" if dialect is RESPONSES else "text"
    content: Any = [{"type": kind, "text": text} for text in texts]
    assert dialect.read(json.dumps({"role": "user", "content": content}).encode(), READING, len).carries is carries
