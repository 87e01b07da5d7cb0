"""What chat templates refuse, as far as it depends on the roles alone.

Mistral's (mistralai/Mistral-7B-Instruct-v0.3, `tokenizer_config.json`): "After the optional system
message, conversation roles must alternate user/assistant/user/assistant/..."; its API: "Unexpected
role 'user' after role 'tool'" and "Not the same number of function calls and responses". Gemma's
(google/gemma-2-9b-it): "System role not supported" and "Conversation roles must alternate
user/assistant/user/assistant/...".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

BEFORE = {
    "user": ("beginning", "system", "assistant"),
    "assistant": ("user", "tool"),
    "tool": ("calling", "tool"),
}
"""Role → what may come directly before it."""


def refusal(messages: Sequence[dict[str, Any]], *, pairs: bool = True) -> str:
    """Return why a strict template refuses these messages, or an empty string. `pairs`: it also
    counts the results."""
    before, open_calls = "beginning", 0
    for place, message in enumerate(messages):
        role, calls = message["role"], len(message.get("tool_calls") or ())
        if role == "system" and place == 0:
            before = role
            continue
        allowed = BEFORE.get(role, ())
        if before not in allowed and not (before == "calling" and role == "user" and not pairs):
            return f"message {place}: unexpected role {role!r} after {before!r}"
        if role == "tool":
            open_calls -= 1
        elif pairs and open_calls:
            return f"message {place}: not the same number of function calls and responses"
        else:
            open_calls = calls
        before = "calling" if calls else role
    return ""
