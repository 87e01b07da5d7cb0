"""Reads recorded requests: JSONL, JSON documents, HAR, exports and session files, also gzipped, for `replay`."""

from __future__ import annotations

import gzip
import json
import os
import re
import sqlite3
import sys
import zlib
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import msgspec
from msgspec import Raw

from proxy import rawjson
from proxy.cli.formats import ADDRESSED, FORMATS, LISTS, addressed
from proxy.cli.sessions import Exported, Json, RecordedSession, is_reply
from proxy.dialects import DIALECTS, Dialect, for_body
from proxy.dialects.usage import Reported
from proxy.errors import UserMistake
from proxy.plan.turn import Reason, Request, Unplannable

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


# -- files -------------------------------------------------------------------------------------------------------------


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
    """Yield the requests of a file. `api` names the dialect of bodies, which is guessed otherwise.

    Raises UserMistake, which names the line or the entry.
    """
    known = {one.name: one for one in DIALECTS if not one.counts}
    if api is not None and api not in known:
        raise UserMistake(f"--dialect {api}: expected one of {', '.join(sorted(known))}")
    dialect = known[api] if api else None
    try:
        with open(sys.stdin.fileno() if path == STDIN else path, "rb", closefd=path != STDIN) as opened:
            unpacked = gzip.GzipFile(fileobj=opened) if opened.peek(2).startswith(_GZIP) else opened
            head, file = unpacked.peek(len(_SQLITE)), cast(BinaryIO, unpacked)
            if head.startswith((BOM_UTF16_LE, BOM_UTF16_BE)):
                cure = "PowerShell's > writes it; save it with | Out-File -Encoding utf8"
                raise UserMistake(f"{path}: expected UTF-8, and this is UTF-16: {cure}")
            records = _of_database(path) if head.startswith(_SQLITE) else _of_text(str(path), file)
            yield from _requests(records, dialect)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserMistake(f"{path}: is not whole, or no gzip; give what can be unpacked of it: {error}") from error
    except OSError as error:
        raise UserMistake(f"{path}: cannot be read: {error.strerror}") from error


class Record(NamedTuple):
    """A record's JSON, and where it stands. Not `ended`: its file may still be written."""

    place: str
    text: bytes
    ended: bool = True


def _of_text(name: str, file: BinaryIO) -> Iterator[Record]:
    """Yield the records of JSONL, or of a JSON document if the first line is no record."""
    begun = False
    for number, line in enumerate(iter(partial(file.readline, LONGEST + 1), b""), 1):
        text = line.removeprefix(BOM_UTF8).strip()
        if text and not begun and _begins_document(text):
            yield from _of_document(name, b"\n" * (number - 1) + text + b"\n" + file.read(WHOLE))
            return
        if len(line) > LONGEST:
            raise UserMistake(f"{name}:{number}: longer than {LONGEST:,} bytes")
        if text:
            yield Record(f"{name}:{number}", text, ended=not begun or line.endswith(b"\n"))
            begun = True


def _begins_document(line: bytes) -> bool:
    try:
        return _entries(line) is not None
    except (ValueError, RecursionError):
        return line.startswith((b"{", b"["))


def _of_document(name: str, text: bytes) -> Iterator[Record]:
    try:
        entries = _entries(text)
    except (ValueError, RecursionError) as error:
        at = re.search(r"\(byte (\d+)\)", str(error))
        line = 1 + text[: int(at[1]) if at else 0].count(b"\n")
        raise UserMistake(f"{name}:{line}: not JSON: {error}") from error
    if entries is None:
        yield Record(name, text.strip())
    for number, raw in enumerate(entries or [], 1):
        yield Record(f"{name}: entry {number}", bytes(raw))


_DOCUMENT: msgspec.json.Decoder[list[Raw] | dict[str, Raw]] = msgspec.json.Decoder(list[Raw] | dict[str, Raw])


def _entries(text: bytes) -> list[Raw] | None:
    """Return the records of a JSON document; None if it is a record itself. Raises ValueError."""
    found, masked = rawjson.decode(_DOCUMENT, text)
    if isinstance(found, list):
        return list(map(rawjson.unmasked, found)) if masked else found
    lists = [rawjson.object_of(found.get("log")).get("entries"), *(found.get(name) for name in LISTS)]
    whole = next((raw for raw in lists if rawjson.is_array(raw)), None)
    if whole is None or "messages" in found:
        return None
    return rawjson.elements(rawjson.unmasked(whole) if masked else whole)


