"""What is known of a history without its bytes: of one that goes on from it, only what is new has to be read."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import Raw

from proxy.core.plan import Fold, Item, Plan, Room
from proxy.core.policy import Offload
from proxy.core.transcript import BEGINNING, Message, Transcript, answered_tools, items, links


class Terms(msgspec.Struct, frozen=True):
    """Besides the messages, what a plan depends on. `entering`: see `plan.fold`."""

    model: str
    offload: Offload
    room: Room
    entering: int


class Past(msgspec.Struct, frozen=True):
    """The messages of a history, measured and folded. `links`: entry *i* identifies what the first *i* of them mean."""

    offload: Offload
    fold: Fold
    messages: list[Message]
    tools: list[str]
    """Per message, the name of the tool whose result it is."""
    links: list[bytes]
    tokens: int

    @classmethod
    def beginning(cls, terms: Terms) -> Past:
        fold = Fold(terms.offload, terms.room, terms.entering)
        return cls(terms.offload, fold, messages=[], tools=[], links=[BEGINNING], tokens=0)

    @property
    def items(self) -> list[Item]:
        return self.fold.items

    def extended(self, messages: Sequence[Message]) -> Past:
        """The history with these behind it. Raises Unplannable where calls lack results."""
        if not messages:
            return self
        tools, fold = answered_tools(messages), self.fold.copy()
        for item in items(messages, tools, self.offload):
            fold.add(item)
        return Past(
            offload=self.offload,
            fold=fold,
            messages=[*self.messages, *messages],
            tools=[*self.tools, *tools],
            links=[*self.links, *links(self.links[-1], messages)],
            tokens=self.tokens + sum(message.tokens for message in messages),
        )

    def size(self) -> int:
        """Bytes that it takes, about, without the messages' measures."""
        return 4_000 + 150 * len(self.messages)

    def plan(self) -> Plan:
        """For a request that ends here."""
        return self.fold.plan()

    def transcript(self, raws: Sequence[bytes | Raw]) -> Transcript:
        """With the bytes of the messages."""
        return Transcript(raws, self.messages, self.tools)
