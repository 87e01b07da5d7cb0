"""`/recall_sessions`, `/recall_search` and `/recall_read`: a caller's people look into what its conversations moved.

They open what `/read_file` opens, the records of the caller's own key, and nothing else. `archive` says what is listed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from msgspec.structs import asdict

from proxy import rawjson, regex
from proxy.errors import NotThere, Unauthorized
from proxy.operations import names, schema, search
from proxy.operations.call import OperationReply
from proxy.operations.files import File
from proxy.plan.preview import line_count
from proxy.regex import Budget
from proxy.requests.archive import Archive, Session, newest
from proxy.stores import is_part
from proxy.tools import pages

if TYPE_CHECKING:
    from proxy.operations.call import OperationCall

SESSIONS = 200
"""The most sessions, the newest, that one search looks through."""

SEARCHED_BYTES = 64 << 20
"""About how many bytes of texts one search reads, those of the newest sessions first."""


async def sessions(call: OperationCall) -> OperationReply:
    """Return the caller's newest sessions, or what one of them moved. Raises ProxyError."""
    given = await call.read(schema.taken, call.given, schema.RecallSessions)
    found, more = await _archive(call).sessions(given.limit, given.session or "")
    if given.session:
        return _one(call, given.session, found)
    lines = [_line(session) for session in found]
    foot = [f"[the newest {len(found)}; for more send a larger limit]"] if more else []
    listed = [asdict(session) | {"texts": len(session.texts)} for session in found]
    answer = "\n".join([*lines, *foot]) or "Nothing that was moved out of your conversations is kept."
    return OperationReply(answer, metadata={"sessions": listed, "truncated": more})


def _one(call: OperationCall, asked: str, found: Sequence[Session]) -> OperationReply:
    if not found:
        raise NotThere(f"There is no session {asked!r} among yours")
    if len(found) > 1:
        raise NotThere(f"{len(found)} of your sessions begin with {asked!r}; send more of the id")
    [session] = found
    listed = [asdict(text) | {"path": _path(call, text.name)} for text in session.texts]
    lines = [
        f"{text['path']}: {text['about']}" + (f", {text['tokens']:,} tokens" * (text["tokens"] > 0)) for text in listed
    ]
    return OperationReply("\n".join([_line(session), *lines]), metadata={"session": session.session, "texts": listed})


async def find(call: OperationCall) -> OperationReply:
    """Return the lines of moved texts that match a pattern, the newest session's first. Raises ProxyError."""
    given = await call.read(schema.taken, call.given, schema.RecallSearch)
    budget, archive = Budget(search.SECONDS), _archive(call)
    found, more = await archive.sessions(SESSIONS, given.session or "")
    wanted, left_out = newest(found, SEARCHED_BYTES)
    files = [File(text.name, text.bytes) for _, text in wanted]
    of = {text.name: session for session, text in wanted}
    matcher = await search.compiled(call, regex.compile, given.pattern, budget)
    shown = await search.searched(call, archive, files, matcher, given.limit, budget)
    return await call.read(_found, call, given, shown, of, more or left_out)


def _found(
    call: OperationCall, given: schema.RecallSearch, shown: search.Found, of: dict[str, Session], older: bool
) -> OperationReply:
    where = f"{len(of)} texts of your sessions" + (", older ones left out" if older else "")
    head = f'{len(shown.matches)} matches for "{given.pattern}" in {where} (lines are counted from 0)'
    lines = [head + (":" if shown.matches else ".")]
    for name, group in groupby(shown.matches, key=lambda match: match.path):
        session = of[name]
        about = next(text.about for text in session.texts if text.name == name)
        lines += ["---", f"{_path(call, name)} ({about}; session {session.session}, {_date(session.last)})"]
        lines += [f"{match.line - 1}: {match.text}" for match in group]
    if shown.more:
        lines.append("[there are more; send a larger limit or narrow the pattern]")
    listed = [
        {"path": _path(call, one.path), "session": of[one.path].session, "line": one.line - 1, "text": one.text}
        for one in shown.matches
    ]
    return OperationReply("\n".join(lines), metadata={"matches": listed, "truncated": shown.more, "older": older})


async def read(call: OperationCall) -> OperationReply:
    """Return a moved text, or as much of it as was asked for. Raises ProxyError."""
    given = await call.read(schema.taken, call.given, schema.RecallRead)
    name = names.canonical(given.path).rpartition("/")[2]
    name = name if name.endswith(".txt") else f"{name}.txt"
    value = await _text(call, name)
    if value is None and await call.services.background.ended(f"{call.tenant.namespace}/", search.WRITING):
        value = await _text(call, name)  # a reply that moved it may have ended before it was written
    if value is None:
        raise NotThere(f"There is no text {given.path!r} among those that are kept of your conversations")
    return await call.read(_page, given, name, value)


async def _text(call: OperationCall, name: str) -> bytes | None:
    [value] = await _archive(call).read_many([name]) if is_part(name) else [None]
    return value


def _page(given: schema.RecallRead, name: str, value: bytes) -> OperationReply:
    text = value.decode("utf-8", "surrogatepass")
    metadata: dict[str, Any] = {"path": given.path, "size_bytes": len(value), "lines": line_count(text)}
    span = pages.span(text, given.offset, given.limit or max(len(text), 1), given.column)
    shown = pages.page(text, span, f'recall_read(path="{name}"', given.characters, len) if span else None
    return OperationReply(rawjson.encodable(shown or ""), metadata=metadata)


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
