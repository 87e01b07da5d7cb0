"""Reads recorded requests: JSONL, JSON documents, HAR, exports and session files, also gzipped, for
`replay`."""

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
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from proxy import rawjson
from proxy.apps.replay.formats import ADDRESSED, FORMATS, LIST, LISTS, SESSIONS, addressed, when
from proxy.apps.replay.sessions import BARE, Exported, Json, RecordedSession, is_message, is_reply
from proxy.dialects import DIALECTS, Dialect, for_body
from proxy.dialects.usage import Reported
from proxy.errors import UserMistake
from proxy.plan.turn import Reason, Request, Unplannable

STDIN = Path("-")
"""Stands for standard input."""
NAMES = ("*.jsonl", "*.jsonl.gz", "*.ndjson", "*.har", "*.json", "*.json.gz", "*.db")
"""The names of the files that are read of a directory."""
LONGEST = (64 << 20) + (64 << 10)
"""Most bytes of a line: as many as the proxy accepts as a request by default, and what batches have
beside it."""
WHOLE = 1 << 29
"""Most bytes of a JSON document, which is held in memory."""
BODY = "request body"

_GZIP = b"\x1f\x8b"
_SQLITE = b"SQLite format 3\0"


class RecordedRequest(msgspec.Struct, frozen=True):
    """One request. `chat` is None if the proxy would not plan it, for this `reason`."""

    dialect: Dialect | None
    """None: it asks no model that the proxy knows, and would be relayed."""
    chat: Request | None = None
    reason: str = Reason.NONE
    reported: Reported | None = None
    caller: str = ""
    """Who asked: in a capture, the namespace."""
    source: str = BODY
    """What its record is, as the notes name it."""
    beta: str = ""
    """What the client wanted beyond its API, as its header said."""
    expanded: bool = False
    """It is one turn of a conversation that was recorded as a whole."""
    file: str = ""
    """The base name of its file; empty in a store."""
    time: float = 0.0
    """When it was asked, in seconds since the epoch; 0 if its record does not say."""


@dataclass
class LeftOut:
    """Why a file, or a part of it, is not replayed."""

    place: str
    """The file, or its first record that cannot be read."""
    why: str
    more: int = 0
    """Records after that one that cannot be read either."""


class Unreadable(ValueError):
    """Its arguments: a place, and why it cannot be read."""


# -- files -----------------------------------------------------------------------------------------


def named(paths: Sequence[str]) -> list[Path]:
    """Return the files to read: those that are given, and in their order those below given
    directories.

    Raises UserMistake for a directory without any.
    """
    files: list[Path] = []
    for path in map(Path, paths):
        if path == STDIN or not path.is_dir():
            files.append(path)
            continue
        found = below(path, NAMES)
        if not found:
            raise UserMistake(
                f"{path}: has no files named {', '.join(NAMES)}; name the file itself"
            )
        # captures are named after their time
        files += sorted(found, key=lambda file: (file.name, file))
    return files


def below(folder: Path, names: Sequence[str]) -> list[Path]:
    """Return the files below a folder that have such names, links that lead nowhere, and closed
    folders, which will be named as such."""
    closed: list[OSError] = []
    every = (
        (where, name)
        for where, _, files in os.walk(folder, onerror=closed.append)
        for name in files
    )
    found = [
        Path(where, name) for where, name in every if any(fnmatchcase(name, one) for one in names)
    ]
    # a pipe would be waited for
    found = [file for file in found if os.path.isfile(file) or not os.path.exists(file)]
    return found + [Path(error.filename) for error in closed]


