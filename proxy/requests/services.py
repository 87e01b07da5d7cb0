"""The parts of a process that all of its requests share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from proxy.requests.background import Background
    from proxy.requests.message_cache import MessageCache
    from proxy.requests.prepared import Prepared
    from proxy.requests.relay import Relay, Sink
    from proxy.requests.summaries import Summaries
    from proxy.requests.windows import Known
    from proxy.settings import Settings
    from proxy.stores.guarded import Guarded
    from proxy.telemetry.outcome import Outcome
    from proxy.threads import WorkPool
    from proxy.upstream.client import UpstreamClient


@dataclass(frozen=True)
class Services:
    """Every handler gets this. `known` is what upstreams have shown, and `sink` gets every outcome."""

    settings: Settings
    upstream: UpstreamClient
    relay: Relay
    store: Guarded
    reader: MessageCache
    summaries: Summaries
    background: Background
    threads: WorkPool
    known: Known
    sink: Sink
    watch: Callable[[Outcome, Prepared], None] | None = None
    """Called with every chat request that has ended, before the sink gets its outcome."""