def _of_database(path: Path) -> Iterator[Record]:
    """Yield opencode's messages, each with its session and its parts."""
    messages = "select session_id, id, data from message order by session_id, time_created, id"
    parts = "select data from part where message_id = ? order by id"
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as connection:
            for session, message, data in connection.execute(messages).fetchall():
                said = ",".join(part for (part,) in connection.execute(parts, (message,)))
                text = f'{{"session": {json.dumps(session)}, "message": {data}, "parts": [{said}]}}'
                yield Record(f"{path}: message {message}", text.encode())
    except (sqlite3.Error, TypeError) as error:
        raise UserMistake(f"{path}: is a database, but not one of opencode's that we know: {error}") from error


# -- records -----------------------------------------------------------------------------------------------------------


def _requests(records: Iterator[Record], dialect: Dialect | None) -> Iterator[RecordedRequest]:
    """Yield the requests of a file's records. A session's are read by what its earlier records have said."""
    sessions: dict[str, RecordedSession] = defaultdict(RecordedSession)
    seen: set[bytes] = set()
    for one in records:
        try:
            record = _value_of(one.text)
        except (ValueError, RecursionError) as error:
            if one.ended:
                raise UserMistake(f"{one.place}: expected a JSON object, such as a request's body: {error}") from error
            yield RecordedRequest(None, reason=Reason.INVALID)
            continue
        source, exports = _read(record, one.text, sessions)
        try:
            for export in exports:
                for found in _found(export, source, dialect, seen):
                    if source == BODY and not found.expanded and not _has_history(found):
                        bodies = " or ".join(dict.fromkeys(each.name for each in _candidates(one.text, dialect)))
                        known = ", ".join(each.name for each in FORMATS)
                        raise UserMistake(f"{one.place}: expected a request body of {bodies}, or a record of {known}")
                    yield found
        except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
            raise UserMistake(f"{one.place}: looks like {source}, but cannot be read as one: {error!r}") from error
    for source, session in sessions.items():
        for export in session.answered():
            yield from _found(export, source, dialect, seen)


def _read(record: Json, text: bytes, sessions: Mapping[str, RecordedSession]) -> tuple[str, Iterable[Exported]]:
    """Return what a record is, and the requests that are complete with it."""
    if "url" in record and "body" in record:
        return ADDRESSED, addressed(record, text)
    for known in FORMATS:
        if known.sees(record):
            return known.name, known.read(record, sessions[known.name])
    return BODY, [Exported(record if whole_conversation(record) else text)]


def _value_of(text: bytes) -> Json:
    """Return a JSON object, also one with half surrogate pairs. Raises ValueError."""
    value: Any
    try:
        value = msgspec.json.decode(text)
    except msgspec.MsgspecError:
        value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError(f"it is a {type(value).__name__}")
    return value


def _found(export: Exported, source: str, dialect: Dialect | None, seen: set[bytes]) -> Iterator[RecordedRequest]:
    """Yield the request of a record, or its turns if it holds a whole conversation."""
    if export.body is None:
        yield RecordedRequest(None, reason=export.why, source=source)
        return
    whole = export.body if isinstance(export.body, dict) else {}
    key = whole_conversation(whole)
    dialect = next((one for one in DIALECTS if one.name == export.api), dialect)
    for turn in _turns(whole, key, seen) if key else [export.body]:
        body = turn if isinstance(turn, bytes) else rawjson.encode(turn)
        found = RecordedRequest(None, reason=Reason.INVALID)
        for candidate in _candidates(body, dialect):
            try:
                found = RecordedRequest(candidate, candidate.parse(body))
            except Unplannable as error:
                found = RecordedRequest(candidate, reason=error.reason)
            if _has_history(found):
                break
        said, caller = None if key else export.said, export.caller
        yield msgspec.structs.replace(found, said=said, caller=caller, source=source, expanded=bool(key))


def _has_history(found: RecordedRequest) -> bool:
    return bool(found.chat.entries) if found.chat else found.reason != Reason.INVALID


def _candidates(body: bytes, dialect: Dialect | None) -> list[Dialect]:
    return [dialect] if dialect else for_body(body)


def whole_conversation(body: Json) -> str:
    """Return the member that holds the history if it ends with a reply, so that this is no request; else ""."""
    for key in ("messages", "input"):
        history = body.get(key)
        if isinstance(history, list) and len(history) > 1 and is_reply(history[-1]):
            return key
    return ""


def _turns(body: Json, key: str, seen: set[bytes]) -> Iterator[Json]:
    """Yield the body of the request before each reply, if no earlier record of the file had it.

    Some logs add the reply to each request, so that each line has all earlier turns again.
    """
    history = body[key]
    for place, entry in enumerate(history):
        if is_reply(entry) and place and not is_reply(history[place - 1]):
            turn = {"model": "unknown", **body, key: history[:place]}
            digest = sha256(rawjson.encode([turn["model"], turn[key]])).digest()
            if digest not in seen:
                seen.add(digest)
                yield turn
