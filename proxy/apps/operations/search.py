"""Finds and shows lines of a caller's texts, in threads, a few files at a time.

`/grep` and `/read_file` look into the caller's own files. `/recall_sessions`, `/recall_search` and `/recall_read` look
into what its conversations moved: they open what `/read_file` opens, the records of the caller's own key, and nothing
else. `archive` says what is listed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import groupby
from typing import Any, TypeVar

import msgspec
from msgspec.structs import asdict

from proxy import rawjson, regex
from proxy.apps.operations.call import CallerFiles, File, OperationCall, canonical, envelope, joined
from proxy.apps.operations.schema import Find, ReadFile, RecallRead, RecallSearch, RecallSessions, Search
from proxy.errors import ClientFault, NotThere, Unauthorized
from proxy.plan.preview import line_count, unescaped
from proxy.regex import Budget
from proxy.requests.archive import Archive, Session, newest
from proxy.stores import is_part
from proxy.tools import pages, search
from proxy.tools.find import fitting, relative
from proxy.tools.search import LineMatch, TooSlow

T = TypeVar("T")

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

SESSIONS = 200
"""The most sessions, the newest, that one search looks through."""

SEARCHED_BYTES = 64 << 20
"""About how many bytes of texts one search reads, those of the newest sessions first."""


ReadMany = Callable[[Sequence[str]], Awaitable[Sequence[bytes | None]]]
"""Returns the contents in the order of the names, with None for each that is missing."""


class Found(msgspec.Struct):
    """The matches to show, `most` at most, and whether there are more."""

    most: int
    matches: list[LineMatch] = []
    characters: int = 0
    more: bool = False


# -- grep --


async def grep(call: OperationCall, given: Find | Search) -> bytes:
    """Return the matching lines of one file or of all files below a path. Raises ProxyError."""
    if isinstance(given, Search):
        return await _below(call, given)
    find = await _compiled(call, regex.literal, given.pattern)
    name = canonical(given.file_path)
    [content] = await call.shelf.read_many([name])
    if content is None:
        raise call.shelf.missing(name, given.file_path)
    found = Found(min(given.limit or MATCHES, MATCHES))
    await _search(call, {name: content}, find, found)
    lines = [f"{given.file_path}:{match.line}:{match.text}" for match in found.matches]
    answer = "\n".join(lines) or f'No matches for "{given.pattern}" in "{given.file_path}"'
    return await call.read(envelope, answer, (), _metadata(found, [given.file_path] * len(lines)))


async def _below(call: OperationCall, given: Search) -> bytes:
    directory = canonical(given.path or ".")
    find = await _compiled(call, regex.compile, given.pattern)
    files = await call.shelf.below(directory)
    if not files and directory:
        raise NotThere(f"There is nothing in {given.path!r} among your files")
    if given.glob:
        wanted = set(await call.read(fitting, given.glob, [file.name for file in files], directory))
        files = [file for file in files if file.name in wanted]
    found = await searched(call, call.shelf.read_many, files, find, given.limit)
    return await call.read(_shown_below, given, directory, found, [*call.shelf.damaged])


def _shown_below(given: Search, directory: str, found: Found, damaged: Sequence[str]) -> bytes:
    """Show a block for each file, between lines of dashes, and below them what was not searched."""
    path = given.path or "."
    about = f'pattern "{given.pattern}" in path "{path}"' + (f' (filter: "{given.glob}")' if given.glob else "")
    lines, paths = [f"Found {len(found.matches)} matches for {about}:"], list[str]()
    for name, group in groupby(found.matches, key=lambda match: match.path):
        below = relative(name, directory)
        shown = [f"L{match.line}: {match.text}" for match in group]
        lines += ["---", f"File: {below}", *shown]
        paths += [joined(path, below)] * len(shown)
    answer = "\n".join([*lines, "---"]) if paths else f"No matches found for {about}"
    metadata = _metadata(found, paths)
    if damaged:
        names = [relative(name, directory) for name in damaged]
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        answer += f"\nNot searched, because damaged in the store: {', '.join(names[:NAMED])}{more}"
        metadata["damaged"] = [joined(path, name) for name in names]
    return envelope(answer, metadata=metadata)


def _metadata(found: Found, paths: Sequence[str]) -> dict[str, Any]:
    """Return the metadata: `column` counts characters from 0; `truncated` means that there are more matches."""
    matches = [
        {"path": path, "line": match.line, "column": match.column, "text": match.text}
        for path, match in zip(paths, found.matches, strict=True)
    ]
    return {"matches": matches, "truncated": found.more}


# -- a search --


async def _compiled(call: OperationCall, matcher: Callable[[str, Budget], search.Find], pattern: str) -> search.Find:
    """Raises ClientFault."""
    try:
        return await call.read(matcher, pattern, Budget(SECONDS))
    except ValueError as error:
        raise ClientFault(f"`$.pattern` cannot be used: {error}") from error


async def searched(
    call: OperationCall, read: ReadMany, files: Sequence[File], find: search.Find, limit: int | None
) -> Found:
    """Return the matches in these files, in order. Raises StoreFault and ClientFault."""
    found, start = Found(min(limit or MATCHES, MATCHES)), 0
    while start < len(files) and not found.more:
        stop, size = start + 1, files[start].size
        while stop < min(len(files), start + BATCH_FILES) and size + files[stop].size <= BATCH_BYTES:
            size += files[stop].size
            stop += 1
        names = [file.name for file in files[start:stop]]
        contents = await read(names)
        # A file's retention may have ended since it was listed.
        there = {name: content for name, content in zip(names, contents, strict=True) if content is not None}
        await _search(call, there, find, found)
        start = stop
    return found


async def _search(call: OperationCall, files: Mapping[str, bytes], find: search.Find, found: Found) -> None:
    def work() -> None:
        for name, content in files.items():
            for match in search.matches({name: content.decode("utf-8", "surrogatepass")}, [name], find):
                found.characters += len(match.text)
                if len(found.matches) == found.most or found.characters > CHARACTERS:
                    found.more = True
                    return
                found.matches.append(match)

    try:
        await call.services.threads.run(call.tenant.namespace, work, begun=True)
    except TooSlow as error:
        raise ClientFault(f"`$.pattern` cannot be used: {error}") from error


# -- read_file --


async def read_file(call: OperationCall, given: ReadFile) -> bytes:
    """Return the lines that the call asks for, none past the end of the file. Raises ProxyError."""
    path, content = await _settled(call, lambda: _named(call.shelf, given.file))

    def shown() -> bytes:
        text = content.decode("utf-8", "surrogatepass")
        span = pages.span(text, given.offset or 0, sys.maxsize if given.limit is None else given.limit)
        metadata = {"path": path, "size_bytes": len(content), "lines": span.lines if span else line_count(text)}
        return envelope(text[span.start : span.stop] if span else "", metadata=metadata)

    return await call.read(shown)


async def _settled(call: OperationCall, look: Callable[[], Awaitable[T]]) -> T:
    """Return what `look` finds, if need be once the caller's texts are written: the reply that moved one may have ended
    before. Raises NotThere."""
    try:
        return await look()
    except NotThere:
        if not await call.services.background.ended(f"{call.tenant.namespace}/", WRITING):
            raise
        return await look()


async def _named(shelf: CallerFiles, path: str) -> tuple[str, bytes]:
    """Return the path and content of the file with this path, or of the only file whose path ends with it.

    Such relative paths come from the `File:` lines of `/grep`. A path may be as Markdown escapes it. Raises NotThere.
    """
    name = canonical(path)
    content = await shelf.read(name) if name else None
    if content is None and (plain := unescaped(path)) != path:
        return await _named(shelf, plain)
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


# -- recall --


async def recall_sessions(call: OperationCall, given: RecallSessions) -> bytes:
    """Return the caller's newest sessions, or what one of them moved. Raises ProxyError."""
    found, more = await _archive(call).sessions(given.limit, given.session or "")
    metadata: dict[str, Any]
    if given.session:
        if not found:
            raise NotThere(f"There is no session {given.session!r} among yours")
        if len(found) > 1:
            raise NotThere(f"{len(found)} of your sessions begin with {given.session!r}; send more of the id")
        texts = [asdict(text) | {"path": _path(call, text.name)} for text in found[0].texts]
        metadata = {"session": found[0].session, "texts": texts}
        lines = [_line(found[0])]
        for text in texts:
            tokens = f", {text['tokens']:,} tokens" if text["tokens"] else ""
            lines.append(f"{text['path']}: {text['about']}{tokens}")
    else:
        listed = [asdict(session) | {"texts": len(session.texts)} for session in found]
        metadata = {"sessions": listed, "truncated": more}
        lines = [*map(_line, found)] or ["Nothing that was moved out of your conversations is kept."]
        lines += [f"[the newest {len(found)}; for more send a larger limit]"] if more else []
    return await call.read(envelope, "\n".join(lines), (), metadata)


