"""Reads recorded requests, one at a time, from files of any size.

A file holds records: the lines of JSONL, the elements of a JSON document (an array, an export, a HAR), or the rows of
opencode's database. A record is a request's body, an object with `url` and `body` (our captures, OpenAI's batches), an
entry of a HAR, or what `formats` knows. No header is read, so no credential either.
"""

from __future__ import annotations

import gzip
import io
import mmap
import os
import re
import sqlite3
import stat
import sys
import zlib
from base64 import b64decode
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from hashlib import sha256
from itertools import count
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
from msgspec import Raw

from proxy import rawjson
from proxy.cli.formats import FORMATS, LISTS
from proxy.cli.records import Exported, Json, RecordReader, is_reply, turns, value_of, whole_conversation
from proxy.cli.sessions import Opencode
from proxy.dialects import DIALECTS, Dialect, for_body, for_request
from proxy.dialects.usage import Reported, reported
from proxy.errors import UserMistake
from proxy.plan.turn import Reason, Request, Unplannable
from proxy.rawjson import NotJson, object_of, text_of
from proxy.requests.relay import ReplyEnds

STDIN = Path("-")
"""Stands for standard input."""
SUFFIXES = (".jsonl", ".jsonl.gz", ".har", ".json", ".db")
"""How the names of the files end that are read of a directory."""
LONGEST = (64 << 20) + (64 << 10)
"""Most bytes of a line or of a text in a HAR: as many as the proxy accepts as a request by default, and what a capture
has beside it."""
WHOLE = 1 << 30
"""Most bytes of a JSON document that is compressed or comes from a pipe, and so is held in memory."""
HEAD = 4 << 10
"""Bytes at the beginning of a file that show what it is."""
BODY, HAR, ENVELOPE = "request body", "HAR entry", "request with its address"

_GZIP, _SQLITE = b"\x1f\x8b", b"SQLite format 3\0"
_STEP = 1 << 20


class RecordedRequest(msgspec.Struct, frozen=True):
    """One request. `chat` is None if the proxy would not plan it, for this `reason`."""

    dialect: Dialect | None
    """None: it asks no model that the proxy knows, and would be relayed."""
    chat: Request | None = None
    reason: str = Reason.NONE
    said: Reported | None = None
    """What upstream said about the cost."""
    caller: str = ""
    """Who asked: in a capture, the namespace."""
    source: str = BODY
    """What its record is, as the notes name it."""
    expanded: bool = False
    """It is one turn of a conversation that was recorded as a whole."""


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


def at_home(environment: Mapping[str, str]) -> dict[str, list[Path]]:
    """Return the sessions that agents keep in the home directory: the agent's name → its files, oldest first."""
    home = Path(environment.get("HOME") or Path.home())
    claude = Path(environment.get("CLAUDE_CONFIG_DIR") or home / ".claude", "projects")
    codex = Path(environment.get("CODEX_HOME") or home / ".codex", "sessions")
    data = Path(environment.get("XDG_DATA_HOME") or home / ".local" / "share")
    found = {
        "Claude Code": list(claude.rglob("*.jsonl")),
        "Codex": list(codex.rglob("rollout-*.jsonl")),
        "opencode": list((data / "opencode").glob("opencode.db")),
    }
    return {name: sorted(files, key=lambda file: file.stat().st_mtime) for name, files in found.items() if files}


def requests(path: Path, api: str | None = None) -> Iterator[RecordedRequest]:
    """Yield the requests of a file. `api` names the dialect of bodies, which is guessed otherwise.

    Raises UserMistake, which names the line or the entry.
    """
    records = _Records(str(path), _dialect(api))
    try:
        with _opened(path) as file:
            packed = file.peek(HEAD).startswith(_GZIP)
            unpacked = gzip.GzipFile(fileobj=file) if packed else file
            head = unpacked.peek(HEAD)
            if head.startswith((BOM_UTF16_LE, BOM_UTF16_BE)):
                cure = "PowerShell's > writes it; save it with | Out-File -Encoding utf8"
                raise UserMistake(f"{path}: expected UTF-8, and this is UTF-16: {cure}")
            if head.startswith(_SQLITE):
                yield from records.database(path)
            elif _is_document(head):
                yield from records.document(_whole(str(path), file, unpacked))
            else:
                yield from records.lines(unpacked)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserMistake(f"{path}: is not whole, or no gzip; give what can be unpacked of it: {error}") from error
    except OSError as error:
        raise UserMistake(f"{path}: cannot be read: {error.strerror}") from error


@contextmanager
def _opened(path: Path) -> Iterator[io.BufferedReader]:
    with open(sys.stdin.fileno() if path == STDIN else path, "rb", closefd=path != STDIN) as file:
        yield file


_STRING = rb'"(?:[^"\\]|\\.)*"'
_DOCUMENT = re.compile(
    rb'(?:\xef\xbb\xbf)?\s*(?:\[\s*[{\]]|\{\s*\n|\{\s*(?:%b\s*:\s*(?:%b|[\w.+-]+)\s*,\s*)*"(?:log"\s*:\s*\{|(?:%b)"\s*:\s*\[))'
    % (_STRING, _STRING, "|".join(LISTS).encode())
)
"""An array of objects, an object that goes on in the next line, or one with a log or a list of records."""


