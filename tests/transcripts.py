"""Reads recorded agent runs, which are kept outside the repository: `load()`, `requests_of(run)`,
`needed`.

They are in the folder OFFLOAD_TRANSCRIPTS, else in ../shared/transcripts. If they are missing,
`absence()` says why.
"""

from __future__ import annotations

import csv
import gzip
import json
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

Json = dict[str, Any]

FOLDER = Path(
    os.environ.get("OFFLOAD_TRANSCRIPTS") or Path(__file__).parents[2] / "shared" / "transcripts",
)


class Run(msgspec.Struct, frozen=True):
    """One recorded conversation. `total_tokens` is the manifest's count (o200k_base, without
    `tools`)."""

    source: str
    id: str
    model: str
    tools: list[Json]
    messages: list[Json]
    total_tokens: int
    kind: str = ""
    """The manifest's word for the task: software-engineering, web-research, ..."""


def absence(folder: Path = FOLDER) -> str:
    """Return why there are no runs, or an empty string if there are some."""
    return (
        ""
        if (folder / "manifest.csv").is_file()
        else f"no recorded runs in {folder} (set OFFLOAD_TRANSCRIPTS)"
    )


needed = pytest.mark.skipif(bool(absence()), reason=absence())
"""Marks a test that needs the runs."""


def load(min_tokens: int = 0, source: str | None = None, folder: Path = FOLDER) -> Iterator[Run]:
    """Yield the runs above `min_tokens` in the files' order, of one file only if `source` names
    it."""
    for file in sorted(folder.glob(f"{source or '*'}.jsonl.gz")):
        name = file.name.removesuffix(".jsonl.gz")
        with gzip.open(file, "rt", encoding="utf-8") as lines:
            for line in lines:
                run = _run(name, json.loads(line), folder)
                if run.total_tokens > min_tokens:
                    yield run


def names(min_tokens: int = 0) -> list[str]:
    """Return the ids of the runs above `min_tokens` for parametrised tests. Cheap: it reads the
    manifest only."""
    return [run_id for run_id, tokens in _manifest(FOLDER).items() if tokens > min_tokens]


def one(run_id: str) -> Run:
    """Return the run with this id. Raises `KeyError` if there is none."""
    for run in _all():
        if run.id == run_id:
            return run
    raise KeyError(run_id)


def requests_of(run: Run) -> Iterator[tuple[list[Json], Json]]:
    """Yield the messages before each recorded reply, and that reply: `(messages[:i],
    messages[i])`."""
    for index, message in enumerate(run.messages):
        if message["role"] == "assistant":
            yield run.messages[:index], message


def _run(source: str, record: Json, folder: Path) -> Run:
    tokens = _manifest(folder)[record["id"]]
    model, tools, messages = record.get("model") or "", record["tools"], record["messages"]
    return Run(source, record["id"], model, tools, messages, tokens, record.get("kind") or "")


@cache
def _all() -> tuple[Run, ...]:
    return tuple(load())


@cache
def _manifest(folder: Path) -> dict[str, int]:
    if absence(folder):
        return {}
    with (folder / "manifest.csv").open(newline="", encoding="utf-8") as rows:
        return {row["id"]: int(row["total_tokens"]) for row in csv.DictReader(rows)}
