"""Reads recorded requests: JSONL, JSON documents, HAR, exports and session files, also gzipped, for `replay`."""

from __future__ import annotations

import gzip
import os
import re
import sqlite3
import sys
import zlib
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import BinaryIO, cast

import msgspec
from msgspec import Raw

from proxy import rawjson
from proxy.cli.formats import ADDRESSED, FORMATS, LISTS, addressed
from proxy.cli.records import Exported, Json, RecordReader, turns, value_of, whole_conversation
from proxy.cli.sessions import Opencode
from proxy.dialects import DIALECTS, Dialect, for_body
from proxy.dialects.usage import Reported
from proxy.errors import UserMistake
from proxy.plan.turn import Reason, Request, Unplannable
from proxy.rawjson import NotJson, object_of

STDIN = Path("-")
"""Stands for standard input."""
SUFFIXES = (".jsonl", ".jsonl.gz", ".har", ".json", ".db")
"""How the names of the files end that are read of a directory."""
LONGEST = (64 << 20) + (64 << 10)
"""Most bytes of a line: as many as the proxy accepts as a request by default, and what a capture has beside it."""
WHOLE = 1 << 30
"""Most bytes of a JSON document, which is held in memory."""
BODY = "request body"

_GZIP, _SQLITE = b"\x1f\x8b", b"SQLite format 3\0"


class RecordedRequest(msgspec.Struct, frozen=True):
    """One request. `chat` is None if the proxy would not plan it, for this `reason`."""

    dialect: Dialect | None
    """None: it asks no model that the proxy knows, and would be relayed."""
    chat: Request | None = None
    reason: str = Reason.NONE
    said: Reported | None = None
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
        with _opened(path) as (file, head):
            if head.startswith((BOM_UTF16_LE, BOM_UTF16_BE)):
                cure = "PowerShell's > writes it; save it with | Out-File -Encoding utf8"
                raise UserMistake(f"{path}: expected UTF-8, and this is UTF-16: {cure}")
            if head.startswith(_SQLITE):
                yield from records.database(path)
            else:
                yield from records.text(file)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserMistake(f"{path}: is not whole, or no gzip; give what can be unpacked of it: {error}") from error
    except OSError as error:
        raise UserMistake(f"{path}: cannot be read: {error.strerror}") from error


@contextmanager
def _opened(path: Path) -> Iterator[tuple[BinaryIO, bytes]]:
    """Open a file, unpacked, and give its first bytes."""
    with open(sys.stdin.fileno() if path == STDIN else path, "rb", closefd=path != STDIN) as file:
        unpacked = gzip.GzipFile(fileobj=file) if file.peek(2).startswith(_GZIP) else file
        yield cast(BinaryIO, unpacked), unpacked.peek(len(_SQLITE))


def _dialect(api: str | None) -> Dialect | None:
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

    # -- the kinds of file --

    def text(self, file: BinaryIO) -> Iterator[RecordedRequest]:
        """Yield the requests of JSONL, or of a JSON document if the first line is no record."""
        begun = False
        for number in count(1):
            line = file.readline(LONGEST + 1)
            if not line:
                break
            body = line.removeprefix(BOM_UTF8).strip() if number == 1 else line.strip()
            if body and not begun and _begins_document(body):
                yield from self._document(b"\n" * (number - 1) + body + b"\n" + file.read(WHOLE))
                break
            begun = begun or bool(body)
            if len(line) > LONGEST:
                raise UserMistake(f"{self._name}:{number}: longer than {LONGEST:,} bytes")
            if number > 1 and not line.endswith(b"\n") and _is_cut(body):
                yield RecordedRequest(None, reason=Reason.INVALID)
            elif body:
                yield from self._record(f"{self._name}:{number}", body)
        for name, reader in self._readers.items():
            for one in reader.end():
                yield from self._found(one, name)

    def _document(self, text: bytes) -> Iterator[RecordedRequest]:
        try:
            entries = _entries(text)
        except (ValueError, RecursionError) as error:
            at = re.search(r"\(byte (\d+)\)", str(error))
            line = 1 + text[: int(at[1]) if at else 0].count(b"\n")
            raise UserMistake(f"{self._name}:{line}: not JSON: {error}") from error
        if entries is None:
            yield from self._record(self._name, text.strip())
        for number, raw in enumerate(entries or [], 1):
            yield from self._record(f"{self._name}: entry {number}", bytes(raw))

    def database(self, path: Path) -> Iterator[RecordedRequest]:
        """Yield the requests of opencode's database."""
        reader = Opencode()
        try:
            with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as connection:
                for session, message, data in connection.execute(_MESSAGES).fetchall():
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
            record = value_of(body)
            if not isinstance(record, dict):
                raise ValueError(f"it is a {type(record).__name__}")
        except (ValueError, RecursionError) as error:
            raise UserMistake(f"{place}: expected a JSON object, such as a request's body: {error}") from error
        known = next((one for one in FORMATS if one.sees(record)), None)
        if "url" in record and "body" in record:
            yield from self._found(addressed(record, bytes(rawjson.members(body)["body"])), ADDRESSED)
        elif known is None:
            yield from self._from_body(place, body, record)
        else:
            reader = self._readers.setdefault(known.name, known.reader())
            try:
                for one in reader.take(record):
                    yield from self._found(one, known.name)
            except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
                raise UserMistake(f"{place}: looks like {known.name}, but cannot be read as one: {error!r}") from error

    def _found(self, found: Exported, source: str) -> Iterator[RecordedRequest]:
        """Yield the request of a record, or its turns if it holds a whole conversation."""
        if found.body is None:
            yield RecordedRequest(None, reason=found.why, source=source)
            return
        whole = found.body if isinstance(found.body, dict) else {}
        key = whole_conversation(whole)
        for turn in self._turns(whole, key) if key else [found.body]:
            body = turn if isinstance(turn, bytes) else rawjson.encode(turn)
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

    def _from_body(self, place: str, body: bytes, record: Json) -> Iterator[RecordedRequest]:
        """Yield the request of a body: in the first dialect in which it has a history."""
        if whole_conversation(record):
            yield from self._found(Exported(record), BODY)
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


_DOCUMENT: msgspec.json.Decoder[list[Raw] | dict[str, Raw]] = msgspec.json.Decoder(list[Raw] | dict[str, Raw])


def _entries(text: bytes) -> list[Raw] | None:
    """Return the records of a JSON document; None if it is a record itself. Raises ValueError."""
    found, masked = rawjson.decode(_DOCUMENT, text)
    if isinstance(found, list):
        return list(map(rawjson.unmasked, found)) if masked else found
    lists = [object_of(found.get("log")).get("entries"), *(found.get(name) for name in LISTS)]
    whole = next((raw for raw in lists if rawjson.is_array(raw)), None)
    if whole is None or "messages" in found:
        return None
    return rawjson.elements(rawjson.unmasked(whole) if masked else whole)


def _begins_document(line: bytes) -> bool:
    """Whether a file that begins with this line is one JSON document, and not a record in each line."""
    try:
        return _entries(line) is not None
    except (ValueError, RecursionError):
        return line[:1] in (b"{", b"[")


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
        try:
            found = RecordedRequest(candidate, candidate.parse(body))
        except Unplannable as error:
            found = RecordedRequest(candidate, reason=error.reason)
        if found.reason != Reason.INVALID and (found.chat is None or found.chat.entries):
            break
    return found
