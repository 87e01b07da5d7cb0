"""One call of an operation: who makes it, what it brought, what it has come to."""

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
    """What an operation has to work with."""

    services: Services
    summarizer: Summarizer
    client: Exchange
    tenant: Tenant
    shelf: CallerFiles
    given: Body = field(default_factory=Body)
    """What the client sent, once it is read."""
    noted: dict[str, Any] = field(default_factory=dict)
    """Fields of the outcome."""

    async def read(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of `work`, in a thread for reading when it is this caller's turn."""
        return await self.services.threads.reading.run(self.tenant.namespace, lambda: work(*args, **kwargs))