def _is_document(head: bytes) -> bool:
    return _DOCUMENT.match(head) is not None


def _whole(name: str, file: io.BufferedReader, unpacked: io.BufferedReader | gzip.GzipFile) -> memoryview:
    """Return the bytes of a document: mapped into memory where that is possible."""
    status = os.fstat(file.fileno())
    if unpacked is file and stat.S_ISREG(status.st_mode) and status.st_size:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    read = unpacked.read(WHOLE + 1)
    if len(read) > WHOLE:
        raise UserMistake(f"{name}: a JSON document of more than {WHOLE >> 20} MiB is read from a plain file only")
    return memoryview(read)


def _dialect(api: str | None) -> Dialect | None:
    """Return the dialect of this name. Raises UserMistake."""
    known = {one.name: one for one in DIALECTS if not one.counts}
    if api is not None and api not in known:
        raise UserMistake(f"--dialect {api}: expected one of {', '.join(sorted(known))}")
    return known[api] if api else None


class _Records:
    """The records of one file, and the readers of the formats found in it."""

    def __init__(self, name: str, dialect: Dialect | None) -> None:
        self._name = name
        self._dialect = dialect
        self._readers: dict[str, RecordReader] = {}
        self._seen: set[bytes] = set()  # the turns of whole conversations so far

    # -- the three kinds of file --

    def lines(self, file: io.BufferedReader | gzip.GzipFile) -> Iterator[RecordedRequest]:
        """Yield the requests of JSONL."""
        for number in count(1):
            line = file.readline(LONGEST + 1)
            if not line:
                break
            if len(line) > LONGEST:
                raise UserMistake(f"{self._name}:{number}: longer than {LONGEST:,} bytes")
            body = line.removeprefix(BOM_UTF8).strip() if number == 1 else line.strip()
            if number > 1 and not line.endswith(b"\n") and _is_cut(body):
                yield RecordedRequest(None, reason=Reason.INVALID)
            elif body:
                yield from self._record(f"{self._name}:{number}", body)
        yield from self._ends()

    def document(self, text: memoryview) -> Iterator[RecordedRequest]:
        """Yield the requests of one JSON document: an array, one object, or an object with a list of records."""
        start = len(BOM_UTF8) if bytes(text[: len(BOM_UTF8)]) == BOM_UTF8 else 0
        try:
            found = msgspec.json.decode(text[start:], type=list[Raw] | dict[str, Raw])
            entries = found if isinstance(found, list) else _listed(found)
        except (ValueError, RecursionError) as error:
            raise UserMistake(f"{self._name}{_line_of(error, text[start:])}: not JSON: {error}") from error
        if entries is None:
            yield from self._record(self._name, bytes(text[start:]).strip())
            entries = []
        for number, raw in enumerate(entries, 1):
            yield from self._record(f"{self._name}: entry {number}", bytes(raw))
        yield from self._ends()

    def database(self, path: Path) -> Iterator[RecordedRequest]:
        """Yield the requests of opencode's database."""
        reader = Opencode()
        try:
            with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as connection:
                rows = connection.execute(_MESSAGES).fetchall()
                for session, message, data in rows:
                    parts = [value_of(part) for (part,) in connection.execute(_PARTS, (message,))]
                    record = {"session": session, "message": value_of(data), "parts": parts}
                    for found in reader.take(record):
                        yield from self._found(found, "opencode's session")
        except (sqlite3.Error, ValueError, KeyError, TypeError) as error:
            raise UserMistake(f"{path}: is a database, but not one of opencode's that we know: {error}") from error

    # -- one record --

    def _record(self, place: str, body: bytes) -> Iterator[RecordedRequest]:
        """Yield the requests that are complete with this record. Raises UserMistake."""
        try:
            members = rawjson.members(body)
        except NotJson as error:
            raise UserMistake(f"{place}: expected a JSON object, such as a request's body: {error}") from error
        if "request" in members and "url" in object_of(members["request"]):
            yield msgspec.structs.replace(_from_har(members), source=HAR)
        elif "url" in members and "body" in members:
            asked = text_of(members.get("method")) or "POST"
            found = _from_envelope(asked, text_of(members["url"]), bytes(members["body"]), _said(members))
            yield msgspec.structs.replace(found, caller=text_of(members.get("namespace")), source=ENVELOPE)
        elif known := next((one for one in FORMATS if one.sees(members)), None):
            reader = self._readers.setdefault(known.name, known.reader())
            try:
                for one in reader.take(value_of(body)):
                    yield from self._found(one, known.name)
            except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
                raise UserMistake(f"{place}: looks like {known.name}, but cannot be read as one: {error!r}") from error
        else:
            yield from self._from_body(place, body, members)

    def _ends(self) -> Iterator[RecordedRequest]:
        for name, reader in self._readers.items():
            for one in reader.end():
                yield from self._found(one, name)

    def _found(self, found: Exported, source: str) -> Iterator[RecordedRequest]:
        """Yield the request of a record that a format knows, or its turns if it holds a whole conversation."""
        if found.body is None:
            yield RecordedRequest(None, reason=found.why, source=source)
            return
        key = whole_conversation(found.body)
        for turn in self._turns(found.body, key) if key else [found.body]:
            body = rawjson.encode(turn)
            dialect = next((one for one in DIALECTS if one.name == found.api), None) or self._dialect
            yield msgspec.structs.replace(
                _first_that_parses([dialect] if dialect else for_body(body), body),
                said=None if key else found.said,
                caller=found.caller,
                source=source,
                expanded=bool(key),
            )

    def _turns(self, body: Json, key: str) -> Iterator[Json]:
        """Yield the turns that no earlier record of the file had: some logs add the reply to each request."""
        for turn in turns({"model": "unknown", **body}, key):
            digest = sha256(rawjson.encode([turn["model"], turn[key]])).digest()
            if digest not in self._seen:
                self._seen.add(digest)
                yield turn

    def _from_body(self, place: str, body: bytes, members: Mapping[str, Raw]) -> Iterator[RecordedRequest]:
        """Yield the request of a body: in the first dialect in which it has a history."""
        if rawjson.is_array(members.get("messages")) or rawjson.is_array(members.get("input")):
            last = rawjson.elements(members.get("messages") or members["input"])[-1:]
            if last and is_reply(value_of(last[0])):
                yield from self._found(Exported(value_of(body)), BODY)
                return
        candidates = [self._dialect] if self._dialect else for_body(body)
        found = _first_that_parses(candidates, body)
        if found.reason == Reason.INVALID or (found.chat is not None and not found.chat.entries):
            expected = " or ".join(dict.fromkeys(one.name for one in candidates))
            known = ", ".join(one.name for one in FORMATS)
            raise UserMistake(f"{place}: expected a request body of {expected}, or a record of {known}")
        yield found


