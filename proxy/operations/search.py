"""`/grep` and `/read_file`: find and show lines of the caller's own files, in threads, a few files at a time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from proxy import regex
from proxy.errors import ClientFault, NotThere
from proxy.operations import schema
from proxy.operations.call import OperationReply
from proxy.regex import Budget, sliced
from proxy.tools import names, pages, search
from proxy.tools.search import Find, LineMatch, TooSlow

if TYPE_CHECKING:
    from proxy.operations.call import OperationCall
    from proxy.operations.files import CallerFiles, File

SECONDS = 10.0
"""Seconds of processor time that one search may take; enough for 10 GB at a pattern's usual speed."""

BATCH_BYTES = 4 << 20
"""The most bytes that are read and searched at a time; a larger file is a batch by itself."""

BATCH_FILES = 200
"""The most files in a batch. Their keys are made on the event loop, which takes 2 ms."""

WRITING = 10.0
"""Most seconds that a call waits for files of its caller that are being written."""

MATCHES = 100_000
CHARACTERS = 16 << 20
"""The most matches and characters in one answer, whatever the limit."""

NAMED = 20
"""The most damaged files that an answer names. Its metadata has them all."""


Steps = Generator[None, None, list[LineMatch]]


class Texts(Protocol):
    """What can be searched."""

    async def read_many(self, wanted: Sequence[str], /) -> Sequence[bytes | None]:
        """Return the contents in the order of the names, with None for each that is missing."""


class Found(msgspec.Struct, frozen=True):
    """The matches to show, and whether there may be more."""

    matches: list[LineMatch]
    more: bool


async def grep(call: OperationCall) -> OperationReply:
    """Return the matching lines of one file or of all files below a path. Raises ProxyError."""
    budget = Budget(SECONDS)
    try:
        if "file_path" in call.given.members:
            return await _in_one(call, await call.read(schema.taken, call.given, schema.Find), budget)
        return await _below(call, await call.read(schema.taken, call.given, schema.Search), budget)
    except TooSlow as error:
        raise _unusable(error) from error


async def _below(call: OperationCall, given: schema.Search, budget: Budget) -> OperationReply:
    directory = names.canonical(given.path or ".")
    find = await _matcher(call, regex.compile, given.pattern, budget)
    files = await call.shelf.below(directory)
    if not files and directory:
        raise NotThere(f"There is nothing in {given.path!r} among your files")
    wanted = await call.read(_fitting, given.glob, files, directory) if given.glob else files

    async def run(steps: Steps) -> list[LineMatch]:
        return await sliced(call.services.threads, call.tenant.namespace, steps, budget)

    matches = await searched(call.shelf, wanted, find, given.limit, run)
    damaged = [search.relative(name, directory) for name in call.shelf.damaged]
    return await call.read(_shown_below, given, directory, matches, damaged)


async def _in_one(call: OperationCall, given: schema.Find, budget: Budget) -> OperationReply:
    find = await _matcher(call, regex.literal, given.pattern, budget)
    name = names.canonical(given.file_path)
    [content] = await call.shelf.read_many([name])
    if content is None:
        raise call.shelf.missing(name, given.file_path)
    steps = _in_files([(given.file_path, content)], find, _most(given.limit))
    matches = await sliced(call.services.threads, call.tenant.namespace, steps, budget)
    return await call.read(_shown_of_one, given, matches)


async def _matcher(call: OperationCall, matcher: Callable[[str, Budget], Find], pattern: str, budget: Budget) -> Find:
    return await call.services.threads.run(call.tenant.namespace, lambda: _compiled(matcher, pattern, budget))


async def searched(
    shelf: Texts,
    files: Sequence[File],
    find: Find,
    limit: int | None,
    run: Callable[[Steps], Awaitable[list[LineMatch]]],
) -> list[LineMatch]:
    """Return the matches in these files, in order: more than `limit` if there are more. Raises StoreFault and TooSlow.

    `run` searches a batch in the threads that all searches share.
    """
    matches: list[LineMatch] = []
    most, characters = _most(limit), 0
    for batch in _batches(files):
        wanted = [file.name for file in batch]
        contents = await shelf.read_many(wanted)
        # A file's retention may have ended since it was listed.
        there = [(name, content) for name, content in zip(wanted, contents, strict=True) if content is not None]
        part = await run(_in_files(there, find, most))
        matches += part
        characters += sum(len(match.text) for match in part)
        if len(matches) > most or characters > CHARACTERS:
            break
    return matches


