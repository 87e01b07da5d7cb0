"""One call of an operation: its caller, its parameters, and its outcome so far."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from proxy.operations.caller_files import CallerFiles
from proxy.operations.parameters import Body

if TYPE_CHECKING:
    from proxy.policies.tenants import Tenant
    from proxy.requests.exchange import Exchange
    from proxy.requests.services import Services
    from proxy.requests.summarizer import Summarizer

P = ParamSpec("P")
T = TypeVar("T")


@dataclass
class OperationCall:
    """Everything that an operation needs to do its work."""

    services: Services
    summarizer: Summarizer
    client: Exchange
    tenant: Tenant
    shelf: CallerFiles
    given: Body = field(default_factory=Body)
    """The request's body, once it is read."""
    noted: dict[str, Any] = field(default_factory=dict)
    """Fields of the outcome."""

    async def read(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `work` in a thread for reading, when it is this caller's turn; returns its result."""
        return await self.services.threads.reading.run(self.tenant.namespace, lambda: work(*args, **kwargs))
