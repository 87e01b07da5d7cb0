"""What decides, besides the additions themselves, whether upstream takes what we add to a request."""

from __future__ import annotations

from proxy.dialects import refusals
from proxy.dialects.values import object_of, text_of
from proxy.plan.request import Request


def shape(request: Request) -> str:
    """Return what else decides whether upstream takes what we add: JSON mode, reasoning, a choice of tools, client
    tools, streaming."""
    members = request.members
    said = [
        text_of(object_of(members.get("tool_choice")).get("type"))[:64],
        text_of(object_of(object_of(members.get("text")).get("format")).get("type"))[:64],
        bytes(members.get("reasoning", b""))[:64].decode("utf-8", "replace"),
    ]
    return refusals.shape(request, *said)
