"""A scripted stand-in for a model. It decides only by the messages that reach it.

So if the proxy takes a text away and does not give it back, the answers show it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from posixpath import basename, dirname
from typing import Any, NamedTuple

import msgspec

Json = dict[str, Any]

TASK = """\
Find out how Python's standard library is written. List its sources, search them for the exceptions they define, and \
then read these modules from the first to the last line, a page at a time: {modules}. Note on each page what it \
defines."""
QUESTION = "Quote the one line of `{path}` that begins with `{begins}`, exactly, and say nothing else."

RECORD = """\
<scratchpad>The pages that were read, and where they are.</scratchpad>
<state_snapshot>
<overall_goal>Read modules of Python's standard library and answer questions about them.</overall_goal>
<files_and_references>
{pages}</files_and_references>
<next_steps>Read the next page.</next_steps>
</state_snapshot>"""

_asked = re.compile(r"Quote the one line of `(?P<path>[^`]+)` that begins with `(?P<begins>[^`]+)`")
_page = re.compile(r"(?P<path>[\w./]+\.py), lines (?P<first>\d+)-(?P<last>\d+) of (?P<of>\d+)")
_reference = re.compile(r"\(detailed result is stored in (?P<file>[^;)]+)")
_kept = re.compile(_page.pattern + r", kept in (?P<file>\S+)")
_originals = re.compile(r"messages are stored in: (?P<file>\S+?)\)")
_definition = re.compile(r"^(?:class|def|async def) (\w+)", re.MULTILINE)
_found = re.compile(r"^File: (?P<file>\S+).*\n(?:\d+- .*\n)*(?P<line>\d+): ", re.MULTILINE)


class ScriptedCall(msgspec.Struct, frozen=True):
    name: str
    arguments: Json


class ScriptedReply(msgspec.Struct, frozen=True):
    """`summary`: whether this is a record of the conversation, which somebody asked for, and not an answer."""

    text: str
    call: ScriptedCall | None = None
    summary: bool = False


class Page(NamedTuple):
    """A page that was read, as far as the messages still show it. `file`: where a reference says that it was moved."""

    path: str
    last: int
    of: int
    text: str
    file: str | None


def reply(messages: Sequence[Json], tools: Sequence[str]) -> ScriptedReply:
    """The scripted model's reply to these messages. It may call the tools with these names."""
    request = next(message for message in reversed(messages) if message["role"] == "user")
    if messages[-1] is request and "</state_snapshot>" in text_of(request):
        return _record(messages)
    if asked := _asked.search(text_of(request)):
        turn = messages[messages.index(request) + 1 :]
        return _answer(asked["path"], asked["begins"], turn, list(_pages(messages)), tools)
    return _study(messages)


def text_of(message: Json) -> str:
    """A message's text, whichever form its content has."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


# Reading


def _study(messages: Sequence[Json]) -> ScriptedReply:
    """The next step of the task: list the sources, search them, then read the named modules page by page."""
    pages = list(_pages(messages))
    if messages[-1]["role"] == "user" and not pages:
        return ScriptedReply("I start with the list of sources.", ScriptedCall("list_sources", {}))
    if not pages and not _called(messages, "search_sources"):
        return ScriptedReply(
            "Now the exceptions.", ScriptedCall("search_sources", {"pattern": r"^class \w+(Error|Exception)\b"})
        )
    wanted = _next_page(messages, pages)
    note = _note(text_of(messages[-1]))
    return (
        ScriptedReply(note, wanted)
        if wanted
        else ScriptedReply(f"{note} That was the last page: I have read all of them.")
    )


def _next_page(messages: Sequence[Json], pages: list[Page]) -> ScriptedCall | None:
    task = next(text_of(message) for message in messages if message["role"] == "user")
    for path in re.findall(r"`([^`]+\.py)`", task):
        read = max((page for page in pages if page.path == path), key=lambda page: page.last, default=None)
        if read is None:
            return ScriptedCall("read_source", {"path": path, "first": 1})
        if read.last < read.of:
            return ScriptedCall("read_source", {"path": path, "first": read.last + 1})
    return None


def _called(messages: Sequence[Json], tool: str) -> bool:
    calls = (call for message in messages for call in message.get("tool_calls") or ())
    return any(call["function"]["name"] == tool for call in calls)


def _pages(messages: Sequence[Json]) -> Iterator[Page]:
    """The pages that the messages mention: in tool results, whole or moved, and in records of earlier history."""
    for message in messages:
        text = text_of(message)
        if message["role"] == "tool" and (found := _page.match(text)):
            moved = _reference.search(text)
            yield Page(found["path"], int(found["last"]), int(found["of"]), text, moved["file"] if moved else None)
        elif "<state_snapshot>" in text and message["role"] != "assistant":
            group = _originals.search(text)
            for kept in _kept.finditer(text):
                file = group["file"] if group and kept["file"] == "context" else kept["file"]
                yield Page(kept["path"], int(kept["last"]), int(kept["of"]), "", file)


def _note(seen: str) -> str:
    """A note on the page just read: the names that it defines."""
    page, names = _page.match(seen), _definition.findall(seen)
    if not page:
        return "I go on."
    defined = f"{len(names)} definitions, from {names[0]} to {names[-1]}" if names else "no definitions at top level"
    return f"{page[0]}: {defined}."


def _record(messages: Sequence[Json]) -> ScriptedReply:
    """The record of a conversation for a reader who will see nothing else of it."""
    kept = ((page, page.file or "context") for page in _pages(messages))
    pages = (f"- {page.path}, lines 1-{page.last} of {page.of}, kept in {file}\n" for page, file in kept)
    return ScriptedReply(RECORD.format(pages="".join(pages)), summary=True)


# Answering


def _answer(path: str, begins: str, turn: Sequence[Json], pages: list[Page], tools: Sequence[str]) -> ScriptedReply:
    """Search the moved pages, open the hit and quote it, always from the text that came back."""
    if not turn:
        return _look_up(path, begins, [page for page in pages if page.path == path], tools)
    last = text_of(turn[-1])
    if (opened := _calls(turn)[-1])["name"].endswith("read_file"):
        return ScriptedReply(last.partition("\n")[0])
    searched = json.loads(opened["arguments"])["path"]
    ours = {basename(page.file) for page in pages if page.file and page.path == path}
    found = [hit for hit in _found.finditer(last) if hit["file"] in ours] or list(_found.finditer(last))
    if not found:
        return ScriptedReply("I cannot find that line any more.")
    place = {"path": f"{searched}/{found[0]['file']}", "offset": int(found[0]["line"]), "limit": 1}
    return ScriptedReply("", ScriptedCall(_named("read_file", tools), place))


def _look_up(path: str, begins: str, pages: list[Page], tools: Sequence[str]) -> ScriptedReply:
    whole = (line for page in pages if not page.file for line in page.text.splitlines() if line.startswith(begins))
    if line := next(whole, None):
        return ScriptedReply(line)
    files = [page.file for page in pages if page.file]
    if not files or not _named("grep", tools):
        return ScriptedReply(f"I have no text of {path} any more.")
    return ScriptedReply(
        "", ScriptedCall(_named("grep", tools), {"pattern": "^" + re.escape(begins), "path": dirname(files[0])})
    )


def _named(tool: str, tools: Sequence[str]) -> str:
    """The name of one of the proxy's tools in this request."""
    return next((name for name in tools if name in (tool, f"offload_{tool}")), "")


def _calls(turn: Sequence[Json]) -> list[Json]:
    return [call["function"] for message in turn for call in message.get("tool_calls") or ()]
