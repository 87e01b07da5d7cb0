"""Ports for servers that must be told one, and for those that nobody listens on."""

from __future__ import annotations

import random
import socket
from contextlib import suppress

_PORTS = iter(random.sample(range(20_000, 30_000), 10_000))
"""The system takes the ports that it gives away itself from a higher range: were one of those free,
another test could get it before the server that was told it."""


def free_port() -> int:
    """Return a port on which nobody listens, and each port once."""
    for port in _PORTS:
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise RuntimeError("no port is left")
