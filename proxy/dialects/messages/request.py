"""Reads a Messages request: decodes the few members that the proxy needs, and divides the messages
into entries.

A message is an entry, with one exception. A user message that brings results holds those of several
calls, and may go on with what the user said meanwhile. The plan counts each of them, so each result
is an entry of its own, with the reminders that the client puts behind it; and so is the rest, if
there is any. Such an entry consists of the blocks' bytes, joined by commas. Upstream gets
neighbouring ones as one message again, because it wants all results of a reply in the message that
follows it.

The system prompt is no entry. An entry that is a string is text of ours for its end.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import msgspec
from msgspec import Raw

from proxy import rawjson
from proxy.dialects import refusals
from proxy.dialects.entries import Entry
from proxy.dialects.refusals import RawHeaders
from proxy.dialects.request import RoundRequest, bounded
from proxy.plan import texts
from proxy.plan.turn import Addition, Complaint, Reason
from proxy.rawjson import NULL, Members, elements_of, object_of, text_of

LIMITS = ("max_tokens",)
BETWEEN_REPLIES = ("", "user", "system")
"""The roles of entries between two replies. Blocks of a user message have no role."""

RESULT = "tool_result"

REMINDERS = ("<system-reminder>", "<total_tokens>", "<environment_details>")
"""How texts begin that a client adds to results by itself: Claude Code's and Cline's. The user did
not say them, unless one quotes the user."""

CREDIT = "fallback_credit_token"
"""What upstream gives with some refusals, and takes back with the same request for another model
(anthropic 2.14)."""

THINKING_EDITS = "clear_thinking_"
"""How the names of edits begin by which upstream clears thinking of earlier turns. A date
follows."""
EDITS = (THINKING_EDITS, "clear_tool_uses_", "compact_")
"""How the names of all edits begin that the API had when this was written."""

KNOWN = frozenset(
    (
        *(
            "model",
            "messages",
            "system",
            "tools",
            "tool_choice",
            "max_tokens",
            "stream",
            "stop_sequences",
            "metadata",
        ),
        *(
            "temperature",
            "top_p",
            "top_k",
            "thinking",
            "output_config",
            "output_format",
            "cache_control",
            "container",
        ),
        *(
            "service_tier",
            "speed",
            "inference_geo",
            "mcp_servers",
            "diagnostics",
            "user_profile_id",
            "workspace_id",
        ),
        *(
            "context_management",
            "compaction",
            "thread",
            "fallbacks",
            "fallback_credit_token",
            "billing_policy",
        ),
        *(
            "betas",
            "anthropic_beta",
            "anthropic_version",
            "reasoning_effort",
            "reasoning",
            "provider",
            "user",
        ),
    )
)

SERVED = ("tool_use_id", "content")
BLOCKS = {
    "text": ("text", "citations"),
    "image": ("source", "transformations"),
    "document": ("source", "citations", "context", "title"),
    "search_result": ("source", "citations", "content", "title"),
    "thinking": ("thinking", "signature"),
    "redacted_thinking": ("data",),
    "tool_use": ("id", "name", "input", "toolset_name"),
    "tool_result": (*SERVED, "is_error", "toolset_name"),
    "server_tool_use": ("id", "name", "input"),
    "mcp_tool_use": ("id", "name", "input", "server_name"),
    "mcp_tool_result": (*SERVED, "is_error"),
    **{f"{tool}_tool_result": SERVED for tool in ("web_search", "web_fetch", "code_execution")},
    **{f"{tool}_code_execution_tool_result": SERVED for tool in ("bash", "text_editor")},
}
"""The members of blocks, by type, that may be moved, cut or merged: readers get them as text or as
JSON."""
IN_RESULTS = {kind: BLOCKS[kind] for kind in ("text", "image", "document", "search_result")}
"""The blocks within a client's result that may be moved or cut."""

FRAME = frozenset(("role", "content"))
"""The members of a message that the API knows. A message with others is one entry, whatever it
brings."""


class Head(msgspec.Struct, frozen=True, gc=False):
    """What tells entries apart: a message has a role, a block has a type."""

    role: str = ""
    type: str = ""
    content: Raw = NULL


_heads = msgspec.json.Decoder(list[Head])


