"""Reads a Responses request: decodes the few members that the proxy needs, and groups the input
into entries.

An entry is what one party said at a time: an item of the client's, or everything that the model
sent in one reply. The items of a reply stay together (a `reasoning` item is worthless without the
call after it, and a call without its reasoning is refused), so they are one entry: their bytes,
joined by commas. An `input` that is a string is one entry, too, and keeps that form as long as it
is alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import msgspec
from msgspec import Raw

from proxy import rawjson
from proxy.dialects.entries import Entry
from proxy.dialects.request import RoundRequest, bounded
from proxy.plan.turn import Continuation, Reason, Request
from proxy.rawjson import NULL, Members, string, text_of

LIMITS = ("max_output_tokens",)
_CALLS = (
    "function_call",
    "custom_tool_call",
    "local_shell_call",
    "shell_call",
    "apply_patch_call",
    "computer_call",
)
_OUTPUTS = tuple(f"{call}_output" for call in _CALLS)
APPROVAL = "mcp_approval_request"
APPROVED = "mcp_approval_response"
"""A question whether upstream may call a tool. It has no `call_id`, and the answer names its id."""
ANSWERED = frozenset((*_CALLS, APPROVAL))
"""Calls that the client answers. All others are upstream's own business."""
OUTPUTS = frozenset((*_OUTPUTS, APPROVED))
"""Results of calls that the client answers. Every other item with such a name belongs to the
model's reply."""

SEARCH = "tool_search_call"
FOUND = "tool_search_output"
"""A search for tools, and the tools that it found. Upstream searches itself, or has the client do
it (Codex)."""
CLIENT = "client"

KNOWN = frozenset(
    (
        *(
            "model",
            "input",
            "instructions",
            "tools",
            "tool_choice",
            "parallel_tool_calls",
            "max_tool_calls",
            "stream",
        ),
        *(
            "stream_options",
            "max_output_tokens",
            "temperature",
            "top_p",
            "top_k",
            "top_logprobs",
            "text",
            "reasoning",
        ),
        *(
            "include",
            "store",
            "metadata",
            "truncation",
            "service_tier",
            "user",
            "safety_identifier",
            "moderation",
        ),
        *(
            "prompt_cache_key",
            "prompt_cache_options",
            "prompt_cache_retention",
            "client_metadata",
            "background",
        ),
        *("previous_response_id", "conversation", "prompt", "context_management"),
        *(
            "frequency_penalty",
            "presence_penalty",
            "provider",
            "models",
            "plugins",
            "session_id",
            "thinking",
        ),
    )
)

ITEM = ("id", "status", "internal_chat_message_metadata_passthrough")
"""The last one says when and in which turn of Codex an item was made; it sends it to a provider
named OpenAI."""
CALL = (*ITEM, "call_id", "name", "namespace")
OUTPUT = (*CALL, "output")
ITEMS = {
    **dict.fromkeys(_OUTPUTS, OUTPUT),
    "message": (*ITEM, "role", "content", "phase"),
    "reasoning": (*ITEM, "summary", "content", "encrypted_content"),
    "function_call": (*CALL, "arguments"),
    "custom_tool_call": (*CALL, "input"),
    "local_shell_call": (*CALL, "action"),
    "shell_call": (*CALL, "action", "environment"),
    "shell_call_output": (*OUTPUT, "max_output_length"),
    "apply_patch_call": (*CALL, "operation"),
    "computer_call": (*CALL, "action", "actions", "pending_safety_checks"),
    "computer_call_output": (*OUTPUT, "acknowledged_safety_checks"),
    APPROVAL: (*ITEM, "name", "arguments", "server_label"),
    APPROVED: (*ITEM, "approval_request_id", "approve", "reason"),
    "mcp_call": (
        *ITEM,
        "name",
        "arguments",
        "server_label",
        "approval_request_id",
        "error",
        "output",
    ),
    "file_search_call": (*ITEM, "queries", "results"),
    "web_search_call": (*ITEM, "action"),
    "code_interpreter_call": (*ITEM, "code", "container_id", "outputs"),
    "image_generation_call": (
        *(
            *ITEM,
            "action",
            "background",
            "error",
            "output_format",
            "quality",
            "result",
            "revised_prompt",
            "size",
        ),
        "svg_usage",
    ),
}
"""The members of items, by type, that may be moved or cut: readers get them as text or as JSON."""
PARTS = {
    "input_text": ("text",),
    "output_text": ("text", "annotations", "logprobs"),
    "text": ("text",),
    "refusal": ("refusal",),
    "input_image": ("detail", "file_id", "image_url"),
    "input_file": ("detail", "file_data", "file_id", "file_url", "filename"),
    "computer_screenshot": ("file_id", "image_url"),
    "reasoning_text": ("text",),
    "summary_text": ("text",),
    "logs": ("logs",),  # of code that upstream ran
    "image": ("url",),
    "": ("outcome", "stdout", "stderr"),  # of a shell
}
"""The members of an item's parts, by type, that may be moved or cut."""

REPLIES = frozenset(
    (
        *(
            kind
            for kind in ITEMS
            if kind != "message" and not kind.endswith(("_output", "_response"))
        ),
        *(SEARCH, FOUND, "mcp_list_tools", "program", "program_output", "item_reference"),
    )
)
"""The items of a reply besides its messages. What is not among them stands by itself."""

