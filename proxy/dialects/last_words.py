"""What the proxy itself says at the end of a turn in which the model does not stop calling our tools."""

from __future__ import annotations

MAX_CIRCLES = 2
"""Rounds in a row that only repeat calls which were answered before. Then the next round is the last: a small model
goes on until its rounds are used up, and each of them costs time."""
NO_MORE = "({} and {} cannot be called again in this turn: answer now, with what you have.)"
"""The last line of the answers before the last round."""
NOT_ANSWERED = "(not answered: the turn ended with this call)"
"""The result of a call with which a turn ended, where upstream keeps the call and wants a result."""
SAID_NOTHING = (
    "[offload-proxy: the model ended its turn without an answer, even when it was asked again without the tools {} and"
    " {}. Please ask again, or for less at once.]"
)
"""The reply if the model gives none. Agents take an empty reply for a finished task."""
