"""Which texts ask for a summary of the conversation, and what is recommended to their clients."""

from __future__ import annotations

import pytest

from proxy.plan.compacting import READ_CHARS, asks_for_summary, limit

ASKED = [
    "Respond with TEXT ONLY.\n\nYour task is to create a detailed summary of the conversation so far, paying close",
    "You are performing a CONTEXT CHECKPOINT COMPACTION. Create a handoff summary",
    "Provide a detailed prompt for\ncontinuing our conversation above.",
    "First, reason in your scratchpad. Then, generate the <state_snapshot>.",
    "Provide a detailed summary of our conversation above.",
    "\n---\n\nYou are now given a task to compact this conversation context according to",
    "Create a compact replacement checkpoint for this session.\n\n## Merge rules",
]


OTHERS = ["", "Summarize this file.", "What did the conversation say?", "x" * READ_CHARS + ASKED[0]]


@pytest.mark.parametrize("text", [*ASKED, *OTHERS])
def test_prompts_of_clients_are_recognised_and_other_texts_are_not(text: str) -> None:
    for texts in ([text], ["<system-reminder>Be nice.</system-reminder>", text]):
        assert asks_for_summary(texts) is (text in ASKED)


@pytest.mark.parametrize(
    ("came", "sent", "expected"),
    [(40_000, 20_000, 80_000), (279_001, 8_483, 3_000_000), (10_000, 10_000, 10_000), (5, 0, 20)],
)
def test_the_limit_makes_the_history_sent_as_long_as_the_client_wanted_it(came: int, sent: int, expected: int) -> None:
    assert limit(came, sent) == expected