NAMESPACE = "namespace"
"""The member of a call that names its group of tools, as Codex has one for each MCP server."""

COMPACTIONS = frozenset(("compaction", "compaction_summary"))
"""Upstream's own encrypted summaries, which nobody else can read."""

TRIGGER = "compaction_trigger"
"""An item by which the client has upstream compact the history."""

BARRED = {
    "background": b"false",
    **dict.fromkeys(
        ("previous_response_id", "conversation", "prompt", "context_management"), b"null"
    ),
}
"""See `Dialect.barred`. With all but `background`, part of the history, or its compaction, is
upstream's."""


class ItemKind(msgspec.Struct, frozen=True, gc=False):
    """What an item is. Messages need no type."""

    type: str = "message"
    role: str = ""
    execution: str | None = None

    @property
    def answers(self) -> bool:
        """Whether the item is the client's result of a call."""
        return self.type in OUTPUTS or (self.type == FOUND and self.execution == CLIENT)

    @property
    def replies(self) -> bool:
        """Whether the item is known to belong to a reply of the model."""
        if self.type == "message" or self.role:
            return self.role == "assistant"
        return self.type in REPLIES and not self.answers


_kind = msgspec.json.Decoder(ItemKind)
_kinds = msgspec.json.Decoder(list[ItemKind])


def split(members: Members) -> tuple[list[Raw], str, dict[str, Any]]:
    raw = members.get("input", NULL)
    if rawjson.is_array(raw):
        items = bounded(raw, Reason.TOO_MANY_MESSAGES)
        kinds = rawjson.decode(_kinds, raw)[0]
    else:
        items = given(members)
        kinds = list(map(kind, items))
    found: list[Raw] = []
    for replies, run in groupby(zip(items, kinds, strict=True), key=lambda one: one[1].replies):
        raws = [raw for raw, _ in run]
        found += [Raw(b",".join(raws))] if replies and len(raws) > 1 else raws
    more = {
        "preamble": members.get("instructions", NULL),
        "keeps": stores(members),
        "replied": any(kind.replies or kind.type in COMPACTIONS for kind in kinds),
        "continues": text_of(members.get("previous_response_id")),
    }
    return found, TRIGGER if any(kind.type == TRIGGER for kind in kinds) else "", more


def continued(request: Request, continuation: Continuation) -> bytes:
    """It goes on from the last of several rounds, with our outputs before its input."""
    members = request.members | {"previous_response_id": string(continuation.rounds[-1])}
    if continuation.after:
        members["input"] = joined([*continuation.after, *given(request.members)])
    return rawjson.encode(members)


def given(members: Members) -> list[Raw]:
    """Return the items of a request's `input`; a string stands for one. Raises NotJson."""
    raw = members.get("input", NULL)
    if rawjson.is_null(raw) or rawjson.is_string(raw):
        return [] if rawjson.is_null(raw) else [raw]
    return rawjson.elements(raw)


def stores(members: Members) -> bool:
    """Whether upstream keeps replies, so that items may be named by their ids."""
    return bytes(members.get("store", b"")) != b"false"


def kind(item: Entry) -> ItemKind:
    """Return what an item is. Raises NotJson for anything but an object, or the string that stands
    for a message."""
    if rawjson.is_string(Raw(item)):
        return ItemKind(role="user")
    return rawjson.decode(_kind, item)[0]


# -- entries ---------------------------------------------------------------------------------------


def items_of(entry: Entry) -> list[Raw]:
    """Return an entry's items. Raises NotJson."""
    return rawjson.elements(b"[%b]" % bytes(entry))


def members_of(item: Raw) -> Members:
    """Return an item's members; a string stands for a user's message. Raises NotJson."""
    return (
        {"role": Raw(b'"user"'), "content": item}
        if rawjson.is_string(item)
        else rawjson.members(item)
    )


def joined(entries: Sequence[Entry]) -> Raw:
    """Return the `input` that consists of these entries. A string stays one if nothing else is
    there."""
    if len(entries) == 1 and rawjson.is_string(Raw(entries[0])):
        return Raw(entries[0])
    objects = (
        rawjson.encode(members_of(Raw(one))) if rawjson.is_string(Raw(one)) else one
        for one in entries
    )
    return Raw(rawjson.array(objects))


class ResponsesRoundRequest(RoundRequest):
    limits = LIMITS
    listed = ""
    client_tools = re.compile(
        r"|function|custom|local_shell|apply_patch|computer(_use)?(_preview)?"
    )
    forms = (("text", "format"),)
    updates = b'"configuration_update"'

    @property
    def gets_reasoning_back(self) -> bool:
        """Whether the client sends reasoning back as items, and not by their ids alone (the AI SDK,
        if upstream stores replies). By an id we could not tell it from reasoning that upstream
        would take."""
        sent = bytes(self.members.get("input", b""))
        return not stores(self.members) or (
            b'"reasoning"' in sent and b'"item_reference"' not in sent
        )

    @staticmethod
    def tool(definition: bytes) -> bytes:
        """Schemas are strict here unless they say otherwise."""
        return rawjson.encode({"type": "function", "strict": False, **rawjson.members(definition)})

    @staticmethod
    def assembled(members: Members, entries: Sequence[Entry], /) -> Members:
        return {"input": joined(entries)}
