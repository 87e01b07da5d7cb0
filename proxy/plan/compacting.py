"""Clients that have their history summarised: by a prompt of their own, or by asking for upstream's compaction. Pure.

Where we serve the latter, the client gets a *reference* in the place of upstream's encrypted summary. It is the digest
of the snapshot's text, under which the caller's records have it: it can be neither read, nor changed, nor guessed.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from enum import Enum, auto

import msgspec

from proxy.plan.turn import Request

PROMPTS = {
    "summary of the conversation so far": "Claude Code 2.1; cline, src/core/prompts/contextManagement.ts",
    "summary of the recent portion of the conversation": "Claude Code 2.1",
    "context checkpoint compaction": "openai/codex, codex-rs/core/templates/compact/prompt.md",
    "prompt for continuing our conversation above": "opencode, packages/opencode/src/session/compaction.ts",
    "anchored summary": "opencode, the same file since 2026",
    "generate the <state_snapshot>": "Gemini CLI and Qwen Code, packages/core/src/services/chatCompressionService.ts",
    "summarize the conversation history so far": "microsoft/vscode-copilot-chat, summarizedConversationHistory.tsx",
    "summary of our conversation above": "charmbracelet/crush, internal/agent/agent.go",
    "task to compact this conversation context": "kimi-cli 1.52, kimi_cli/prompts/compact.md",
    "compact replacement checkpoint for this session": "nanobot-ai 0.3.5, templates/agent/consolidator_archive.md",
    "summary of our entire conversation": "mistralai/mistral-vibe, vibe/core/prompts/compact.md",
}
"""What such a prompt has in lower case, and where it is from."""

READ_CHARS = 4_000  # characters of a text in which that is looked for. Prompts have it in their first 1,000.
MOST = 16  # the most references of a request that are looked up. A history has one.
GONE = "The record of the conversation before this point is no longer kept. Ask the user for what you need to know."
"""Stands for what a reference led to: it expired, or never was this caller's."""
MARK = b"offload-proxy."
"""How references begin."""
_REFERENCE = re.compile(rf"{re.escape(MARK.decode())}([0-9a-f]{{64}})")


def asks_for_summary(texts: Iterable[str]) -> bool:
    """Whether the user's last message, which has these texts, asks for a summary of the conversation."""
    beginnings = (" ".join(text[:READ_CHARS].lower().split()) for text in texts)
    return any(phrase in text for text in beginnings for phrase in PROMPTS)


def hint(read: str) -> str:
    """Return what is added to such a request that is not sent whole. `read`: what our tool is called in it."""
    return (
        "\n\nWhat is shown only with a reference, such as (detailed result is stored in PATH), can be read with "
        f"{read}. Keep the paths that will matter in your summary: they can be read after it, too."
    )


def limit(came: int, sent: int) -> int:
    """Return the limit to recommend to a client that compacts at `came` tokens of history, which are sent as `sent`: at
    this ratio, its history is sent as long as it wanted it. It is at most ten times as much, and a round number."""
    most = min(came * came // max(sent, 1), 10 * came)
    return round(most, 1 - len(str(most)))


class Compacting(Enum):
    """How a client asks for compaction."""

    MANAGED = auto()
    """Where upstream finds that the history is too long. As our plan keeps it short, leaving out the wish grants it."""
    WHOLE = auto()  # of the whole history, now and instead of a reply


class Wish(msgspec.Struct, frozen=True):
    """What a client asks for. `request` has the wish, and what its references stand for."""

    kind: Compacting
    request: Request
    restored: bool


def reference(text: str) -> str:
    """Return the reference to a snapshot."""
    return MARK.decode() + digest(text)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def referred(text: str) -> str:
    """Return the digest in a reference of ours; empty for everything else."""
    found = _REFERENCE.fullmatch(text)
    return found[1] if found else ""
