"""The one frozen value that a request leaves behind: metrics, log line and headers all read it."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec


class ToolUse(msgspec.Struct, frozen=True):
    """One internal tool call: `tool` is grep or read_file, `result` one of ok, empty, refused, budget."""

    tool: str
    result: str
    tokens: int


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one request. No content and no key is in here. Times are seconds, sizes tokens."""

    request_id: str
    tenant: str
    namespace: str
    kind: str
    """relay (any other path), untouched (chat as the client sent it), offloaded, operation, refused, or summary."""
    method: str
    path: str
    model: str = ""
    stream: bool = False
    mode: str = "off"
    status: int = 0
    """0: the client left before there was one."""
    fault: str = ""
    """Empty, or one of: client, client_gone, proxy, connect, timeout, broken, protocol, overloaded, summary, unused
    (summaries that nobody used: there will be none for a while)."""
    detail: str = ""
    """Of a fault of upstream's: what the network said, with upstream's address."""
    messages: int = 0
    tokens_before: int = 0
    tokens_after: int = 0
    compacted: int = 0
    """Messages whose text is moved in what was sent."""
    compressed: int = 0
    """Messages that a snapshot stands for in what was sent."""
    events: int = 0
    """Events in the plan of this history."""
    new_event: bool = False
    """Whether the newest of them fell at this very request."""
    reinserted: int = 0
    """Hidden rounds put back from earlier turns."""
    rounds: int = 0
    """Internal rounds of this turn."""
    tool_uses: tuple[ToolUse, ...] = ()
    prompt_tokens: int = 0
    """Input tokens of all rounds as upstream counted them."""
    completion_tokens: int = 0
    cached_tokens: int = 0
    summary_prompt_tokens: int = 0
    summary_completion_tokens: int = 0
    store_errors: Mapping[str, int] = {}
    """Store operations without an answer, by `OPERATION:FAULT`: failed, timeout, budget, open (the breaker)."""
    seconds: float = 0.0
    """From the request's first byte to the reply's last."""
    added_seconds: float = 0.0
    """Of these, the proxy's own work before the first round was sent."""
    first_byte_seconds: float | None = None
    """From the request's first byte to the reply's first."""
