"""When an event pays for itself. All amounts are in plain input tokens."""

from __future__ import annotations

from proxy.core.policy import Offload

SUMMARY_REQUEST_TOKENS = 500
"""About the tokens that the task adds to the conversation in a summary call."""
OUTPUT_PRICE = 5
"""An output token in input tokens: 5 at Anthropic's, 4 to 8 at OpenAI's price lists (2025)."""


class SkiRental:
    """The ski-rental rule for breaking the prompt cache: rent until the rent paid equals the price of buying.

    The rent is the cost of carrying movable history; the price is that of writing the rest anew, in plain input tokens.
    The total is at most twice that of the best decision in hindsight (Karlin et al., Competitive snoopy caching, 1988).
    """

    def __init__(self, offload: Offload) -> None:
        self.snapshot = offload.compress.snapshot_tokens
        self.paid = 0.0
        """Rent paid since the last event."""
        self._read, self._write = offload.cached_read, offload.cache_write

    def pay(self, carried: int) -> None:
        """Pay for one more request that carries so many movable tokens."""
        self.paid += self._read * carried

    def price(self, rewritten: int, summarised: int | None) -> float:
        """The price of writing so many tokens anew and, unless it is None, of a summary of so many cached ones."""
        summary = 0.0
        if summarised is not None:
            summary = self._read * summarised + SUMMARY_REQUEST_TOKENS + OUTPUT_PRICE * self.snapshot
        return (self._write - self._read) * rewritten + summary

    def settle(self) -> None:
        """An event has happened: the rent starts again at 0."""
        self.paid = 0.0
