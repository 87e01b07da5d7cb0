"""What the requests of one run came to, and the sentence that says it at the end."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec

from proxy.policies import Policies
from proxy.telemetry.outcome import Kind, Outcome
from proxy.terminal import in_short

_SENT = (Kind.OFFLOADED, Kind.UNTOUCHED, Kind.OBSERVED)


class Totals(msgspec.Struct):
    """Sums over the requests for a model's reply. Money is in USD, and of the requests whose price
    is known."""

    requests: int = 0
    other_requests: int = 0
    """Those to other paths, and those that were refused before they went upstream."""
    tokens_before: int = 0
    tokens_after: int = 0
    money_before: float = 0.0
    money_after: float = 0.0
    moved: int = 0
    """Messages that moved at these requests."""
    most_moved: int = 0
    """The most that one of them lacked: a conversation that goes on lacks what moved earlier."""
    most_summarised: int = 0
    read_back: int = 0
    faults: int = 0
    """Requests that upstream did not answer, or answered with an error."""
    fault: str = ""
    """What went wrong with the last of these."""
    waits: str = ""
    """Why nothing moved, at the largest request."""
    largest: int = -1

    def add(self, outcome: Outcome, price: float | None) -> None:
        """Add one request. `price` is what a million plain input tokens cost, if that is known."""
        if outcome.kind is Kind.SUMMARY:
            self._pay(outcome, price)
            return
        if outcome.kind not in _SENT:
            self.other_requests += 1
            return
        if outcome.kind is Kind.OBSERVED:  # nobody carried out its plan
            outcome = msgspec.structs.replace(
                outcome,
                tokens_after=outcome.tokens_before,
                cost_after=outcome.cost_before,
                moved=0,
                compacted=0,
                compressed=0,
            )
        self.requests += 1
        self.tokens_before += outcome.tokens_before
        self.tokens_after += outcome.tokens_after
        self.moved += outcome.moved
        self.most_moved = max(self.most_moved, outcome.compacted)
        self.most_summarised = max(self.most_summarised, outcome.compressed)
        self.read_back += sum(use.calls for use in outcome.tool_uses if use.result == "ok")
        self._pay(outcome, price)
        if outcome.detail:
            self.faults += 1
            self.fault = f"upstream did not answer: {outcome.detail}"
        elif outcome.status >= 400:
            self.faults += 1
            self.fault = f"upstream answered with an error: {outcome.status}"
        if outcome.tokens_before > self.largest:
            self.largest = outcome.tokens_before
            self.waits = outcome.words

    def _pay(self, outcome: Outcome, price: float | None) -> None:
        if price is not None:
            self.money_before += outcome.cost_before * price / 1e6
            self.money_after += outcome.cost_after * price / 1e6

    def sentence(self, log: Path | None, *, recall: bool) -> str:
        """Say what the run came to. `log` is the file that stays, if one does. `recall`: whether
        `offload-proxy recall` shows what moved."""
        if not self.requests:
            if self.other_requests:
                where = f"; {log} says what came" if log else ""
                return f"no request for a reply went upstream{where}"
            return (
                "no request came: the command asked no model, or its settings name another address"
            )
        if self.faults == self.requests:
            return self.fault
        asked = "1 request" if self.requests == 1 else f"{self.requests:,} requests"
        moved = max(self.moved, self.most_moved)
        if not moved and not self.most_summarised:
            return f"{in_short(self.tokens_before)} tokens came in {asked}, and nothing moved: {self.waits}"
        less = 1 - self.tokens_after / self.tokens_before if self.tokens_before else 0.0
        money = ""
        if self.money_before >= 0.005:
            saved = self.money_before - self.money_after
            money = f", about ${saved:.2f} of ${self.money_before:.2f}"
            if saved < 0:
                money = f", but about ${-saved:.2f} dearer than ${self.money_before:.2f}"
        results = "1 result" if moved == 1 else f"{moved:,} results"
        summarised = (
            f", {self.most_summarised:,} messages summarised" if self.most_summarised else ""
        )
        shown = "; `offload-proxy recall` shows them" if recall else ""
        return (
            f"{in_short(self.tokens_before)} tokens came, {in_short(self.tokens_after)} were sent "
            f"({less * 100:.0f} % less{money}); {results} moved{summarised}, {self.read_back:,} read back{shown}"
        )


class Adding(logging.Handler):
    """Adds up the outcomes that are logged."""

    def __init__(self, totals: Totals, policies: Policies) -> None:
        super().__init__()
        self._totals = totals
        self._policies = {policy.tenant: policy for policy in policies.all()}

    def emit(self, record: logging.LogRecord) -> None:
        outcome = record.__dict__.get("fields")
        if isinstance(outcome, Outcome):
            self._totals.add(outcome, self._price(outcome))

    def _price(self, outcome: Outcome) -> float | None:
        policy = self._policies.get(outcome.tenant)
        if policy is None:
            return None
        return policy.for_api(outcome.dialect).for_model(outcome.model).offload.input_price
