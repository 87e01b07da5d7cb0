"""Pairs tool calls with their results, message by message, and finds the messages that fit into no pair.

A *step* is an assistant message with everything up to the next one. Within a step a result belongs to the call with its
id; calls with equal ids, or with none, get their results in order.

A message is *irregular* if it has a call without a result, if it is a result without a call, or if it is *sealed*:
something in it is not known to be safe to move or to cut, such as definitions of tools, what only upstream can read, or
what no API had when this was written. Nobody knows what hangs on such messages, so the plan leaves them as they are,
and a cut leaves their whole step in its place. So does a cut with a step in which the user speaks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from enum import StrEnum
from typing import NamedTuple, Self

from proxy.plan.plan import Role


class Irregular(StrEnum):
    """Why a message fits into no pair."""

    NO_RESULT = "no_result"
    """One of its calls has no result within its step."""
    NO_CALL = "no_call"
    """It is a result without a call before it in its step."""
    SEALED = "sealed"
    """Something in it is not known to be safe to move or to cut."""


class Place(NamedTuple):
    """A message's place among calls and results."""

    tool: str = ""
    """The tool whose result it is."""
    fits: bool = True
    """Whether it is neither a result without a call nor sealed. Otherwise its text must not move."""
    stays: bool = False
    """Whether a cut leaves it where it is."""
    stays_before: int = 0
    """How many messages directly before it a cut must leave where they are too, as this message shows."""


REGULAR = Place()


class Pairing:
    """The calls and results of a history's messages so far. Each message takes constant time (amortised)."""

    def __init__(self) -> None:
        self.irregular: dict[Irregular, int] = {}
        """The number of irregular messages so far."""
        self._open: dict[str, deque[str]] = {}  # by id, the tools called in this step that have not answered yet
        self._stays = False  # whether the step so far stays
        self._loose = 0  # how many messages the step has so far, if it does not stay
        self._goes_on = False  # whether the next reply belongs to this step: we do not know who said the last entry

    @property
    def open(self) -> bool:
        """Whether the newest step has calls without results, which may still come."""
        return bool(self._open)

    def add(
        self,
        role: Role,
        calls: tuple[tuple[str, str], ...],
        answers: str,
        sealed: bool = False,
        said: bool = False,
        asking: Collection[str] = (),
    ) -> Place:
        """Return the place of the history's next message. `sealed`, `said`: see `Message`; `asking`: see `places`."""
        before = 0
        if self._open and role not in (Role.TOOL, Role.SEALED):  # the step goes on without their results
            self._count(Irregular.NO_RESULT)
            before = self._begin_to_stay()
            self._open = {}
        if role is Role.ASSISTANT and not self._goes_on:
            self._stays, self._loose = False, 0
        self._goes_on = sealed and role is Role.SEALED
        tool = self._called(answers) if role is Role.TOOL else None
        fits = not sealed and (role is not Role.TOOL or tool is not None)
        if not fits:
            self._count(Irregular.SEALED if sealed else Irregular.NO_CALL)
            before += self._begin_to_stay()
        if role is Role.TOOL and (said or tool in asking):
            before += self._begin_to_stay()
        for id, name in calls if role is Role.ASSISTANT else ():
            self._open.setdefault(id, deque()).append(name)
        self._loose += not self._stays
        if fits and not (before or self._stays or tool):
            return REGULAR
        return Place(tool or "", fits, self._stays, before)

    def copy(self) -> Self:
        other = type(self)()
        if self._open:
            other._open = {id: names.copy() for id, names in self._open.items()}
        if self.irregular:
            other.irregular = self.irregular.copy()
        other._stays, other._loose, other._goes_on = self._stays, self._loose, self._goes_on
        return other

    def _count(self, irregular: Irregular) -> None:
        self.irregular[irregular] = self.irregular.get(irregular, 0) + 1

    def _called(self, id: str) -> str | None:
        """Take the oldest open call with this id; returns its tool."""
        names = self._open.get(id)
        if names is None:
            return None
        name = names.popleft()
        if not names:
            del self._open[id]
        return name

    def _begin_to_stay(self) -> int:
        """Let the step stay; returns how many of its messages did not stay before."""
        before = self._loose
        self._stays, self._loose = True, 0
        return before
