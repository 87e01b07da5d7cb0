"""What the beginning of a history decides about later messages, such as which system messages lead."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from proxy.plan.plan import Role
from proxy.plan.results import Carries
from proxy.policy import Offload


class Opening(msgspec.Struct, frozen=True):
    """How far a history's opening has come."""

    leading: int = 0
    """The number of system messages at the beginning."""
    over: bool = False
    """Whether a message of another role has come, so that system messages no longer lead."""
    asked: bool = False
    """Whether the user's first message has come."""

    def leads(self, role: Role) -> bool:
        """Whether a message of this role would be one of the leading system messages."""
        return role is Role.SYSTEM and not self.over

    def then(self, role: Role) -> Opening:
        """The opening after one more message."""
        if self.asked or (self.over and role is not Role.USER):
            return self
        if role is Role.SYSTEM:
            return Opening(self.leading + 1)
        return Opening(self.leading, over=True, asked=role is Role.USER)

    def after(self, roles: Iterable[Role]) -> Opening:
        """The opening after messages of these roles."""
        opening = self
        if not opening.asked:
            for role in roles:
                opening = opening.then(role)
                if opening.asked:
                    break
        return opening

    def part(
        self, role: Role, tokens: int, carries: Carries, offload: Offload, said: bool = False
    ) -> tuple[Role, bool]:
        """The part that the next message plays in the plan, and whether its texts may ever be moved.

        One in which the user speaks (`said`) is the user's, whoever sends it.

        Later system messages that are large are results, and so are messages that the policy names. Of the others only
        large user messages can be moved, but never the first one, which usually states the task.
        """
        if role not in (Role.SYSTEM, Role.USER):
            return role, True
        if self.leads(role) or (role is Role.USER and not self.asked):
            return role, False
        if said:
            return Role.USER, tokens > offload.pin_user_tokens
        named = carries is Carries.YES or (carries is Carries.AFTER_FIRST_USER and self.asked)
        if named or (role is Role.SYSTEM and tokens > offload.max_tool_message_tokens):
            return Role.TOOL, True
        return role, role is Role.USER and tokens > offload.pin_user_tokens


START = Opening()
"""The opening of a history without messages."""
