"""What all requests of a process share, handed to whoever serves one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from proxy.requests.background import Background
    from proxy.requests.message_cache import Reader
    from proxy.requests.passthrough import Relay, Sink
    from proxy.requests.snapshots import Snapshots
    from proxy.requests.upstream_limits import Learned
    from proxy.settings import Settings
    from proxy.stores.guarded import Guarded
    from proxy.threads import Threads
    from proxy.upstream.client import Upstream


@dataclass(frozen=True)
class Services:
    """What all requests of a process share."""

    settings: Settings
    upstream: Upstream
    relay: Relay
    store: Guarded
    reader: Reader
    snapshots: Snapshots
    background: Background
    threads: Threads
    learned: Learned
    sink: Sink
