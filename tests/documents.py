"""The documents that describe the operations, which are kept outside the repository: their blocks
of code.

They are in the folder OFFLOAD_DOCUMENTS, else in ../shared/documents. If they are missing, `needed`
says why.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import NamedTuple

import pytest

FOLDER = Path(
    os.environ.get("OFFLOAD_DOCUMENTS") or Path(__file__).parents[2] / "shared" / "documents"
)

_BLOCK = re.compile(r"^( *)```(bash|python|\{code-cell\})\n(.*?)^\1```", re.MULTILINE | re.DOTALL)

LIBRARY = ("reme_ai", "compress_op", "open(original_path")
"""What only blocks about the documents' own library have, which is no server."""

needed = pytest.mark.skipif(
    not FOLDER.is_dir(), reason=f"no documents in {FOLDER} (set OFFLOAD_DOCUMENTS)"
)
"""Marks a test that needs the documents."""


class Block(NamedTuple):
    """A block of code: where it stands, its language, and its text."""

    name: str
    language: str
    code: str


def blocks(*languages: str) -> Iterator[Block]:
    """Yield the blocks in these languages that call a server, in the documents' order."""
    for file in sorted(FOLDER.glob("*")):
        text = file.read_text(errors="replace")
        for match in _BLOCK.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            block = Block(f"{file.name}:{line}", match[2].strip("{}"), dedent(match[3]))
            if block.language in languages and not any(word in block.code for word in LIBRARY):
                yield block