class Recordings:
    """Reads files one after the other."""

    def __init__(self) -> None:
        self.left_out: dict[Path, LeftOut] = {}
        self.aside: set[str] = set()
        """Members of records that no API has, and that were left aside."""
        self._replies: set[str] = set()
        """The replies of sessions that were read: resumed ones have the records of the earlier
        session again."""

    def requests(self, path: Path) -> Iterator[RecordedRequest]:
        """Yield the requests of a file. What cannot be read is in `left_out`."""
        found = False
        try:
            with open(
                sys.stdin.fileno() if path == STDIN else path, "rb", closefd=path != STDIN
            ) as opened:
                unpacked = (
                    gzip.GzipFile(fileobj=opened) if opened.peek(2).startswith(_GZIP) else opened
                )
                head = unpacked.peek(len(_SQLITE))
                file = cast(BinaryIO, unpacked)
                if head.startswith((BOM_UTF16_LE, BOM_UTF16_BE)):
                    cure = "PowerShell's > writes it; save it with | Out-File -Encoding utf8"
                    raise Unreadable(path, f"expected UTF-8, and this is UTF-16: {cure}")
                records = (
                    _of_database(path) if head.startswith(_SQLITE) else self._of_text(path, file)
                )
                for one in self._of_records(path, records):
                    found = True
                    yield replace(one, file=path.name)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            self._leave(
                path, path, f"is not whole, or no gzip; the rest of it cannot be unpacked: {error}"
            )
        except OSError as error:
            self._leave(path, path, f"cannot be read: {error.strerror}")
        except Unreadable as error:
            self._leave(path, *error.args)
        if not found and path not in self.left_out:
            self._leave(path, path, "holds no request to a model, or only those of an earlier file")

    def captured(self, store: Path, records: Iterator[Record]) -> Iterator[RecordedRequest]:
        """Yield the requests of a store's captures."""
        found = False
        for one in self._of_records(store, records):
            found = True
            yield one
        if not found and store not in self.left_out:
            self._leave(store, store, "holds no captures of whole requests")

    def _leave(self, path: Path, place: object, why: str) -> None:
        if path in self.left_out:
            self.left_out[path].more += 1
        else:
            self.left_out[path] = LeftOut(str(place), why)

    def _of_text(self, path: Path, file: BinaryIO) -> Iterator[Record]:
        """Yield the records of JSONL, or of a JSON document if the first line is no record."""
        begun = False
        for number, line in enumerate(iter(partial(file.readline, LONGEST + 1), b""), 1):
            text = line.removeprefix(BOM_UTF8).strip()
            if text and not begun and _begins_document(text):
                rest = file.read(WHOLE + 1)
                if len(rest) > WHOLE:
                    raise Unreadable(
                        path,
                        f"is one JSON document of more than {WHOLE:,} bytes; JSONL may be longer",
                    )
                yield from _of_document(str(path), b"\n" * (number - 1) + text + b"\n" + rest)
                return
            begun = begun or bool(text)
            if len(line) > LONGEST:
                self._leave(path, f"{path}:{number}", f"longer than {LONGEST:,} bytes")
                while line and not line.endswith(b"\n"):
                    line = file.readline(LONGEST)
            elif text:
                yield Record(f"{path}:{number}", text)

    def _of_records(self, path: Path, records: Iterator[Record]) -> Iterator[RecordedRequest]:
        """Yield the requests of a file's records. A session's are read by what its earlier records
        have said."""
        sessions: dict[str, RecordedSession] = defaultdict(
            lambda: RecordedSession(replied=self._replies)
        )
        seen: set[bytes] = set()
        time = 0.0
        for one in records:
            try:
                record = _value_of(one.text)
            except (ValueError, RecursionError):
                self._leave(path, one.place, "not a JSON object")
                continue
            source = BODY
            time = when(record)
            try:
                source, exports = _read(record, one.text, sessions)
                for export in exports:
                    for found in self._found(export, source, seen):
                        yield replace(found, time=time)
            except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
                self._leave(
                    path,
                    one.place,
                    str(error) if source == BODY else f"looks like {source}, but {_odd(error)}",
                )
        for source, session in sessions.items():
            for export in session.answered():
                for found in self._found(export, source, seen):
                    yield replace(found, time=time)

    def _found(self, export: Exported, source: str, seen: set[bytes]) -> Iterator[RecordedRequest]:
        """Yield the request of a record, or its turns if it holds a whole conversation. Raises
        ValueError."""
        if export.body is None:
            yield RecordedRequest(None, reason=export.why, source=source)
            return
        found = _parsed(export.body, export, source)
        if source == BODY and not (_has_history(found) and _speaks(found)):
            bodies = " or ".join(one.name for one in for_body(rawjson.encode(export.body)))
            raise ValueError(
                f"expected a request body of {bodies}, or a record that replay knows (see replay --help)"
            )
        if isinstance(export.body, bytes) or source in SESSIONS:
            yield found  # as it was sent
            return
        aside = found.chat.unknown if found.chat else ()
        self.aside.update(aside)
        known = {"model": "unknown"} | {
            key: value for key, value in export.body.items() if key not in aside
        }
        turns = _turns(known, seen, own=source == LIST or (bool(aside) and source == BODY))
        if turns is not None:
            for turn in turns:
                yield replace(_parsed(turn, export, source), reported=None, expanded=True)
        else:
            yield _parsed(known, export, source) if aside else found


def _odd(error: Exception) -> str:
    """Say what is wrong with a record of a known format."""
    if isinstance(error, KeyError):
        return f"has no {error}"
    return f"cannot be read as one: {error if isinstance(error, ValueError) else 'a member has an unexpected type'}"


