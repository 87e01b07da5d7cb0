"""Serves for the process that started this one, as it says on standard input, and ends with it.

`proxy.apps.run.serving` is the other side.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from contextlib import suppress

import msgspec

from proxy.apps.dashboard import new_link
from proxy.apps.parts import PARTS
from proxy.apps.run.serving import Listening, Start, read, written
from proxy.apps.run.totals import Adding, Totals
from proxy.errors import UserMistake
from proxy.policies import load
from proxy.server import runner


def main() -> None:
    """Serve, and write to standard output where, or why not, and at the end what the requests came
    to."""
    start = read(sys.stdin.buffer.readline(), Start)
    settings = start.settings
    threading.Thread(target=_end_with_parent, name="parent", daemon=True).start()
    totals = Totals()

    def ready(address: str) -> None:
        link = new_link(settings, address) if start.link else None
        _say(Listening(address + settings.below, link))

    try:
        policies = load(
            settings.policies, settings.environment, settings.upstream, settings.built_in
        )
        logging.getLogger("proxy.request").addHandler(Adding(totals, policies))
        runner.serve(settings, [*PARTS.values()], ready=ready)
    except UserMistake as error:
        _say(Listening(fault=str(error)))
        return
    _say(totals)


def _say(answer: msgspec.Struct) -> None:
    with suppress(OSError):
        sys.stdout.write(written(answer).decode())
        sys.stdout.flush()


def _end_with_parent() -> None:
    """Wait for the end of standard input. Not by `sys.stdin`, which the interpreter locks when it
    ends."""
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
