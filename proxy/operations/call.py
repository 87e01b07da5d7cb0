"""One call of an operation: the caller, the parameters, and the figures for the log."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from proxy.operations.caller_files import CallerFiles
from proxy.operations.parameters import Body

if TYPE_CHECKING:
    from proxy.policies.tenants import Tenant
    from proxy.requests.exchange import Exchange
    from proxy.requests.services import Services

P = ParamSpec("P")
T = TypeVar("T")


@dataclass
class OperationAccount:
    """Fields of the outcome that the operations fill in; `Outcome` documents them."""

    mode: str = "off"
    model: str = ""
    messages: int = 0
    tokens_before: int = 0
    tokens_after: int = 0
    compacted: int = 0
    compressed: int = 0
    summary_prompt_tokens: int = 0
    summary_completion_tokens: int = 0
    cached_tokens: int = 0


@dataclass
class OperationCall:
    """Everything that an operation needs to do its work."""

    services: Services
    client: Exchange
    tenant: Tenant
    shelf: CallerFiles
    given: Body = field(default_factory=Body)
    """The request's body; empty until it is read."""
    account: OperationAccount = field(default_factory=OperationAccount)

    async def read(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `work` in a reading thread when it is this caller's turn, and return its result."""
        return await self.services.threads.run(self.tenant.namespace, lambda: work(*args, **kwargs))