def split(members: Members) -> tuple[list[Raw], str, dict[str, Any]]:
    """Clients that have upstream keep, clear or compact the history go on so, and nothing of ours
    is added. Clearing old thinking is no reason: nothing else is touched by it, and Claude Code has
    it done in each request."""
    clears = len(elements_of(edits_in(members))) > len(thinking_edits(members))
    entries = list(_entries(members.get("messages", NULL)))
    credit = text_of(members.get(CREDIT))
    more = {"preamble": members.get("system", NULL), "credit": credit}
    return entries, "context_management" if clears else "", more


def edits_in(members: Members) -> Raw | None:
    return object_of(members.get("context_management")).get("edits")


def has_new_edits(members: Members) -> bool:
    """Whether one is of a kind that we do not know."""
    edits = elements_of(edits_in(members))
    return not all(text_of(object_of(edit).get("type")).startswith(EDITS) for edit in edits)


def thinking_edits(members: Members) -> list[Raw]:
    """Return the edits that clear nothing but thinking."""
    edits = elements_of(edits_in(members))
    return [
        edit for edit in edits if text_of(object_of(edit).get("type")).startswith(THINKING_EDITS)
    ]


# -- entries ---------------------------------------------------------------------------------------


def _entries(given: Raw) -> Iterator[Raw]:
    if rawjson.is_null(given):
        return
    raws = bounded(given, Reason.TOO_MANY_MESSAGES)
    for raw, head in zip(raws, heads(given), strict=True):
        found = (
            heads(head.content) if head.role == "user" and rawjson.is_array(head.content) else []
        )
        if all(one.type != RESULT for one in found) or rawjson.members(raw).keys() - FRAME:
            yield raw
            continue
        group: list[Raw] = []
        holds = ""  # what the group is about: a result, or what the user said
        for block, one in zip(rawjson.elements(head.content), found, strict=True):
            said = one.type == "text" and not is_reminder(
                text_of(rawjson.members(block).get("text"))
            )
            about = RESULT if one.type == RESULT else "user" if said else ""
            if holds and (about == RESULT or (about and about != holds)):
                yield Raw(b",".join(group))
                group = []
                holds = ""
            group.append(block)
            holds = holds or about
        yield Raw(b",".join(group))


def is_reminder(text: str) -> bool:
    return text.lstrip().startswith(REMINDERS) and not texts.spans(text)


def heads(array: bytes | Raw) -> list[Head]:
    """Return what the elements are, in one pass over all of them. Raises NotJson."""
    found, masked = rawjson.decode(_heads, array)
    if not masked:
        return found
    return [msgspec.structs.replace(head, content=rawjson.unmasked(head.content)) for head in found]


def is_text(entry: Entry) -> bool:
    """Whether this entry is text for the system prompt."""
    return rawjson.is_string(Raw(entry))


def parts_of(entry: Entry) -> tuple[Members | None, list[Raw]]:
    """Return a message's members and nothing, or nothing and the blocks. Raises NotJson."""
    items = rawjson.elements(b"[%b]" % bytes(entry))
    if len(items) == 1 and "role" in (members := rawjson.members(items[0])):
        return members, []
    return None, items


def assembled(members: Members, entries: Sequence[Entry]) -> Members:
    """Return the members of a request that consist of these entries. Texts of ours become the last
    blocks of the system prompt, behind the client's own breakpoints."""
    ours = [entry for entry in entries if is_text(entry)]
    messages = [entry for entry in entries if not is_text(entry)] if ours else entries
    roles = ((heads(b"[%b]" % bytes(one))[0].role, one) for one in messages)
    runs = groupby(roles, key=lambda one: one[0] in BETWEEN_REPLIES)
    made: Members = {
        "messages": Raw(rawjson.array(one for _, run in runs for one in _in_order(list(run))))
    }
    if ours:
        system = members.get("system")
        client = [_text_block(system)] if rawjson.is_string(system) else elements_of(system)
        made["system"] = Raw(rawjson.array([*client, *(_text_block(Raw(text)) for text in ours)]))
    return made


