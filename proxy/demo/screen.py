"""The demo's output: a live table on a terminal, plain lines elsewhere, and a summary at the end."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.table import Table

from proxy.demo.session import DemoResult, Row

INTRODUCTION = """\
An agent reads Python's standard library through offload-proxy, and sends its
whole history with every turn. The agent, its tools, the proxy and the store are
real. The model is scripted: it runs on this machine and decides by what it sees
in the messages that reach it. Sizes are tokens of o200k_base.

"""

_COLUMNS = ("turn", "the model says", "agent sends", "upstream gets", "results moved", "read back")
_PLAIN = "{:>4}  {:<44} {:>11} {:>13} {:>13} {:>9}"
_AROUND = 8
"""Lines of the terminal besides the rows."""


class Screen(Protocol):
    """Shows rows as they arrive."""

    def show(self, row: Row) -> None: ...


@contextmanager
def opened() -> Iterator[Screen]:
    """A live table if standard output is a terminal, plain lines otherwise."""
    console = Console()
    sys.stdout.write(INTRODUCTION)
    if not console.is_terminal:
        yield _Lines()
        return
    with Live(console=console, auto_refresh=False) as live:
        yield _LiveTable(live)


class _Lines:
    def __init__(self) -> None:
        self._write(*_COLUMNS)

    def show(self, row: Row) -> None:
        self._write(*_cells(row))

    def _write(self, *cells: str) -> None:
        sys.stdout.write(_PLAIN.format(*cells) + "\n")
        sys.stdout.flush()


class _LiveTable:
    """Shows as many of the latest rows as fit: a live display cannot be higher than its terminal."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._rows: list[Row] = []

    def show(self, row: Row) -> None:
        self._rows.append(row)
        room = max(self._live.console.height - _AROUND, 3)
        self._live.update(_table(self._rows[-room:]), refresh=True)


def _table(rows: list[Row]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column == _COLUMNS[1] else "right", no_wrap=True)
    for row in rows:
        table.add_row(*_cells(row))
    return table


def _cells(row: Row) -> tuple[str, ...]:
    figures = (f"{number:,}" if number else "" for number in (row.moved, row.read_back))
    return (str(row.turn), row.action[:44], f"{row.client:,}", f"{row.sent:,}", *figures)


def summary(outcome: DemoResult, folder: str, python: str) -> str:
    """The summary at the end of the demo."""
    last = outcome.last
    asked = [
        line
        for answer in outcome.answers
        for line in (
            f"asked         the line of {answer.question.path} that begins with {answer.question.begins!r}",
            f"  answered    {answer.said}  ({'right' if answer.right else 'WRONG'})",
        )
    ]
    lines = [
        *asked,
        "",
        f"context       {last.client:,} tokens without the proxy, {last.sent:,} with it: {outcome.reduction:.0%} less",
        f"              at no time more than {outcome.largest:,}",
        f"all requests  {outcome.without:,} tokens of input without, {outcome.sent:,} with, internal rounds included",
        f"prefix kept   {outcome.prefix_kept:.0%} of the input is what the request before began with (prompt cache)",
        f"nothing lost  {outcome.moved} results were moved, and each is in the store byte for byte"
        if not outcome.lost
        else f"LOST          {len(outcome.lost)} of {outcome.moved} moved results",
        f"files         {folder}/store, kept for you; delete them when you like",
        f"              {python} -m proxy store ls --store {folder}/store",
        "your agent    offload-proxy serve --upstream https://api.openai.com/v1",
        "              OPENAI_BASE_URL=http://127.0.0.1:8787/v1 your-agent",
        "",
        *(f"FAILED: {fault}" for fault in outcome.faults()),
    ]
    return "\n".join(lines) + "\n"
