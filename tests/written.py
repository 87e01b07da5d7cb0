"""Sections of a policy as a file has them: what is left out has the plan's and the profile's
default."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from proxy.plan.plan import Item, Plan, Room
from proxy.plan.planner import Fold
from proxy.policy import PROFILES, Compress, Mode, Offload, Profile


class Limited(Offload, frozen=True, kw_only=True):
    """A section whose limit for results that the model has not seen is the test's, in any
    window."""

    limit: int

    def unseen_limit(self, window: int | None) -> int:
        return self.limit


def offload(**keys: Any) -> Offload:
    """Return the `offload` section of a policy that sets these keys, or `unseen_limit`."""
    given = {**PROFILES[keys.get("profile", Profile.BALANCED)][0], **keys}
    if (limit := given.pop("unseen_limit", None)) is None:
        return msgspec.convert(given, Offload)
    return msgspec.convert({**given, "limit": limit}, Limited)


SMALL = offload(
    mode=Mode.AUTO,
    keep_views=1,
    max_total_tokens=2000,
    max_tool_message_tokens=300,
    unseen_limit=9000,
    pin_user_tokens=100,
    cached_read=0,
    cache_write=0,
    store_dir="/store",
    compress=Compress(snapshot_tokens=100),
)
"""For histories in which a token is a character."""


def fold(
    items: Iterable[Item], offload: Offload, room: Room, tool_definition_tokens: int = 0
) -> Plan:
    """The plan for a history: a pure function of the history, the policy and the upstream's
    room."""
    state = Fold(offload, room, tool_definition_tokens)
    for item in items:
        state.add(item)
    return state.plan()
