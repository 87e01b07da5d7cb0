"""What decides, besides the additions themselves, whether upstream takes what we add to a request."""

from __future__ import annotations

from msgspec import Raw

from proxy import rawjson
from proxy.dialects import refusals
from proxy.dialects.refusals import RawHeaders
from proxy.dialects.values import object_of, text_of
from proxy.plan.refusals import Addition, Complaint
from proxy.plan.request import Request

BETA = b"anthropic-beta"
BINDING = b"thinking-binding-controls-2026-08-01"
"""The beta in which upstream can be told what to do with thinking that no longer fits.

https://platform.claude.com/docs/en/build-with-claude/preserved-thinking/prefix-checks
"""


def complaint(status: int, body: bytes) -> Complaint:
    """Return what this refusal of a request that we changed is about."""
    found = refusals.complaint(status, body)
    bound = isinstance(found, Addition) and "bound to a different conversation" in refusals.told(body)
    return Addition.THINKING if bound else found


def forgiving(body: bytes, headers: RawHeaders) -> tuple[bytes, RawHeaders]:
    """Return the request so that upstream drops thinking that no longer fits what precedes it.

    A client that says itself what is to be done with it, or that wants no thinking, gets what it asked for.
    """
    members = rawjson.members(Raw(body))
    thinking = object_of(members.get("thinking")) or {"type": Raw(b'"adaptive"')}
    if "block_binding" in thinking or text_of(thinking.get("type")) not in ("adaptive", "enabled"):
        return body, headers
    thinking["block_binding"] = Raw(b'{"prefix_mismatch_behavior":"drop_block"}')
    betas = [value for name, value in headers if name.lower() == BETA]
    others = [header for header in headers if header[0].lower() != BETA]
    return rawjson.encode(members | {"thinking": thinking}), [*others, (BETA, b",".join([*betas, BINDING]))]


def shape(request: Request) -> str:
    """Return what else decides whether upstream takes what we add: JSON mode, thinking, client tools, streaming."""
    members = request.members
    form = members.get("output_format") or object_of(members.get("output_config")).get("format")
    said = [
        text_of(object_of(form).get("type")),
        text_of(object_of(members.get("thinking")).get("type")),
        text_of(object_of(members.get("tool_choice")).get("type")),
    ]
    return refusals.shape(request, *said)
