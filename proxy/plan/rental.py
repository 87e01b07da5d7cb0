"""When an event pays for itself. All amounts are in plain input tokens, at the policy's prices."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from proxy.plan.context import Gain
from proxy.policy import Offload

SUMMARY_REQUEST_TOKENS = 500
"""About the tokens that the task adds to the conversation in a summary call."""
OUTPUT_PRICE = 5
"""An output token in input tokens: 5 at Anthropic's, 4 to 8 at OpenAI's price lists (2025)."""
PAYBACK = 7
"""Results move early if that pays for itself within so many more requests. Tuned on half of the recorded runs: 5 and
10 change the medians by less than 0.02, and 14 makes the worst runs dearer."""
REACH = 128
"""The most results that are looked at in one request, which bounds its work. Older ones wait for an event beyond
`hard_total_tokens`."""
LEAST_COST = 25_000
"""The tokens that the limit on a loss counts for conversations that have cost less. Early events pay best, and a share
of the little that was spent before them would forbid these. With 50,000, recorded runs cost 0.01 less in the mean; but
had they ended right after an event, at 10,000 tokens or more, they would have cost up to 1.21 of no proxy, not 1.09."""


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
        self._least = offload.early_saved()

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

    def worth_moving(
        self,
        results: Sequence[Gain],
        request: int,
        price: Callable[[int, Gain], float],
        affords: Callable[[int, Gain], bool],
    ) -> Gain | None:
        """Return the first of the newest results that are worth moving in this request.

        Each result pays its own rent: the reads of all requests that carried it. The newest results move once their
        rents, or `PAYBACK` more reads, cover the price. Of several such suffixes the one that gains most moves, among
        those that the account affords. `price` is what moving costs that frees so many tokens and begins with this
        result, and `affords` whether that may be paid.
        """
        freed, rent, most = 0, 0.0, 0.0
        found: Gain | None = None
        for gain in reversed(results[-REACH:]):
            freed += gain.freed
            rent += self._read * gain.freed * (request - 1 - gain.since)
            gained = max(rent, self._read * freed * PAYBACK) - price(freed, gain)
            better = gained >= 0 if found is None else gained > most
            if better and freed >= self._least and affords(freed, gain):
                most, found = gained, gain
        return found

    def paid_for(self, results: Sequence[Gain], first: int, request: int) -> float:
        """Return what it has cost so far to carry the results from message `first` on."""
        moved = (gain for gain in results if gain.index >= first)
        return sum(self._read * gain.freed * (request - 1 - gain.since) for gain in moved)


class Account:
    """What the requests so far have cost, with the plan and without a proxy.

    Leading system messages and the client's tools cost the same in both, and count in neither.
    """

    def __init__(self, offload: Offload) -> None:
        self.own = 0.0
        self.plain = 0.0
        """What no proxy would have cost."""
        self.live = 0
        """Live tokens of the latest request."""
        self._client = 0  # tokens of the latest request as the client sent it
        self._read, self._write = offload.cached_read, offload.cache_write

    def cost(self, live: int, kept: int) -> float:
        """The cost of a request of so many tokens, of which the first `kept` are cached."""
        return self._read * kept + self._write * (live - kept)

    def allows(self, own: float, client: int, loss: float = 0.0) -> bool:
        """Whether a request at this cost leaves our sum at or below no proxy's, or that share of it above.

        The client sent `client` tokens. The share is of `LEAST_COST` at least.
        """
        plain = self.plain + self.cost(client, self._client)
        return self.own + own <= plain + (loss * max(plain, LEAST_COST) if loss else 0.0)

    def settle(self, own: float, live: int, client: int) -> None:
        """Enter a request: its cost with the plan, its live tokens, and those that the client sent."""
        self.own += own
        self.plain += self.cost(client, self._client)
        self.live, self._client = live, client
