"""Reads recorded requests, one at a time, from files of any size: JSONL, also gzipped, and HAR.

A line of JSONL is a request's body, or an object with `url` and `body`, as in the proxy's own captures and in the input
of OpenAI's batches. No header is read, so no credential either.
"""

from __future__ import annotations

import gzip
import io
import mmap
import os
import re
import stat
import sys
import zlib
from base64 import b64decode
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
from msgspec import Raw

from proxy import rawjson
from proxy.dialects import DIALECTS, Dialect, for_body, for_request
from proxy.dialects.usage import Reported
from proxy.dialects.values import object_of, text_of
from proxy.errors import UserMistake
from proxy.plan.history import Unplannable
from proxy.plan.reasons import Reason
from proxy.plan.request import Request
from proxy.rawjson import NotJson
from proxy.requests.passthrough import ReplyEnds

STDIN = Path("-")
"""Stands for standard input."""
SUFFIXES = (".jsonl", ".jsonl.gz", ".har")
"""How the names of the files end that are read of a directory."""
LONGEST = (64 << 20) + (64 << 10)
"""Most bytes of a line or of a text in a HAR: as many as the proxy accepts as a request by default, and what a capture
has beside it."""
HEAD = 4 << 10
"""Bytes at the beginning of a file that show whether it is HAR."""

_STRING = rb'"(?:[^"\\]|\\.)*"'
_HAR = re.compile(rb'(?:\xef\xbb\xbf)?\s*\{\s*(?:%b\s*:\s*(?:%b|[\w.+-]+)\s*,\s*)*"log"\s*:\s*\{' % (_STRING, _STRING))
"""Some programs write a version or a comment before the log."""
_GZIP = b"\x1f\x8b"
_STEP = 1 << 20
_ENVELOPE = frozenset(("url", "body"))


class RecordedRequest(msgspec.Struct, frozen=True):
    """One request. `chat` is None if the proxy would not plan it, for this `reason`."""

    position: float | None
    """The part of the file that has been read, from 0 to 1; None if its size is not known."""
    dialect: Dialect | None
    """None: it asks no model that the proxy knows, and would be relayed."""
    chat: Request | None = None
    reason: Reason = Reason.NONE
    said: Reported | None = None
    """What upstream said about the cost."""
    caller: str = ""
    """Who asked: in a capture, the namespace."""


def named(paths: Sequence[str]) -> list[Path]:
    """Return the files to read: those that are given, and in their order those below given directories.

    Raises UserMistake for a directory without any.
    """
    files: list[Path] = []
    for path in map(Path, paths):
        if path == STDIN or not path.is_dir():
            files.append(path)
            continue
        found = [Path(folder, name) for folder, _, names in os.walk(path) for name in names if name.endswith(SUFFIXES)]
        below = [file for file in found if file.is_file() or not file.exists()]  # a pipe would be waited for
        if not below:
            raise UserMistake(f"{path}: has no files named {', '.join(f'*{suffix}' for suffix in SUFFIXES)}")
        files += sorted(below, key=lambda file: (file.name, file))  # captures are named after their time
    return files


def requests(path: Path, api: str | None = None) -> Iterator[RecordedRequest]:
    """Yield the requests of a file. `api` names the dialect of JSONL, which is guessed otherwise.

    Raises UserMistake, which names the line or the entry.
    """
    dialect = _dialect(api)
    try:
        with _opened(path) as file:
            packed = file.peek(HEAD).startswith(_GZIP)
            unpacked = gzip.GzipFile(fileobj=file) if packed else file
            head = unpacked.peek(HEAD)
            if head.startswith((BOM_UTF16_LE, BOM_UTF16_BE)):
                cure = "PowerShell's > writes it; save it with | Out-File -Encoding utf8"
                raise UserMistake(f"{path}: expected UTF-8, and this is UTF-16: {cure}")
            if not _HAR.match(head):
                yield from _lines(str(path), file, unpacked, dialect)
            elif packed or _size(file) is None:
                raise UserMistake(f"{path}: a HAR is not read compressed or from a pipe; save it to a file first")
            else:
                yield from _har(str(path), file)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserMistake(f"{path}: is not whole, or no gzip; give what can be unpacked of it: {error}") from error
    except OSError as error:
        raise UserMistake(f"{path}: cannot be read: {error.strerror}") from error


@contextmanager
def _opened(path: Path) -> Iterator[io.BufferedReader]:
    with open(sys.stdin.fileno() if path == STDIN else path, "rb", closefd=path != STDIN) as file:
        yield file


def _size(file: io.BufferedReader) -> int | None:
    """Return the size of a regular file, and None for anything else."""
    status = os.fstat(file.fileno())
    return status.st_size if stat.S_ISREG(status.st_mode) else None


# -- JSONL -------------------------------------------------------------------------------------------------------------


def _dialect(api: str | None) -> Dialect | None:
    """Return the dialect of this name. Raises UserMistake."""
    known = {one.name: one for one in DIALECTS if not one.counts}
    if api is not None and api not in known:
        raise UserMistake(f"--dialect {api}: expected one of {', '.join(sorted(known))}")
    return known[api] if api else None


def _lines(
    name: str, file: io.BufferedReader, unpacked: io.BufferedReader | gzip.GzipFile, dialect: Dialect | None
) -> Iterator[RecordedRequest]:
    """Yield the requests of the lines of `unpacked`, which is made of `file`."""
    size = _size(file)
    for number in count(1):
        line = unpacked.readline(LONGEST + 1)
        if not line:
            return
        if len(line) > LONGEST:
            raise UserMistake(f"{name}:{number}: longer than {LONGEST:,} bytes")
        body = line.removeprefix(BOM_UTF8).strip() if number == 1 else line.strip()
        position = file.tell() / size if size else None
        if number > 1 and not line.endswith(b"\n") and _is_cut(body):
            yield RecordedRequest(position, None, reason=Reason.INVALID)
        elif body:
            yield _from_line(f"{name}:{number}", body, position, dialect)