def _in_order(turn: list[tuple[str, Entry]]) -> Iterator[Entry]:
    """Yield replies, or the messages between two of them.

    Upstream takes a system message only as the last of them. A cut can leave user messages behind
    one; then everything that the user says comes first, and system messages become one that differ
    in nothing but their content: a rule may end with its message (`clear_at`).
    """
    roles = [role for role, _ in turn]
    moves = "system" in roles[1:-1] and roles[0] != "system"
    if not moves or not all(
        blocks_in(one) is not None and (role != "user" or rawjson.members(Raw(one)).keys() <= FRAME)
        for role, one in turn  # whether its blocks mean the same in another message of its role
    ):
        for said, run in groupby(turn, key=lambda one: one[0] == ""):
            found = [one for _, one in run]
            yield from [user_message(found)] if said else found
        return
    yield user_message(
        [block for role, one in turn if role != "system" for block in blocks_in(one) or ()]
    )
    systems = (one for role, one in turn if role == "system")
    for others, rules in groupby(
        systems, key=lambda one: rawjson.members(Raw(one)) | {"content": NULL}
    ):
        first, *further = rules
        contents = [block for rule in (first, *further) for block in blocks_in(rule) or ()]
        yield (
            rawjson.encode({**others, "content": Raw(rawjson.array(contents))})
            if further
            else first
        )


def blocks_in(entry: Entry) -> list[Raw] | None:
    """Return the blocks of a message or of a part of one; a string stands for one. None for any
    other content."""
    message, found = parts_of(entry)
    if message is None:
        return found
    content = message.get("content", NULL)
    if rawjson.is_string(content):
        return [_text_block(content)]
    return rawjson.elements(content) if rawjson.is_array(content) else None


def user_message(blocks: Sequence[Entry]) -> bytes:
    return b'{"role":"user","content":[%b]}' % b",".join(blocks)


def _text_block(text: Raw) -> Raw:
    """Return the block with this text, which is a JSON string."""
    return Raw(rawjson.encode({"type": "text", "text": text}))


# -- what decides whether upstream takes what we add -----------------------------------------------


BETA = b"anthropic-beta"
BINDING_BETA = b"thinking-binding-controls-2026-08-01"
"""The beta in which upstream can be told what to do with thinking that no longer fits.

https://platform.claude.com/docs/en/build-with-claude/preserved-thinking/prefix-checks
"""


def complaint(status: int, body: bytes) -> Complaint:
    found = refusals.complaint(status, body)
    said = " ".join(part for part in refusals.parts(body) if isinstance(part, str))
    bound = isinstance(found, Addition) and "bound to a different conversation" in said
    return Addition.THINKING if bound else found


def forgiving(body: bytes, headers: RawHeaders) -> tuple[bytes, RawHeaders]:
    """A client that says itself what is to be done with it, or that wants no thinking, gets what it
    asked for."""
    members = rawjson.members(Raw(body))
    thinking = object_of(members.get("thinking")) or {"type": Raw(b'"adaptive"')}
    if "block_binding" in thinking or text_of(thinking.get("type")) not in ("adaptive", "enabled"):
        return body, headers
    thinking["block_binding"] = Raw(b'{"prefix_mismatch_behavior":"drop_block"}')
    betas = [value for name, value in headers if name.lower() == BETA]
    others = [header for header in headers if header[0].lower() != BETA]
    return rawjson.encode(members | {"thinking": thinking}), [
        *others,
        (BETA, b",".join([*betas, BINDING_BETA])),
    ]


# -- the request of each round ---------------------------------------------------------------------


class MessagesRoundRequest(RoundRequest):
    limits = LIMITS
    no_call = Raw(b'{"type":"none"}')
    needs_tools = True
    schema = "input_schema"
    client_tools = re.compile(r"|custom|(bash|text_editor|computer|memory)_\d+")
    tool_servers = "mcp_servers"
    forms = (("output_format",), ("output_config", "format"))
    updates = b'"output_config"'
    assembled = staticmethod(assembled)
    container: Raw = NULL
    """Where upstream's own tools ran in an earlier round. The next one goes on there: its files and
    processes are there, and upstream refuses to continue code without it."""
    credited = True
    """Whether this may still be the request that upstream gave a token for, and no round behind
    it."""

    @staticmethod
    def tool(definition: bytes) -> bytes:
        members = rawjson.members(definition)
        members["input_schema"] = members.pop("parameters")
        return rawjson.encode(members)

    def _members(self, entries: Sequence[Entry], ours: Sequence[bytes]) -> Members:
        made = super()._members(entries, ours)
        id = object_of(self.container).get("id", NULL)
        if not self.credited:
            made.pop(CREDIT, None)
        if not rawjson.is_null(id):
            asked = object_of(self.members.get("container"))
            made["container"] = Raw(rawjson.encode(asked | {"id": id})) if asked else id
        return made
