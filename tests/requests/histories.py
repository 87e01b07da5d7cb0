"""Histories in a line of text: `u` a user's message, `a` the model's, `s` the system's; `|` between messages."""

from __future__ import annotations

import json

from proxy.dialects.chat import CHAT
from proxy.plan.history import BEGINNING, Reading, links
from proxy.plan.preview import Shape
from proxy.requests.lines import Line

ROLES = {"u": "user", "a": "assistant", "s": "system"}
READING = Reading(Shape("/s", 10, 0), 10_000)


def line(said: str, end: int | None = None, scope: str = "ns/m") -> Line:
    """Return the line of this history with a boundary before message `end`, by default behind the last one."""
    parts = [one.partition(" ") for one in said.split("|")]
    raws = [json.dumps({"role": ROLES[role], "content": text}).encode() for role, _, text in parts]
    messages = [CHAT.read(raw, READING, len) for raw in raws]
    return Line(scope, [BEGINNING, *links(BEGINNING, messages)], messages, len(messages) if end is None else end)