def _is_cut(body: bytes) -> bool:
    """Whether a last line is not whole, as in a file that is still being written."""
    try:
        rawjson.members(body)
    except NotJson:
        return True
    return False


def _from_line(place: str, body: bytes, position: float | None, dialect: Dialect | None) -> RecordedRequest:
    """Return the request of one line: by its address, or in the first dialect in which it has a history."""
    try:
        members = rawjson.members(body)
    except NotJson as error:
        raise UserMistake(f"{place}: expected a request body, a JSON object on one line: {error}") from error
    if members.keys() >= _ENVELOPE:
        asked = text_of(members.get("method")) or "POST"
        found = _from_envelope(asked, text_of(members["url"]), bytes(members["body"]), position, _said(members))
        return msgspec.structs.replace(found, caller=text_of(members.get("namespace")))
    candidates = [dialect] if dialect else for_body(body)
    for candidate in candidates:
        found = _parsed(candidate, body, position)
        if found.reason is not Reason.INVALID and (found.chat is None or found.chat.entries):
            return found
    raise UserMistake(
        f"{place}: expected a request body of {' or '.join(dict.fromkeys(one.name for one in candidates))}"
    )


def _from_envelope(
    method: str, url: str, body: bytes | None, position: float | None, said: Reported | None
) -> RecordedRequest:
    """Return the request with this address. `body` is None if it is too large."""
    dialect = _serving(method, url)
    if dialect is None:
        return RecordedRequest(position, None)
    if body is None:
        return RecordedRequest(position, dialect, reason=Reason.ENCODING)
    return _parsed(dialect, body, position, said)


def _serving(method: str, url: str) -> Dialect | None:
    """Return the dialect of this address, or None if no model is asked for a reply there."""
    try:
        path = urlsplit(url).path.encode("utf-8", "surrogatepass")
    except ValueError:
        return None
    dialect = for_request(method, path)
    return None if dialect is None or dialect.counts else dialect


def _said(members: dict[str, Raw]) -> Reported | None:
    """Return what a capture says about the cost."""
    try:
        return msgspec.json.decode(members.get("usage", rawjson.NULL), type=Reported | None)
    except msgspec.MsgspecError:
        return None


def _parsed(dialect: Dialect, body: bytes, position: float | None, said: Reported | None = None) -> RecordedRequest:
    try:
        return RecordedRequest(position, dialect, dialect.parse(body), said=said)
    except Unplannable as error:
        return RecordedRequest(position, dialect, reason=error.reason)


# -- HAR ---------------------------------------------------------------------------------------------------------------


class _HarRequest(msgspec.Struct, frozen=True):
    method: str
    url: str
    postData: Raw = rawjson.NULL


class _Entry(msgspec.Struct, frozen=True):
    request: _HarRequest
    response: Raw = rawjson.NULL


class _Log(msgspec.Struct, frozen=True):
    entries: list[Raw]


class _Har(msgspec.Struct, frozen=True):
    log: _Log


_entry = msgspec.json.Decoder(_Entry)


def _har(name: str, file: io.BufferedReader) -> Iterator[RecordedRequest]:
    """Yield the requests of a HAR. The file is mapped into memory, and one entry at a time is decoded."""
    mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    start = len(BOM_UTF8) if bytes(mapped[: len(BOM_UTF8)]) == BOM_UTF8 else 0
    try:
        entries = msgspec.json.decode(mapped[start:], type=_Har).log.entries
    except (ValueError, RecursionError) as error:
        raise UserMistake(f"{name}{_line_of(error, mapped[start:])}: not a HAR: {error}") from error
    for number, raw in enumerate(entries, 1):
        try:
            entry = _entry.decode(raw)
        except (ValueError, RecursionError) as error:
            raise UserMistake(f"{name}: entry {number} is not a HAR's: {error}") from error
        yield _from_entry(entry, number / len(entries))


def _from_entry(entry: _Entry, position: float) -> RecordedRequest:
    """Return the request of an entry. What it brings is decoded only if a model was asked."""
    asked = entry.request
    dialect = _serving(asked.method, asked.url)
    if dialect is None:
        return RecordedRequest(position, None)
    reply, said = object_of(entry.response), None
    if bytes(reply.get("status", rawjson.NULL)) == b"200" and (content := _content(reply.get("content"))):
        ends = ReplyEnds()
        ends.take(content)
        said = dialect.reported(ends.both)
    return _from_envelope(asked.method, asked.url, _content(asked.postData), position, said)


def _content(raw: Raw | None) -> bytes | None:
    """Return the bytes of a request or a reply; empty if there are none, and None if there are too many."""
    content = object_of(raw)
    text = content.get("text", rawjson.NULL)
    if len(memoryview(text)) > LONGEST:
        return None
    written = text_of(text)
    if text_of(content.get("encoding")).lower() != "base64":
        return written.encode("utf-8", "surrogatepass")
    try:
        return b64decode(written)
    except ValueError:
        return b""


def _line_of(error: Exception, text: memoryview) -> str:
    """Return the line at which JSON is malformed, as `:LINE`, or nothing if the error names no place."""
    at = re.search(r"\(byte (\d+)\)", str(error))
    if at is None:
        return ""
    before = text[: int(at[1])]
    return f":{1 + sum(bytes(before[start : start + _STEP]).count(10) for start in range(0, len(before), _STEP))}"
