"""`/read_file`: returns a file's content without any additions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from proxy.errors import NotThere
from proxy.operations import parameters
from proxy.operations.envelope import OperationReply
from proxy.tools import names, pages

if TYPE_CHECKING:
    from proxy.operations.call import OperationCall
    from proxy.operations.caller_files import CallerFiles


WRITING = 10.0
"""Most seconds that a call waits for files of its caller that are being written."""


async def read_file(call: OperationCall) -> OperationReply:
    """Return the lines that the call asks for. Raises ProxyError."""
    given = await call.read(parameters.taken, call.given, parameters.ReadFile)
    try:
        path, content = await _found(call.shelf, given.absolute_path)
    except NotThere:
        # A reply that moved this text may have ended before the text was written.
        if not await call.services.background.ended(f"{call.tenant.namespace}/", WRITING):
            raise
        path, content = await _found(call.shelf, given.absolute_path)
    return await call.read(shown, path, content, given.offset or 0, given.limit)


async def _found(shelf: CallerFiles, path: str) -> tuple[str, bytes]:
    """Return the path and content of the file with this path, or of the only file whose path ends with it.

    Such relative paths come from the `File:` lines of `/grep`. Raises NotThere.
    """
    name = names.canonical(path)
    content = await shelf.read(name) if name else None
    if content is not None:
        return path, content
    if name in shelf.damaged:
        raise shelf.missing(name, path)
    ending = [file.name for file in await shelf.below("") if name and file.name.endswith(f"/{name}")]
    if len(ending) == 1:
        if (content := await shelf.read(ending[0])) is not None:
            return ending[0], content
        raise shelf.missing(ending[0], ending[0])
    several = ": " + ", ".join(ending[:5]) if ending else ""
    raise NotThere(
        f"There is no file {path!r} among your files{several and '; there are several that end so' + several}"
    )


def shown(path: str, content: bytes, offset: int, limit: int | None) -> OperationReply:
    """Return `limit` lines, starting with the 0-based line `offset`; empty past the end of the file."""
    text = content.decode("utf-8", "surrogatepass")
    lines = pages.line_count(text)
    start = pages.line_start(text, min(offset, lines))
    stop = len(text) if limit is None else pages.line_start(text, min(limit, lines), start)
    return OperationReply(text[start:stop], metadata={"path": path, "size_bytes": len(content), "lines": lines})
