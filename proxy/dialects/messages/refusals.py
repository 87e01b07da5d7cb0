"""What decides, besides the additions themselves, whether upstream takes what we add to a request."""

from __future__ import annotations

from proxy.core.request import Request
from proxy.dialects.tools import has_tools
from proxy.dialects.values import object_of, text_of


def shape(request: Request) -> str:
    """Return what else decides whether upstream takes what we add: JSON mode, thinking, client tools, streaming."""
    members = request.members
    form = members.get("output_format") or object_of(members.get("output_config")).get("format")
    said = [
        text_of(object_of(form).get("type")),
        text_of(object_of(members.get("thinking")).get("type")),
        text_of(object_of(members.get("tool_choice")).get("type")),
        "tools" if has_tools(request.tools) else "",
        "stream" if request.stream else "",
    ]
    return " ".join(filter(None, said))
