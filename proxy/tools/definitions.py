"""What a model is told about `grep` and `read_file`.

This module has no dialect's field names: `definitions` gives name, description and parameters.
"""

from __future__ import annotations

import msgspec

Names = tuple[str, str]

NAMES: Names = ("grep", "read_file")
"""The names of our tools."""

OTHER_NAMES: Names = ("offload_grep", "offload_read_file")
"""Their names if the client has a tool with either name, or may have one."""

DEFAULT_MATCHES = 50


def definitions(names: Names, store_dir: str, *, others: bool = False) -> list[bytes]:
    """Return both tools as JSON objects of `name`, `description` and `parameters`. Equal arguments give equal bytes.

    `others`: a search without a path also goes through what this user's last conversations moved.
    """
    grep, read_file = names
    everything = "all files, and what this user's last conversations moved" if others else "all files"
    path = f"A file below {store_dir}, or the path, address or command of the call whose result was moved"
    return [
        _definition(
            grep,
            f"Search the full texts that were moved out of this conversation into files below {store_dir}, line by"
            f" line, ignoring case. Lines are numbered like {read_file}'s offset.",
            "pattern",
            pattern=("string", "Regular expression (RE2: no look-around, no back-references)"),
            path=("string", f"{path} (default: {everything})"),
            glob=("string", "Only files whose name fits, such as *.txt"),
            limit=("integer", f"Most matches (default {DEFAULT_MATCHES})"),
        ),
        _definition(
            read_file,
            f"Read the full text of something that was moved out of this conversation into a file below {store_dir}, or"
            f" as much as fits; then a last line in brackets says how to go on. These paths are for {grep} and"
            f" {read_file} only: they mean nothing to the user or to any other tool.",
            "path",
            path=("string", path),
            offset=("integer", "First line, counted from 0"),
            limit=("integer", "Number of lines (default: all)"),
            column=("integer", "First character in that line, counted from 0, if it is very long"),
        ),
    ]


def _definition(name: str, description: str, required: str, **properties: tuple[str, str]) -> bytes:
    """Describe a tool in plain JSON Schema: `strict` with its nullable unions upsets weaker servers."""
    described = {key: {"type": kind, "description": text} for key, (kind, text) in properties.items()}
    parameters = {"type": "object", "properties": described, "required": [required]}
    return msgspec.json.encode({"name": name, "description": description, "parameters": parameters})
