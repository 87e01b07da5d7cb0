"""The parts of a proxy that `offload-proxy serve` runs, by name. A new one is a class and a line
here."""

from __future__ import annotations

from collections.abc import Mapping

from proxy.apps.capture import Captures
from proxy.apps.dashboard.part import Board
from proxy.apps.operations import Operations
from proxy.apps.verify import Verify
from proxy.server.process import MakePart

PARTS: Mapping[str, MakePart] = {
    "operations": Operations,
    "verify": Verify,
    "captures": Captures,
    "dashboard": Board,
}
