"""What decides, besides the additions themselves, whether upstream takes what we add to a request."""

from __future__ import annotations

from proxy.dialects import refusals
from proxy.dialects.values import object_of, text_of
from proxy.plan.request import Request

REASONING = ("reasoning_effort", "reasoning", "thinking", "enable_thinking")
"""Members that switch reasoning on: OpenAI's, OpenRouter's, and those of DeepSeek and DashScope."""


def shape(request: Request) -> str:
    """Return what else decides whether upstream takes what we add: JSON mode, reasoning, a choice of tools, client
    tools, streaming."""
    members = request.members
    said = [
        text_of(object_of(members.get("tool_choice")).get("type"))[:64],
        text_of(object_of(members.get("response_format")).get("type"))[:64],
        *(bytes(members[name])[:64].decode("utf-8", "replace") for name in REASONING if name in members),
    ]
    return refusals.shape(request, *said)