async def recall_search(call: OperationCall, given: RecallSearch) -> bytes:
    """Return the lines of moved texts that match a pattern, the newest session's first. Raises ProxyError."""
    archive = _archive(call)
    sessions, more = await archive.sessions(SESSIONS, given.session or "")
    wanted, left_out = newest(sessions, SEARCHED_BYTES)
    files = [File(text.name, text.bytes) for _, text in wanted]
    of = {text.name: (session, text) for session, text in wanted}
    find = await _compiled(call, regex.compile, given.pattern)
    found = await searched(call, archive.read_many, files, find, given.limit)
    older = more or left_out

    def shown() -> bytes:
        where = f"{len(of)} texts of your sessions" + ", older ones left out" * older
        count = "1 match" if len(found.matches) == 1 else f"{len(found.matches)} matches"
        head = f'{count} for "{given.pattern}" in {where} (lines are counted from 0)'
        lines, listed = [head + (":" if found.matches else ".")], []
        for name, group in groupby(found.matches, key=lambda match: match.path):
            (session, text), path = of[name], _path(call, name)
            lines += ["---", f"{path} ({text.about}; session {session.session}, {_date(session.last)})"]
            for match in group:
                lines.append(f"{match.line - 1}: {match.text}")
                listed.append({"path": path, "session": session.session, "line": match.line - 1, "text": match.text})
        if found.more:
            lines.append("[there are more; send a larger limit or narrow the pattern]")
        return envelope("\n".join(lines), metadata={"matches": listed, "truncated": found.more, "older": older})

    return await call.read(shown)