def _in_files(files: Sequence[tuple[str, bytes]], find: Find, most: int) -> Steps:
    """Return matches: up to `most` plus one, and slightly more than `CHARACTERS`, to show that there are more."""
    matches: list[LineMatch] = []
    characters = 0
    for name, content in files:
        for match in _in_file(name, content, find):
            yield
            if match is None:
                continue
            matches.append(match)
            characters += len(match.text)
            if len(matches) > most or characters > CHARACTERS:
                return matches
        yield
    return matches


def _in_file(name: str, content: bytes, find: Find) -> Iterator[LineMatch | None]:
    """Do the same as `in_data`, but validate only files with a match, because most files have none."""
    start = 0
    while (found := find(content, start)) < -1:
        yield None
        start = ~found
    if found >= 0:
        yield from search.in_data(name, _valid(content), find)


def _valid(content: bytes) -> bytes:
    """Return the content as valid UTF-8, with U+FFFD for the lone surrogates that files keep."""
    if content.isascii():
        return content
    return content.decode("utf-8", "replace").encode()


def bounded(matches: Sequence[LineMatch], most: int) -> Found:
    """Return as many matches as one answer has."""
    kept: list[LineMatch] = []
    characters = 0
    for match in matches[:most]:
        characters += len(match.text)
        if characters > CHARACTERS:
            break
        kept.append(match)
    return Found(kept, len(kept) < len(matches))


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


def _most(limit: int | None) -> int:
    return MATCHES if limit is None else min(limit, MATCHES)


def _compiled(matcher: Callable[[str, Budget], Find], pattern: str, budget: Budget) -> Find:
    try:
        return matcher(pattern, budget)
    except ValueError as error:
        raise _unusable(error) from error


def _unusable(error: ValueError) -> ClientFault:
    return ClientFault(f"`$.pattern` cannot be used: {error}")


def _fitting(glob: str, files: Sequence[File], directory: str) -> list[File]:
    fitting = set(search.fitting(glob, [file.name for file in files], directory))
    return [file for file in files if file.name in fitting]


def _shown_below(
    given: schema.Search, directory: str, matches: Sequence[LineMatch], damaged: Sequence[str]
) -> OperationReply:
    """Show a block for each file, between lines of dashes, and below them what was not searched."""
    found = bounded(matches, _most(given.limit))
    path = given.path or "."
    about = f'pattern "{given.pattern}" in path "{path}"' + (f' (filter: "{given.glob}")' if given.glob else "")
    lines = [f"Found {len(found.matches)} matches for {about}:"]
    paths: list[str] = []
    for name, group in groupby(found.matches, key=lambda match: match.path):
        relative = search.relative(name, directory)
        shown = [f"L{match.line}: {match.text}" for match in group]
        lines += ["---", f"File: {relative}", *shown]
        paths += [names.joined(path, relative)] * len(shown)
    answer = "\n".join([*lines, "---"]) if paths else f"No matches found for {about}"
    metadata = _metadata(found, paths)
    if damaged:
        more = f" and {len(damaged) - NAMED} more" if len(damaged) > NAMED else ""
        answer += f"\nNot searched, because damaged in the store: {', '.join(damaged[:NAMED])}{more}"
        metadata["damaged"] = [names.joined(path, name) for name in damaged]
    return OperationReply(answer, metadata=metadata)


def _shown_of_one(given: schema.Find, matches: Sequence[LineMatch]) -> OperationReply:
    """Show a line for each match."""
    path, found = given.file_path, bounded(matches, _most(given.limit))
    lines = [f"{path}:{match.line}:{match.text}" for match in found.matches]
    answer = "\n".join(lines) or f'No matches for "{given.pattern}" in "{path}"'
    return OperationReply(answer, metadata=_metadata(found, [path] * len(lines)))


def _metadata(found: Found, paths: Sequence[str]) -> dict[str, Any]:
    """Return the metadata: `column` counts characters from 0; `truncated` means that there are more matches.

    A search that met damaged files adds their paths as `damaged`.
    """
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
