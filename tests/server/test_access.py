"""Who is closed when there are too many connections."""

from __future__ import annotations

import pytest

from proxy.server import access
from proxy.server.access import Bounds
from proxy.settings import Settings


class Connection:
    """One that is idle or not, and knows whether it was closed."""

    def __init__(self, *, busy: bool = False) -> None:
        self.busy = busy
        self.expired = 0

    def expire(self) -> None:
        self.expired += 1

    def unfinished(self) -> None:
        return None

    def idle(self) -> bool:
        return not self.busy


def test_the_connection_that_was_idle_for_longest_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    if access.resource is None:
        pytest.skip("there is no limit here")
    monkeypatch.setattr(access.resource, "getrlimit", lambda _: (4, 4))
    account = Bounds(Settings(), lambda *_: None)
    opened = [Connection(busy=True), Connection(), Connection(), Connection()]
    for number, connection in enumerate(opened):
        account.opened()
        account.deadlines[connection] = number
    assert [connection.expired for connection in opened] == [0, 1, 0, 0]
    assert opened[1] not in account.deadlines
    account.closed()
    account.closed()
    account.opened()
    assert [connection.expired for connection in opened] == [0, 1, 0, 0]
