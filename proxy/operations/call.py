"""One call of an operation: who makes it, what it brought, what it has come to."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from proxy.operations.parameters import Body
from proxy.operations.shelf import Shelf

if TYPE_CHECKING:
    from proxy.client import Client
    from proxy.services import Services
    from proxy.summarizer import Summarizer
    from proxy.tenants import Tenant


@dataclass
class Call:
    """What an operation has to work with."""

    services: Services
    summarizer: Summarizer
    client: Client
    tenant: Tenant
    shelf: Shelf
    searching: asyncio.Semaphore
    """The threads that all searches of this process have together."""
    given: Body = field(default_factory=Body)
    """What the client sent, once it is read."""
    noted: dict[str, Any] = field(default_factory=dict)
    """Fields of the outcome."""