async def recall_read(call: OperationCall, given: RecallRead) -> bytes:
    """Return a moved text, or as much of it as was asked for. Raises ProxyError."""
    archive, name = _archive(call), canonical(unescaped(given.path)).rpartition("/")[2]
    name = name if name.endswith(".txt") else f"{name}.txt"

    async def kept() -> bytes:
        [value] = await archive.read_many([name]) if is_part(name) else [None]
        if value is None:
            raise NotThere(f"There is no text {given.path!r} among those that are kept of your conversations")
        return value

    value = await _settled(call, kept)

    def shown() -> bytes:
        text = value.decode("utf-8", "surrogatepass")
        span = pages.span(text, given.offset, given.limit or max(len(text), 1), given.column)
        page = pages.page(text, span, f'recall_read(path="{name}"', given.characters, len) if span else None
        metadata = {"path": given.path, "size_bytes": len(value), "lines": line_count(text)}
        return envelope(rawjson.encodable(page or ""), metadata=metadata)

    return await call.read(shown)


def _archive(call: OperationCall) -> Archive:
    """Raises Unauthorized for strangers who share a namespace, as they would read each other's conversations."""
    if call.tenant.policy.share_namespace and not call.tenant.listed:
        raise Unauthorized("This key is not listed in a policy, and its tenant's callers share one namespace")
    return call.shelf.archive


def _path(call: OperationCall, name: str) -> str:
    return f"{call.tenant.policy.offload.store_dir}/{name}"


def _line(session: Session) -> str:
    texts = f"{len(session.texts)} text{'s' * (len(session.texts) != 1)}"
    return f"{session.session}  {_date(session.last)}  {session.model}, {texts}: {session.title}"


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))
