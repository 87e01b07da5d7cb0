"""`/v1/compress` and `/v1/retrieve/HASH`: the plan alone, for gateways that send the requests
themselves.

LiteLLM, Portkey and Kong call these two paths of Headroom, and may call ours instead:

    messages ──planned as by the proxy──> the same messages, some results as previews; hashes ──retrieve──> results

A gateway may hold back the model's replies and its newest turn, as LiteLLM does. So a result
without its call counts as answered, in a turn of its own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from msgspec import Raw
from msgspec.structs import replace

from proxy import rawjson
from proxy.apps.operations.call import OperationCall
from proxy.apps.operations.schema import CompressMessages
from proxy.dialects.chat import CHAT
from proxy.errors import NotThere, StoreFault
from proxy.plan.forecast import described
from proxy.plan.preview import digest_in
from proxy.plan.turn import Unplannable
from proxy.policy import Inject, Mode, Policy
from proxy.rawjson import NotJson
from proxy.requests import archive
from proxy.requests.planned import Planned, Rendered, plan

RETRIEVE = b"/v1/retrieve/"

DIGEST = re.compile(r"[0-9a-f]{16}")


async def compress(call: OperationCall, given: CompressMessages) -> bytes:
    """Return the messages as the proxy would send them, as many as came. Raises ProxyError."""
    policy = call.tenant.policy.for_model(given.model)
    services = call.services
    planned = None
    ours = frozenset[int]()
    words = f"The policy's mode is {policy.offload.mode}."
    if policy.offload.mode not in (Mode.OFF, Mode.OBSERVE):
        words = "The messages cannot be planned."
        try:
            body, ours = await call.read(_request, given.model, call.messages)
            planned = await _planned(call, policy, body)
        except (Unplannable, NotJson) as error:
            words = f"The messages cannot be planned: {getattr(error, 'reason', error)}."
    if planned is None:
        return await call.read(_reply, call, given.model, call.messages, None, words)
    rendered = await call.read(Rendered.of, planned, None, {}, services.reader)
    offload = planned.policy.offload
    window = planned.room.window
    words = await call.read(described, planned.history.items, rendered.plan, offload, window)
    if not await archive.keep(
        rendered, services.store, call.tenant.namespace, call.read, by_digest=True
    ):
        raise StoreFault(
            "The store did not keep what would have moved, so nothing moves; try again later"
        )
    sent = [entry for index, entry in enumerate(rendered.entries) if index not in ours]
    return await call.read(_reply, call, given.model, sent, rendered, words)


async def retrieve(call: OperationCall) -> bytes:
    """Return the moved text whose digest the path names. Raises ProxyError."""
    asked = call.client.path.removeprefix(RETRIEVE).decode("ascii", "replace")
    name = await call.shelf.archive.named(asked) if DIGEST.fullmatch(asked) else None
    [text] = await call.shelf.archive.read_many([name]) if name else [None]
    if text is None:
        raise NotThere(f"There is no text {asked!r} among those that are kept for your key")
    return rawjson.encode(
        {"hash": asked, "original_content": text.decode("utf-8", "surrogatepass")}
    )


def _request(model: str, raws: Sequence[Raw]) -> tuple[bytes, frozenset[int]]:
    """Return a chat request of these messages with the replies that were held back, and the places
    of these."""
    messages = list[bytes | Raw]()
    made = set[int]()
    called = set[str]()
    for raw in raws:
        role = rawjson.text(rawjson.members(raw)["role"])
        if role == "assistant":
            called.update(call.id for call in CHAT.reply_parts(raw)[1])
        if role == "tool" and (answered := CHAT.answered(raw)) and answered not in called:
            made.add(len(messages))
            call = {
                "id": answered,
                "type": "function",
                "function": {"name": "tool", "arguments": "{}"},
            }
            messages.append(
                rawjson.encode({"role": "assistant", "content": None, "tool_calls": [call]})
            )
        messages.append(raw)
    if made:
        made.add(len(messages))
        messages.append(b'{"role":"assistant","content":"."}')
    return b'{"model":' + rawjson.encode(model) + b',"messages":' + rawjson.array(
        messages
    ) + b"}", frozenset(made)


async def _planned(call: OperationCall, policy: Policy, body: bytes) -> Planned | None:
    """Plan a request in which results move and nothing else changes. Raises Unplannable."""
    offload = replace(policy.offload, mode=Mode.COMPACT)
    tools = replace(policy.tools, inject=Inject.NEVER)
    policy = replace(policy, offload=offload, tools=tools)
    request = await call.read(CHAT.parse, body)
    window = call.services.known.window(call.tenant.namespace, policy, request.model)
    return await plan(CHAT, request, policy, window, call.services.reader, call.tenant.namespace)


def _reply(
    call: OperationCall,
    model: str,
    messages: Sequence[bytes | Raw],
    rendered: Rendered | None,
    words: str,
) -> bytes:
    """Return the messages and the figures in Headroom's shape."""
    before, after = (rendered.planned.history.tokens, rendered.tokens) if rendered else (0, 0)
    moved = [name for name in rendered.originals() if digest_in(name)] if rendered else []
    call.noted = {
        "mode": Mode.COMPACT.value if rendered else Mode.OFF.value,
        "model": model,
        "messages": len(messages),
        "tokens_before": before,
        "tokens_after": after,
        "compacted": len(moved),
    }
    figures: dict[str, Any] = {
        "tokens_before": before,
        "tokens_after": after,
        "tokens_saved": before - after,
        "compression_ratio": after / before if before else 1.0,
        "transforms_applied": [f"moved:{name}" for name in moved],
        "ccr_hashes": [digest_in(name) for name in moved],
        "reason": words,
    }
    return b'{"messages":' + rawjson.array(messages) + b"," + rawjson.encode(figures)[1:]
