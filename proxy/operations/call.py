"""One call of an operation: the caller, the parameters, the figures for the log, and the envelope of every reply."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import msgspec
from msgspec import Raw

from proxy import rawjson
from proxy.errors import ProxyError
from proxy.operations.files import CallerFiles
from proxy.operations.schema import Body

if TYPE_CHECKING:
    from proxy.policies.tenants import Tenant
    from proxy.requests.exchange import Exchange
    from proxy.requests.rounds import Services

P = ParamSpec("P")
T = TypeVar("T")


@dataclass
class OperationCall:
    """Everything that an operation needs to do its work."""

    services: Services
    client: Exchange
    tenant: Tenant
    shelf: CallerFiles
    given: Body = field(default_factory=Body)
    """The request's body; empty until it is read."""
    noted: dict[str, Any] = field(default_factory=lambda: {"mode": "off"})
    """What the operation adds to its outcome."""

    async def read(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `work` in a reading thread when it is this caller's turn, and return its result."""
        return await self.services.threads.run(self.tenant.namespace, lambda: work(*args, **kwargs))


class OperationReply(msgspec.Struct, frozen=True):
    """The content of a successful reply. Messages are raw JSON and keep their bytes."""

    answer: str
    messages: list[bytes | Raw] = []
    metadata: Mapping[str, Any] = {}

    def body(self) -> bytes:
        """The body of the HTTP reply."""
        return _envelope(True, self.answer, self.messages, self.metadata)


class BareReply(msgspec.Struct, frozen=True):
    """A reply in the shape that its callers know from elsewhere: members, and raw messages where there are any."""

    members: Mapping[str, Any]
    messages: list[bytes | Raw] | None = None

    def body(self) -> bytes:
        """The body of the HTTP reply."""
        if self.messages is None:
            return rawjson.encode(self.members)
        return b'{"messages":' + rawjson.array(self.messages) + b"," + rawjson.encode(self.members)[1:]


def refusal(messages: Iterable[bytes | Raw] = ()) -> Callable[[ProxyError], bytes]:
    """Return a function that takes an error and returns a body with the reason and the caller's own messages.

    The messages are included so that a failed call cannot lose them.
    """
    own = list(messages)
    return lambda error: _envelope(False, error.message, own, {"error": error.code or error.kind})


def _envelope(success: bool, answer: str, messages: Iterable[bytes | Raw], metadata: Mapping[str, Any]) -> bytes:
    """Encode each member separately, because some are raw JSON and others are text that must be escaped."""
    said, more = rawjson.encode(answer), rawjson.encode(metadata)
    return b'{"success":%b,"answer":%b,"messages":%b,"metadata":%b}' % (
        rawjson.encode(success), said, rawjson.array(messages), more
    )  # fmt: skip
