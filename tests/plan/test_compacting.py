"""Which texts ask for a summary of the conversation, and what is recommended to their clients."""

from __future__ import annotations

import pytest

from proxy.plan.compacting import READ_CHARS, asks_for_summary, limit

ASKED = [
    # Claude Code 2.1; cline, src/core/prompts/contextManagement.ts
    "Your task is to create a detailed summary of the conversation so far, paying close",
    # Claude Code 2.1, of a part
    "Respond with TEXT ONLY.\n\nCreate a detailed summary of the RECENT portion of the conversation",
    # openai/codex, codex-rs/core/templates/compact/prompt.md
    "You are performing a CONTEXT CHECKPOINT COMPACTION.",
    # opencode, packages/opencode/src/session/compaction.ts
    "Provide a detailed prompt for\ncontinuing our conversation above.",
    # the same file in 2026
    "Update the anchored summary below using the conversation history above.",
    # cline, src/core/prompts/commands.ts
    '<explicit_instructions type="condense">\nCreate a detailed summary of the conversation so far',
    # Roo Code, src/core/condense/index.ts
    "Summarize the conversation so far, as described in the prompt instructions.",
    # goose, crates/goose/src/context_mgmt
    "Please summarize the conversation history provided in the system prompt.",
    # aider, aider/prompts.py
    "*Briefly* summarize this partial conversation about programming.",
    # Gemini CLI and Qwen Code, packages/core/src/core/prompts.ts
    "First, reason in your scratchpad. Then, generate the <state_snapshot>.",
    # microsoft/vscode-copilot-chat, summarizedConversationHistory.tsx
    "Summarize the conversation history so far, paying",
    # charmbracelet/crush, internal/agent/agent.go
    "Provide a detailed summary of our conversation above.",
    # kimi-cli 1.52, kimi_cli/prompts/compact.md
    "You are now given a task to compact this conversation context according to",
    # nanobot-ai 0.3.5, templates/agent/consolidator_archive.md
    "Create a compact replacement checkpoint for this session.",
    # mistralai/mistral-vibe, vibe/core/prompts/compact.md
    "Create a comprehensive summary of our entire conversation that will",
    # strands, summarizing_conversation_manager.py
    "Please summarize this conversation.",
    # langmem, short_term/summarization.py
    "Create a summary of the conversation above:",
    # zed, crates/agent_settings/src/prompts
    "Generate a detailed summary of this conversation. Include:",
    # anthropic-sdk-typescript and -python, CompactionControl
    "You have not yet completed it. Write a continuation summary that will allow you to resume work",
    # a person
    "Write a handoff document of all that we did, so that a fresh session can go on.",
]

OTHERS = [
    "",
    "Summarize this file.",
    "What did the conversation say?",
    "Look into the logs and summarize what they say. Then go on with our conversation.",
    "Condense the session module, and compact the thread pool.",
    "This session is being continued from a previous conversation that ran out of context. The summary is below.",
    "Use a compact layout in the confirm dialog.",
    "Add a summary field to the export dialog, in this session.",
    "Condense this thread from Discord, and give me a summary of this session's token usage.",
    "Don't summarize, just answer in this conversation.",
    "x" * READ_CHARS + "Please summarize this conversation.",
]


@pytest.mark.parametrize("text", [*ASKED, *OTHERS])
def test_prompts_of_clients_are_recognised_and_other_texts_are_not(text: str) -> None:
    for texts in ([text], ["<system-reminder>Be nice.</system-reminder>", text]):
        assert asks_for_summary(texts) is (text in ASKED)


@pytest.mark.parametrize(
    ("came", "sent", "expected"),
    [(40_000, 20_000, 80_000), (279_001, 8_483, 3_000_000), (10_000, 10_000, 10_000), (5, 0, 20)],
)
def test_the_limit_makes_the_history_sent_as_long_as_the_client_wanted_it(
    came: int, sent: int, expected: int
) -> None:
    assert limit(came, sent) == expected
