"""Reads recorded requests, one at a time, from files of any size: JSONL of request bodies, and HAR.

No header is read, so no credential either.
"""

from __future__ import annotations

import mmap
import os
import re
from base64 import b64decode
from collections.abc import Iterator
from io import BufferedReader
from itertools import count
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
from msgspec import Raw

from proxy.core import rawjson
from proxy.core.history import Unplannable
from proxy.core.rawjson import NotJson
from proxy.core.reasons import Reason
from proxy.core.request import Request
from proxy.dialects import DIALECTS, Dialect, for_request
from proxy.dialects.usage import Reported, reported
from proxy.errors import UserMistake

LONGEST = 64 << 20
"""Most bytes of a line: as many as the proxy accepts as a request by default."""
HEAD = 4 << 10
"""Bytes at the beginning of a file that show whether it is HAR."""
TAIL = 4 << 10
"""Characters at the end of a reply that say what it cost."""

_HAR = re.compile(rb'(?:\xef\xbb\xbf)?\s*\{\s*"log"\s*:')
_BOM = b"\xef\xbb\xbf"


class RecordedRequest(msgspec.Struct, frozen=True):
    """One request. `chat` is None if the proxy would not plan it, for this `reason`."""

    position: float
    """The part of the file that has been read, from 0 to 1."""
    dialect: Dialect | None
    """None: it asks no model that the proxy knows, and would be relayed."""
    chat: Request | None = None
    reason: Reason = Reason.NONE
    said: Reported | None = None
    """What upstream said about the cost."""


def requests(path: Path, api: str | None = None) -> Iterator[RecordedRequest]:
    """Yield the requests of a file. `api` names the dialect of JSONL, which is guessed otherwise.

    Raises UserMistake, which names the line or the entry.
    """
    try:
        with path.open("rb") as file:
            yield from _har(str(path), file) if _HAR.match(file.peek(HEAD)) else _lines(str(path), file, _dialects(api))
    except OSError as error:
        raise UserMistake(f"{path}: cannot be read: {error.strerror}") from error


# -- JSONL -------------------------------------------------------------------------------------------------------------


def _dialects(api: str | None) -> list[Dialect]:
    """Return the dialect of this name, or all of them. Raises UserMistake."""
    known = {one.name: one for one in reversed(DIALECTS)}
    if api is not None and api not in known:
        raise UserMistake(f"--dialect {api}: expected one of {', '.join(sorted(known))}")
    return list(DIALECTS) if api is None else [known[api]]


def _lines(name: str, file: BufferedReader, dialects: list[Dialect]) -> Iterator[RecordedRequest]:
    size, done = max(os.fstat(file.fileno()).st_size, 1), 0  # of a pipe, it is not known
    for number in count(1):
        line = file.readline(LONGEST + 1)
        if not line:
            return
        if len(line) > LONGEST:
            raise UserMistake(f"{name}:{number}: longer than {LONGEST:,} bytes")
        done += len(line)
        body = line.removeprefix(_BOM).strip() if number == 1 else line.strip()
        if body:
            yield _from_line(f"{name}:{number}", body, min(done / size, 1.0), dialects)


def _from_line(place: str, body: bytes, position: float, dialects: list[Dialect]) -> RecordedRequest:
    """Return the request of one line, in the first dialect in which it has a history."""
    try:
        rawjson.members(body)
    except NotJson as error:
        raise UserMistake(f"{place}: expected a request body, a JSON object on one line: {error}") from error
    for dialect in dialects:
        found = _parsed(dialect, body, position)
        if found.reason is not Reason.INVALID and (found.chat is None or found.chat.entries):
            return found
    raise UserMistake(f"{place}: expected a request body of {' or '.join(dict.fromkeys(one.name for one in dialects))}")


def _parsed(dialect: Dialect, body: bytes, position: float, said: Reported | None = None) -> RecordedRequest:
    try:
        return RecordedRequest(position, dialect, dialect.parse(body), said=said)
    except Unplannable as error:
        return RecordedRequest(position, dialect, reason=error.reason)


# -- HAR ---------------------------------------------------------------------------------------------------------------


class _Text(msgspec.Struct, frozen=True):
    text: str | None = None
    encoding: str | None = None

    def content(self) -> bytes:
        text = self.text or ""
        if self.encoding != "base64":
            return text.encode("utf-8", "surrogatepass")
        try:
            return b64decode(text)
        except ValueError:
            return b""


class _HarRequest(msgspec.Struct, frozen=True):
    method: str
    url: str
    postData: _Text | None = None


class _HarResponse(msgspec.Struct, frozen=True):
    status: int = 0
    content: _Text = _Text()


class _Entry(msgspec.Struct, frozen=True):
    request: _HarRequest
    response: _HarResponse = _HarResponse()


class _Log(msgspec.Struct, frozen=True):
    entries: list[Raw]


class _Har(msgspec.Struct, frozen=True):
    log: _Log


_entry = msgspec.json.Decoder(_Entry)


def _har(name: str, file: BufferedReader) -> Iterator[RecordedRequest]:
    """Yield the requests of a HAR. The file is mapped into memory, and one entry at a time is decoded."""
    mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    start = len(_BOM) if mapped[: len(_BOM)] == _BOM else 0
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
    try:
        path = urlsplit(entry.request.url).path.encode("utf-8", "surrogatepass")
    except ValueError:
        path = b""
    dialect = for_request(entry.request.method, path)
    if dialect is None:
        return RecordedRequest(position, None)
    body = entry.request.postData.content() if entry.request.postData else b""
    reply = entry.response
    said = reported(reply.content.content()[-TAIL:]) if reply.status == 200 else None
    return _parsed(dialect, body, position, said)


def _line_of(error: Exception, text: memoryview) -> str:
    """Return the line at which JSON is malformed, as `:LINE`, or nothing if the error names no place."""
    at = re.search(r"\(byte (\d+)\)", str(error))
    return f":{bytes(text[: int(at[1])]).count(10) + 1}" if at else ""
