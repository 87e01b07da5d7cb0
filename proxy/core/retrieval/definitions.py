"""What a model is told about `grep` and `read_file`.

This module has no dialect's field names: `definitions` gives name, description and parameters.
"""

from __future__ import annotations

import msgspec

Names = tuple[str, str]

NAMES: Names = ("grep", "read_file")
"""The names of our tools."""

OTHER_NAMES: Names = ("offload_grep", "offload_read_file")
"""Their names if the client has a tool with either name."""

DEFAULT_MATCHES = 50


def definitions(names: Names, store_dir: str) -> list[bytes]:
    """Return both tools as JSON objects of `name`, `description` and `parameters`. Equal arguments give equal bytes."""
    grep, read_file = names
    own = f"These paths are for {grep} and {read_file} only: they mean nothing to the user or to any other tool."
    path = f"A file below {store_dir}, or the path, address or command of the call whose result was moved"
    return [
        _definition(
            grep,
            f"Search the full texts that were moved out of this conversation into files below {store_dir}, the ones it"
            f" mentions as stored there. Line by line, case-insensitive. Lines are numbered like {read_file}'s offset."
            f" {own}",
            "pattern",
            pattern=("string", "Regular expression in RE2 syntax: no look-around, no back-references"),
            path=("string", f"{path}; {store_dir} for all of them (default)"),
            glob=("string", "Only files whose name fits, such as *.txt"),
            limit=("integer", f"At most so many matches (default {DEFAULT_MATCHES})"),
        ),
        _definition(
            read_file,
            f"Read a file below {store_dir}: the full text of something that was moved out of this conversation. Gives"
            f" the whole file or as much as fits; then a last line in brackets says how to go on. {own}",
            "path",
            path=("string", path),
            offset=("integer", "First line, counted from 0 (default 0)"),
            limit=("integer", "Number of lines (default: all)"),
            column=(
                "integer",
                "First character within the first line, counted from 0, for very long lines (default 0)",
            ),
        ),
    ]


def _definition(name: str, description: str, required: str, **properties: tuple[str, str]) -> bytes:
    """Describe a tool in plain JSON Schema: `strict` with its nullable unions upsets weaker servers."""
    described = {key: {"type": kind, "description": text} for key, (kind, text) in properties.items()}
    parameters = {"type": "object", "properties": described, "required": [required]}
    return msgspec.json.encode({"name": name, "description": description, "parameters": parameters})