class Record(NamedTuple):
    """A record's JSON, and where it stands."""

    place: str
    text: bytes


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
        raise Unreadable(f"{name}:{line}", f"not JSON: {error}") from error
    if entries is None:
        yield Record(name, text.strip())
    if entries and all(map(is_message, entries)):
        yield Record(name, rawjson.encode({BARE: Raw(rawjson.array(entries))}))
        return
    for number, raw in enumerate(entries or [], 1):
        yield Record(f"{name}: entry {number}", bytes(raw))


_DOCUMENT: msgspec.json.Decoder[list[Raw] | dict[str, Raw]] = msgspec.json.Decoder(
    list[Raw] | dict[str, Raw]
)


def _entries(text: bytes) -> list[Raw] | None:
    """Return the records of a JSON document; None if it is a record itself. Raises ValueError."""
    found, masked = rawjson.decode(_DOCUMENT, text)
    if isinstance(found, list):
        return list(map(rawjson.unmasked, found)) if masked else found
    lists = [
        rawjson.object_of(found.get("log")).get("entries"),
        *(found.get(name) for name in LISTS),
    ]
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
        raise Unreadable(
            path, f"is a database, but not one of opencode's that we know: {error}"
        ) from error


# -- records ---------------------------------------------------------------------------------------


def _read(
    record: Json, text: bytes, sessions: Mapping[str, RecordedSession]
) -> tuple[str, Iterable[Exported]]:
    """Return what a record is, and the requests that are complete with it."""
    if "url" in record and "body" in record:
        return ADDRESSED, addressed(record, text)
    for known in FORMATS:
        if known.sees(record):
            return known.name, known.read(record, sessions[known.name])
    return BODY, [Exported(record)]


def _value_of(text: bytes) -> Json:
    """Return a JSON object, also one with half surrogate pairs. Raises ValueError."""
    value: Any
    try:
        value = msgspec.json.decode(text)
    except msgspec.MsgspecError:
        value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("no object")
    return value


def _parsed(body: Json | bytes, export: Exported, source: str) -> RecordedRequest:
    """Return the request of the export's API, or of the first one whose request it can be."""
    text = body if isinstance(body, bytes) else rawjson.encode(body)
    found = RecordedRequest(
        None, None, Reason.INVALID, export.reported, export.caller, source, beta=export.beta
    )
    for candidate in [one for one in DIALECTS if one.name == export.api][:1] or for_body(text):
        try:
            found = replace(
                found, dialect=candidate, chat=candidate.parse(text), reason=Reason.NONE
            )
        except Unplannable as error:
            found = replace(found, dialect=candidate, chat=None, reason=error.reason)
        if _has_history(found):
            break
    return found


def _has_history(found: RecordedRequest) -> bool:
    return bool(found.chat.entries) if found.chat else found.reason != Reason.INVALID


def _speaks(found: RecordedRequest) -> bool:
    """Whether an API knows who says most of a request's entries. Other tools have messages, too."""
    dialect = found.dialect
    chat = found.chat
    if dialect is None or chat is None:
        return True
    unknown = sum(not _is_known(dialect, entry) for entry in chat.entries)
    return 2 * unknown < len(chat.entries)


def _is_known(dialect: Dialect, entry: Raw) -> bool:
    try:
        role, parts = dialect.opened(entry)
        found = dialect.contents(role, parts)
        return not dialect.unknown(found, parts, ()).endswith("[].type")
    except (rawjson.NotJson, msgspec.MsgspecError):
        return False


def _turns(body: Json, seen: set[bytes], *, own: bool) -> Iterator[Json] | None:
    """Return the body of the request before each reply, if this is a whole conversation: it ends
    with a reply, or it has members of its `own` and goes on from no earlier record of the file.
    None: it is a request.

    Some logs add the reply to each request, so that each record has all earlier turns again.
    """
    key = next((key for key in ("messages", "input") if isinstance(body.get(key), list)), "")
    history = body.get(key) or []
    if not history or not (own or is_reply(history[-1])):
        return None
    so_far = sha256(rawjson.encode(body["model"]))
    earlier = 0
    places = []
    for place, entry in enumerate(history):
        if so_far.digest() in seen:
            earlier = place
        if place and is_reply(entry) and (key == "messages" or not is_reply(history[place - 1])):
            places.append(place)
        so_far.update(rawjson.encode(entry))
    seen.add(so_far.digest())
    if not places or (earlier and not is_reply(history[-1])):
        return None
    first = earlier if is_reply(history[earlier - 1]) else earlier + 1
    return ({**body, key: history[:place]} for place in places if place >= first)
