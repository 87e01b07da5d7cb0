"""Real clients, unmodified, each in an environment of its own: `make test-clients` installs and runs them."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.clients import model
from tests.clients.tap import Tap, tap
from tests.strict import Rules
from tests.upstream import Message, StrictUpstream, calls, text

pytestmark = pytest.mark.clients

HERE = Path(__file__).parent
ENVIRONMENTS = HERE.parents[1] / ".clients"
TASK = "Read the logs part0.log to part5.log, one after the other, and tell me the code word."
FACT = "the code word is heliotrope-7291"
NEEDLE = "heliotrope-7291"


@dataclass(frozen=True)
class Client:
    """How a client is started, and what the model must know of it to use its tools."""

    name: str
    command: tuple[str | Path, ...]
    """What comes before the task. Its first path is what the client's installation makes."""
    tool: str = "read_log"
    arguments: Callable[[str], dict[str, Any]] = lambda path: {"path": path}
    finish: Callable[[str], Message] = text
    streams: bool = True
    rules: Rules = field(default_factory=Rules)
    environment: dict[str, str] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    """Files to lay into its home."""
