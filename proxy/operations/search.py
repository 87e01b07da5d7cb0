"""`/grep` and `/read_file`: find and show lines of the caller's own files, in threads, a few files at a time."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from proxy import regex
from proxy.errors import ClientFault, NotThere
from proxy.operations import names, schema
from proxy.operations.call import OperationReply
from proxy.plan.preview import line_count
from proxy.regex import Budget, sliced
from proxy.tools import pages, search
from proxy.tools.find import fitting, relative
from proxy.tools.search import Find, LineMatch, TooSlow

if TYPE_CHECKING:
    from proxy.operations.call import OperationCall
    from proxy.operations.files import CallerFiles, File

SECONDS = 10.0
"""Seconds of processor time that one search may take; enough for 10 GB at a pattern's usual speed."""

BATCH_BYTES, BATCH_FILES = 4 << 20, 200
"""The most bytes and files that are read and searched at a time; a larger file is a batch by itself."""

WRITING = 10.0
"""Most seconds that a call waits for files of its caller that are being written."""

MATCHES, CHARACTERS = 100_000, 16 << 20
"""The most matches and characters in one answer, whatever the limit."""

NAMED = 20
"""The most damaged files that an answer names. Its metadata has them all."""


class Texts(Protocol):
    """What can be searched."""

    async def read_many(self, wanted: Sequence[str], /) -> Sequence[bytes | None]:
        """Return the contents in the order of the names, with None for each that is missing."""


class Found(msgspec.Struct):
    """The matches to show, `most` at most, and whether there are more."""

    most: int
    matches: list[LineMatch] = []
    characters: int = 0
    more: bool = False


async def grep(call: OperationCall) -> OperationReply:
    """Return the matching lines of one file or of all files below a path. Raises ProxyError."""
    budget = Budget(SECONDS)
    if "file_path" in call.given.members:
        return await _in_one(call, await call.read(schema.taken, call.given, schema.Find), budget)
    return await _below(call, await call.read(schema.taken, call.given, schema.Search), budget)


async def _below(call: OperationCall, given: schema.Search, budget: Budget) -> OperationReply:
    directory = names.canonical(given.path or ".")
    find = await compiled(call, regex.compile, given.pattern, budget)
    files = await call.shelf.below(directory)
    if not files and directory:
        raise NotThere(f"There is nothing in {given.path!r} among your files")
    if given.glob:
        wanted = set(await call.read(fitting, given.glob, [file.name for file in files], directory))
        files = [file for file in files if file.name in wanted]
    found = await searched(call, call.shelf, files, find, given.limit, budget)
    damaged = [relative(name, directory) for name in call.shelf.damaged]
    return await call.read(_shown_below, given, directory, found, damaged)


async def _in_one(call: OperationCall, given: schema.Find, budget: Budget) -> OperationReply:
    find = await compiled(call, regex.literal, given.pattern, budget)
    name = names.canonical(given.file_path)
    [content] = await call.shelf.read_many([name])
    if content is None:
        raise call.shelf.missing(name, given.file_path)
    found = Found(min(given.limit or MATCHES, MATCHES))
    await _search(call, {name: content}, find, found, budget)
    lines = [f"{given.file_path}:{match.line}:{match.text}" for match in found.matches]
    answer = "\n".join(lines) or f'No matches for "{given.pattern}" in "{given.file_path}"'
    return OperationReply(answer, metadata=_metadata(found, [given.file_path] * len(lines)))


async def searched(
    call: OperationCall, texts: Texts, files: Sequence[File], find: Find, limit: int | None, budget: Budget
) -> Found:
    """Return the matches in these files, in order. Raises StoreFault and ClientFault."""
    found = Found(min(limit or MATCHES, MATCHES))
    for batch in _batches(files):
        contents = await texts.read_many([file.name for file in batch])
        # A file's retention may have ended since it was listed.
        there = {file.name: content for file, content in zip(batch, contents, strict=True) if content is not None}
        await _search(call, there, find, found, budget)
        if found.more:
            break
    return found


async def _search(call: OperationCall, files: dict[str, bytes], find: Find, found: Found, budget: Budget) -> None:
    try:
        await sliced(call.services.threads, call.tenant.namespace, _in_files(files, find, found), budget)
    except TooSlow as error:
        raise _unusable(error) from error


