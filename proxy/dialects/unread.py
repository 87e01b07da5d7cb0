"""Finds calls of our tools that no codec has read: they stand where no API has calls.

Servers write calls in ever new places: beside the message, in a part of its content, as a call of
another kind, or in another API's form. A codec hides each call of ours that it reads, so one in
what the client is about to get was not read. Texts only mention our tools, and arguments, results
and what is repeated of the request are no calls of ours.
"""

from __future__ import annotations

from collections.abc import Collection

from msgspec import Raw

from proxy import rawjson
from proxy.dialects.reply import ToolNames
from proxy.rawjson import NotJson, text_of

NAMING = frozenset(("name", "tool_name", "function_name", "function", "tool", "recipient_name"))
"""Members in which servers name the tool that is called."""
OTHERS = ("namespace", "server_label", "server_name")
"""Members of a call that say whose tool it is: one of a client's namespace, or of an MCP server
that upstream asks."""
GIVEN = frozenset(("arguments", "input", "parameters", "args", "action"))
"""Members with what a tool is called with."""
REPEATED = frozenset(
    (
        "tools",
        "tool_choice",
        "functions",
        "messages",
        "instructions",
        "prompt",
        "metadata",
        "text",
        "error",
    )
)
"""Members with what upstream repeats of the request, or complains about."""
RESULTS = ("_result", "_output")
"""How types end of what upstream's own tools have found."""
DEEPEST = 32
"""Levels within which calls stand; what is deeper counts as one."""


def calls_in(data: bytes | Raw, names: ToolNames, read: Collection[str], path: str = "") -> bool:
    """Whether JSON that the client is about to get has a call of one of our tools, but for what
    stands at the places that were `read`, each a path such as `.a[].b`. A text is never looked
    into."""
    if path in read or not names.mentioned(bytes(data)):
        return False
    if path.count(".") + path.count("[]") > DEEPEST:
        return True
    try:
        if rawjson.is_array(Raw(data)):
            return any(_below(raw, names, read, f"{path}[]") for raw in rawjson.elements(data))
        members = rawjson.members(data)
    except NotJson:
        return names.named_in(bytes(data))
    if text_of(members.get("type")).endswith(RESULTS):
        return False
    others = any(text_of(members.get(key)) for key in OTHERS)
    if not others and any(names.recognised(text_of(members.get(key))) for key in NAMING):
        return True
    skipped = GIVEN | REPEATED
    return any(
        _below(raw, names, read, f"{path}.{key}")
        for key, raw in members.items()
        if key not in skipped
    )


def _below(raw: Raw, names: ToolNames, read: Collection[str], path: str) -> bool:
    nests = rawjson.is_array(raw) or rawjson.is_object(raw)
    return nests and calls_in(raw, names, read, path)