_MESSAGES = "select session_id, id, data from message order by session_id, time_created, id"
_PARTS = "select data from part where message_id = ? order by id"


def _listed(found: dict[str, Raw]) -> list[Raw] | None:
    """Return the records of a document that is an object; None if it is a record itself."""
    lists = [object_of(found.get("log")).get("entries"), *(found.get(name) for name in LISTS)]
    whole = next((raw for raw in lists if rawjson.is_array(raw)), None)
    return None if whole is None or "messages" in found else rawjson.elements(whole)


def _is_cut(body: bytes) -> bool:
    """Whether a last line is not whole, as in a file that is still being written."""
    try:
        rawjson.members(body)
    except NotJson:
        return True
    return False


def _first_that_parses(candidates: Sequence[Dialect], body: bytes) -> RecordedRequest:
    """Return the request in the first of the dialects in which it has a history, else the last try."""
    found = RecordedRequest(None, reason=Reason.INVALID)
    for candidate in candidates:
        found = _parsed(candidate, body)
        if found.reason != Reason.INVALID and (found.chat is None or found.chat.entries):
            break
    return found


def _from_envelope(method: str, url: str, body: bytes | None, said: Reported | None) -> RecordedRequest:
    """Return the request with this address. `body` is None if it is too large."""
    dialect = _serving(method, url)
    if dialect is None:
        return RecordedRequest(None)
    if body is None:
        return RecordedRequest(dialect, reason=Reason.ENCODING)
    return _parsed(dialect, body, said)


def _serving(method: str, url: str) -> Dialect | None:
    """Return the dialect of this address, or None if no model is asked for a reply there."""
    try:
        path = urlsplit(url).path.encode("utf-8", "surrogatepass")
    except ValueError:
        return None
    dialect = for_request(method, path)
    return None if dialect is None or dialect.counts else dialect


def _said(members: Mapping[str, Raw]) -> Reported | None:
    """Return what a capture says about the cost."""
    try:
        return msgspec.json.decode(members.get("usage", rawjson.NULL), type=Reported | None)
    except msgspec.MsgspecError:
        return None


def _parsed(dialect: Dialect, body: bytes, said: Reported | None = None) -> RecordedRequest:
    try:
        return RecordedRequest(dialect, dialect.parse(body), said=said)
    except Unplannable as error:
        return RecordedRequest(dialect, reason=error.reason)


# -- HAR ---------------------------------------------------------------------------------------------------------------


def _from_har(entry: Mapping[str, Raw]) -> RecordedRequest:
    """Return the request of an entry. What it brings is decoded only if a model was asked."""
    asked = object_of(entry["request"])
    method, url = text_of(asked.get("method")), text_of(asked["url"])
    dialect = _serving(method, url)
    if dialect is None:
        return RecordedRequest(None)
    reply, said = object_of(entry.get("response")), None
    if bytes(reply.get("status", rawjson.NULL)) == b"200" and (content := _content(reply.get("content"))):
        ends = ReplyEnds()
        ends.take(content)
        said = reported(ends.both)
    return _from_envelope(method, url, _content(asked.get("postData")), said)


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