def _in_files(files: dict[str, bytes], find: Find, found: Found) -> Generator[None, None, None]:
    for name, content in files.items():
        data = search.searched(content.decode("utf-8", "surrogatepass"))
        for match in search.in_data(name, data, find):
            yield
            if match is None:
                continue
            found.characters += len(match.text)
            if len(found.matches) == found.most or found.characters > CHARACTERS:
                found.more = True
                return
            found.matches.append(match)
        yield


def _batches(files: Sequence[File]) -> Iterator[list[File]]:
    batch: list[File] = []
    size = 0
    for file in files:
        if batch and (size + file.size > BATCH_BYTES or len(batch) == BATCH_FILES):
            yield batch
            batch, size = [], 0
        batch.append(file)
        size += file.size
    if batch:
        yield batch


async def compiled(call: OperationCall, matcher: Callable[[str, Budget], Find], pattern: str, budget: Budget) -> Find:
    """Raises ClientFault."""
    try:
        return await call.read(matcher, pattern, budget)
    except ValueError as error:
        raise _unusable(error) from error


def _unusable(error: ValueError) -> ClientFault:
    return ClientFault(f"`$.pattern` cannot be used: {error}")


def _shown_below(given: schema.Search, directory: str, found: Found, damaged: Sequence[str]) -> OperationReply:
    """Show a block for each file, between lines of dashes, and below them what was not searched."""
    path = given.path or "."
    about = f'pattern "{given.pattern}" in path "{path}"' + (f' (filter: "{given.glob}")' if given.glob else "")
    lines = [f"Found {len(found.matches)} matches for {about}:"]
    paths: list[str] = []
    for name, group in groupby(found.matches, key=lambda match: match.path):
        below = relative(name, directory)
        shown = [f"L{match.line}: {match.text}" for match in group]
        lines += ["---", f"File: {below}", *shown]
        paths += [names.joined(path, below)] * len(shown)
    answer = "\n".join([*lines, "---"]) if paths else f"No matches found for {about}"
    metadata = _metadata(found, paths)
    if damaged:
        more = f" and {len(damaged) - NAMED} more" if len(damaged) > NAMED else ""
        answer += f"\nNot searched, because damaged in the store: {', '.join(damaged[:NAMED])}{more}"
        metadata["damaged"] = [names.joined(path, name) for name in damaged]
    return OperationReply(answer, metadata=metadata)


def _metadata(found: Found, paths: Sequence[str]) -> dict[str, Any]:
    """Return the metadata: `column` counts characters from 0; `truncated` means that there are more matches."""
    matches = [
        {"path": path, "line": match.line, "column": match.column, "text": match.text}
        for path, match in zip(paths, found.matches, strict=True)
    ]
    return {"matches": matches, "truncated": found.more}


# -- read_file --


async def read_file(call: OperationCall) -> OperationReply:
    """Return the lines that the call asks for. Raises ProxyError."""
    given = await call.read(schema.taken, call.given, schema.ReadFile)
    try:
        path, content = await _named(call.shelf, given.absolute_path)
    except NotThere:
        # A reply that moved this text may have ended before the text was written.
        if not await call.services.background.ended(f"{call.tenant.namespace}/", WRITING):
            raise
        path, content = await _named(call.shelf, given.absolute_path)
    return await call.read(shown, path, content, given.offset or 0, given.limit)


async def _named(shelf: CallerFiles, path: str) -> tuple[str, bytes]:
    """Return the path and content of the file with this path, or of the only file whose path ends with it.

    Such relative paths come from the `File:` lines of `/grep`. Raises NotThere.
    """
    name = names.canonical(path)
    content = await shelf.read(name) if name else None
    if content is None and name and name not in shelf.damaged:
        ending = [file.name for file in await shelf.below("") if file.name.endswith(f"/{name}")]
        if len(ending) > 1:
            several = ", ".join(ending[:5])
            raise NotThere(f"There is no file {path!r} among your files; there are several that end so: {several}")
        if ending:
            name = path = ending[0]
            content = await shelf.read(name)
    if content is None:
        raise shelf.missing(name, path)
    return path, content


def shown(path: str, content: bytes, offset: int, limit: int | None) -> OperationReply:
    """Return `limit` lines, starting with the 0-based line `offset`; empty past the end of the file."""
    text = content.decode("utf-8", "surrogatepass")
    lines = line_count(text)
    start = pages.line_start(text, min(offset, lines))
    stop = len(text) if limit is None else pages.line_start(text, min(limit, lines), start)
    return OperationReply(text[start:stop], metadata={"path": path, "size_bytes": len(content), "lines": lines})
