"""What is known of a history without its bytes: of one that goes on from it, only what is new has to be read."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import Raw

from proxy.core.plan import Item, Plan, Room
from proxy.core.planner import Fold, folded
from proxy.core.policy import Offload
from proxy.core.transcript import BEGINNING, Message, Transcript, answered_tools, items, links


class Terms(msgspec.Struct, frozen=True):
    """Besides the messages, what a plan depends on. `entering`: see `plan.fold`."""

    model: str
    offload: Offload
    room: Room
    entering: int

    def leave_alone(self, tokens: int) -> bool:
        """Whether that is so little that nothing can happen to any of it."""
        return tokens <= min(self.offload.max_total_tokens, self.offload.max_unseen_tool_tokens) and self.room.holds(
            tokens
        )


class Past(msgspec.Struct, frozen=True):
    """The messages of a history, measured and folded. `links`: entry *i* identifies what the first *i* of them mean."""

    terms: Terms
    fold: Fold | None
    """None as long as there is too little for anything to have happened."""
    messages: list[Message]
    tools: list[str]
    """Per message, the name of the tool whose result it is."""
    items: list[Item]
    links: list[bytes]
    tokens: int

    @classmethod
    def beginning(cls, terms: Terms) -> Past:
        return cls(terms, fold=None, messages=[], tools=[], items=[], links=[BEGINNING], tokens=0)

    def extended(self, messages: Sequence[Message]) -> Past:
        """The history with these behind it. Raises Unplannable where calls lack results."""
        if not messages:
            return self
        tools = answered_tools(messages)
        new = items(messages, tools, self.terms.offload)
        tokens = self.tokens + sum(message.tokens for message in messages)
        return Past(
            terms=self.terms,
            fold=self._folded(new, tokens),
            messages=[*self.messages, *messages],
            tools=[*self.tools, *tools],
            items=[*self.items, *new],
            links=[*self.links, *links(self.links[-1], messages)],
            tokens=tokens,
        )

    def _folded(self, new: Sequence[Item], tokens: int) -> Fold | None:
        if self.fold is None and self.terms.leave_alone(tokens):
            return None
        fold = (
            self.fold.copy()
            if self.fold
            else folded(self.items, self.terms.offload, self.terms.room, self.terms.entering)
        )
        for item in new:
            fold.add(item)
        return fold

    def size(self) -> int:
        """Bytes that it takes, about. Messages that their own cache has let go of live on here."""
        return 4_000 + 350 * len(self.messages)

    def plan(self) -> Plan:
        """For a request that ends here."""
        if self.fold is None:
            return Plan(moves={}, cuts=(), events=(), live=self.tokens, fits=True)
        return self.fold.plan()

    def transcript(self, raws: Sequence[bytes | Raw]) -> Transcript:
        """With the bytes of the messages."""
        return Transcript(raws, self.messages, self.tools)
