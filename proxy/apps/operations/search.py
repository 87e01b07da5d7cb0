"""Finds and shows lines of a caller's texts, in threads, a few files at a time.

`/grep` searches the caller's files, or what its conversations moved, which `/recall_sessions`
lists. `/read_file` opens both. All of these are records of the caller's own key.
`proxy.requests.archive` says what is listed.
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
from proxy.apps.operations.call import File, Looking, canonical, envelope, joined
from proxy.apps.operations.schema import Find, ReadFile, RecallSessions, Search
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
"""Seconds of processor time that one search may take; enough for 10 GB at a pattern's usual
speed."""

BATCH_BYTES = 4 << 20
BATCH_FILES = 200
"""The most bytes and files that are read and searched at a time; a larger file is a batch by
itself."""

MATCHES = 100_000
CHARACTERS = 16 << 20
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


async def grep(call: Looking, given: Find | Search) -> bytes:
    """Return the matching lines of one file, of all files below a path, or of moved texts. Raises
    ProxyError."""
    if isinstance(given, Find):
        return await _in_file(call, given)
    if given.archive or given.session:
        return await _in_archive(call, given)
    return await _below(call, given)


async def _in_file(call: Looking, given: Find) -> bytes:
    find = await _compiled(call, regex.literal, given.pattern)
    path, content = await _settled(call, lambda: _named(call, given.file_path))
    found = Found(min(given.limit or MATCHES, MATCHES))
    await _search(call, {path: content}, find, found)
    lines = [f"{path}:{match.line}:{match.text}" for match in found.matches]
    answer = "\n".join(lines) or f'No matches for "{given.pattern}" in "{path}"'
    return await call.read(envelope, answer, (), _metadata(found, lambda name: name))


async def _below(call: Looking, given: Search) -> bytes:
    path = given.path or "."
    directory = canonical(path)
    find = await _compiled(call, regex.compile, given.pattern)
    files = await call.shelf.below(directory)
    if not files and directory:
        raise NotThere(f"There is nothing in {given.path!r} among your files")
    if given.glob:
        wanted = set(await call.read(fitting, given.glob, [file.name for file in files], directory))
        files = [file for file in files if file.name in wanted]
    found = await searched(call, call.shelf.read_many, files, find, given.limit)
    damaged = [relative(name, directory) for name in call.shelf.damaged]

    def shown() -> bytes:
        about = f'pattern "{given.pattern}" in path "{path}"' + (
            f' (filter: "{given.glob}")' if given.glob else ""
        )
        answer = _blocks(found, about, lambda name: relative(name, directory))
        metadata = _metadata(found, lambda name: joined(path, relative(name, directory)))
        if damaged:
            more = f" and {len(damaged) - NAMED} more" if len(damaged) > NAMED else ""
            answer += (
                f"\nNot searched, because damaged in the store: {', '.join(damaged[:NAMED])}{more}"
            )
            metadata["damaged"] = [joined(path, name) for name in damaged]
        return envelope(answer, metadata=metadata)

    return await call.read(shown)


async def _in_archive(call: Looking, given: Search) -> bytes:
    archive = _archive(call)
    if canonical(given.path or ".") not in ("", canonical(_store_dir(call))):
        raise NotThere(
            f"What your conversations moved is in {_store_dir(call)!r}, and nothing of it in {given.path!r}"
        )
    find = await _compiled(call, regex.compile, given.pattern)
    sessions, more = await archive.sessions(SESSIONS, given.session or "")
    texts, left_out = newest(sessions, SEARCHED_BYTES)
    if given.glob:
        wanted = set(await call.read(fitting, given.glob, [text.name for _, text in texts], ""))
        texts = [(session, text) for session, text in texts if text.name in wanted]
    found = await searched(
        call,
        archive.read_many,
        [File(text.name, text.bytes) for _, text in texts],
        find,
        given.limit,
    )
    of = {text.name: (session, text) for session, text in texts}
    older = more or left_out

    def title(name: str) -> str:
        session, text = of[name]
        return f"{name} ({text.about}; session {session.session}, {_date(session.last)})"

    def shown() -> bytes:
        where = f"{len(of)} texts of your sessions" + ", older ones left out" * older
        answer = _blocks(found, f'pattern "{given.pattern}" in {where}', title)
        if found.more:
            larger = "send a larger limit or " if found.most < MATCHES else ""
            answer += f"\n[there are more; {larger}narrow the pattern]"
        metadata = _metadata(found, lambda name: f"{_store_dir(call)}/{name}")
        for listed, match in zip(metadata["matches"], found.matches, strict=True):
            listed["session"] = of[match.path][0].session
        return envelope(answer, metadata=metadata | {"older": older})

    return await call.read(shown)


def _blocks(found: Found, about: str, title: Callable[[str], str]) -> str:
    """Return a block of lines for each file, under its title, between lines of dashes."""
    if not found.matches:
        return f"No matches found for {about}"
    lines = [f"Found {len(found.matches)} matches for {about}:"]
    for name, group in groupby(found.matches, key=lambda match: match.path):
        lines += [
            "---",
            f"File: {title(name)}",
            *(f"L{match.line}: {match.text}" for match in group),
        ]
    return "\n".join([*lines, "---"])


def _metadata(found: Found, path: Callable[[str], str]) -> dict[str, Any]:
    """Return the metadata: `column` counts characters from 0; `truncated` means that there are more
    matches."""
    matches = [
        {"path": path(match.path), "line": match.line, "column": match.column, "text": match.text}
        for match in found.matches
    ]
    return {"matches": matches, "truncated": found.more}


# -- a search --


async def _compiled(
    call: Looking, matcher: Callable[[str, Budget], search.Find], pattern: str
) -> search.Find:
    """Raises ClientFault."""
    try:
        return await call.read(matcher, pattern, Budget(SECONDS))
    except ValueError as error:
        raise ClientFault(f"`$.pattern` cannot be used: {error}") from error


async def searched(
    call: Looking, read: ReadMany, files: Sequence[File], find: search.Find, limit: int | None
) -> Found:
    """Return the matches in these files, in order. Raises StoreFault and ClientFault."""
    found = Found(min(limit or MATCHES, MATCHES))
    start = 0
    while start < len(files) and not found.more:
        stop = start + 1
        size = files[start].size
        while (
            stop < min(len(files), start + BATCH_FILES) and size + files[stop].size <= BATCH_BYTES
        ):
            size += files[stop].size
            stop += 1
        names = [file.name for file in files[start:stop]]
        contents = await read(names)
        # A file's retention may have ended since it was listed.
        there = {
            name: content
            for name, content in zip(names, contents, strict=True)
            if content is not None
        }
        await _search(call, there, find, found)
        start = stop
    return found


async def _search(
    call: Looking, files: Mapping[str, bytes], find: search.Find, found: Found
) -> None:
    def work() -> None:
        for name, content in files.items():
            for match in search.matches(
                {name: content.decode("utf-8", "surrogatepass")}, [name], find
            ):
                found.characters += len(match.text)
                if len(found.matches) == found.most or found.characters > CHARACTERS:
                    found.more = True
                    return
                found.matches.append(match)

    try:
        await call.search(work)
    except TooSlow as error:
        raise ClientFault(f"`$.pattern` cannot be used: {error}") from error


# -- read_file --


async def read_file(call: Looking, given: ReadFile) -> bytes:
    """Return the lines that the call asks for, none past the end of the file, or as much of them as
    fits. Raises ProxyError."""
    path, content = await _settled(call, lambda: _named(call, given.file))

    def shown() -> bytes:
        text = content.decode("utf-8", "surrogatepass")
        limit = sys.maxsize if given.limit is None else given.limit
        span = pages.span(text, given.offset or 0, limit, given.column)
        answer = text[span.start : span.stop] if span else ""
        if span and given.characters is not None:
            page = pages.page(
                text, span, f'read_file(absolute_path="{path}"', given.characters, len
            )
            answer = rawjson.encodable(page or "")
        metadata = {
            "path": path,
            "size_bytes": len(content),
            "lines": span.lines if span else line_count(text),
        }
        return envelope(answer, metadata=metadata)

    return await call.read(shown)


async def _settled(call: Looking, look: Callable[[], Awaitable[T]]) -> T:
    """Return what `look` finds, if need be once the caller's texts are written: the reply that
    moved one may have ended before. Raises NotThere."""
    try:
        return await look()
    except NotThere:
        if not await call.written():
            raise
        return await look()


async def _named(call: Looking, path: str) -> tuple[str, bytes]:
    """Return the path and content of the file with this path, of the only file whose path ends with
    it, or of the moved text with this name.

    Such relative paths come from the `File:` lines of `/grep`. A path may be as Markdown escapes
    it. Raises NotThere.
    """
    shelf = call.shelf
    name = canonical(path)
    content = await shelf.read(name) if name else None
    if content is not None:
        return path, content
    plain = unescaped(path)
    if plain != path:
        return await _named(call, plain)
    if name and name not in shelf.damaged:
        ending = [file.name for file in await shelf.below("") if file.name.endswith(f"/{name}")]
        if len(ending) > 1:
            several = ", ".join(ending[:5])
            raise NotThere(
                f"There is no file {path!r} among your files; there are several that end so: {several}"
            )
        if ending:
            [name] = ending
            path = name
            content = await shelf.read(name)
        elif (
            (text := name.rpartition("/")[2].removesuffix(".txt") + ".txt")
            and is_part(text)
            and _recalls(call)
        ):
            [content] = await shelf.archive.read_many([text])
            path = f"{_store_dir(call)}/{text}" if content is not None else path
    if content is None:
        raise shelf.missing(name, path)
    return path, content


# -- recall --


async def recall_sessions(call: Looking, given: RecallSessions) -> bytes:
    """Return the caller's newest sessions, or what one of them moved. Raises ProxyError."""
    found, more = await _archive(call).sessions(given.limit, given.session or "")
    metadata: dict[str, Any]
    if given.session:
        if not found:
            raise NotThere(f"no session begins with {given.session}")
        if len(found) > 1:
            raise NotThere(
                f"{len(found)} of your sessions begin with {given.session!r}; send more of the id"
            )
        texts = [
            asdict(text) | {"path": f"{_store_dir(call)}/{text.name}"} for text in found[0].texts
        ]
        metadata = {"session": found[0].session, "texts": texts}
        lines = [_line(found[0])]
        for text in texts:
            tokens = f", {text['tokens']:,} tokens" if text["tokens"] else ""
            lines.append(f"{text['path']}: {text['about']}{tokens}")
    else:
        listed = [asdict(session) | {"texts": len(session.texts)} for session in found]
        metadata = {"sessions": listed, "truncated": more}
        lines = [*map(_line, found)] or [
            "Nothing that was moved out of your conversations is kept."
        ]
        larger = "; for more send a larger limit" if given.limit < SESSIONS else ""
        lines += [f"[the newest {len(found)}{larger}]"] if more else []
    return await call.read(envelope, "\n".join(lines), (), metadata)


def _archive(call: Looking) -> Archive:
    """Raises Unauthorized for strangers who share a namespace, as they would read each other's
    conversations."""
    if not _recalls(call):
        raise Unauthorized(
            "This key is not listed in a policy, and its tenant's callers share one namespace"
        )
    return call.shelf.archive


def _recalls(call: Looking) -> bool:
    return call.tenant.listed or not call.tenant.policy.share_namespace


def _store_dir(call: Looking) -> str:
    return call.tenant.policy.offload.store_dir


def _line(session: Session) -> str:
    texts = f"{len(session.texts)} text{'s' * (len(session.texts) != 1)}"
    return f"{session.session}  {_date(session.last)}  {session.model}, {texts}: {session.title}"


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))
