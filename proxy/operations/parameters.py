"""The parameters of the operations: one struct each, from which the OpenAPI document is also made.

`ALIASES` lists older names of parameters. An error uses the name that the caller used.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta, Raw

from proxy import rawjson
from proxy.errors import ClientFault
from proxy.operations.one_shot import LONGEST_NAME
from proxy.rawjson import NotJson
from proxy.tools import names
from proxy.tools.names import BadName

T = TypeVar("T", bound=msgspec.Struct)

MAX_COMMAS = 2_000_000
"""Commas in one call, those in texts included: as many values may have to be validated in one step."""
MAX_PATH = 1_000
MAX_PATTERN = 1_000

Tokens = Annotated[int, Meta(ge=0)]
Path = Annotated[str, Meta(min_length=1, max_length=MAX_PATH)]

ALIASES: Mapping[str, str] = {
    "working_summary_mode": "context_manage_mode",
    "all_token_threshold": "max_total_tokens",
    "keep_recent": "keep_recent_count",
    "storage_path": "store_dir",
    "file_path": "absolute_path",
}
"""Older name → name. In a search, `file_path` is a parameter of its own."""


PATHS: Mapping[str, str] = {
    "store_dir": "/" + "x" * LONGEST_NAME,
    "path": "/x",
    "file_path": "",
    "absolute_path": "",
}
"""Parameters that name files and directories, each with the longest name that the operation will append to it."""


class Part(msgspec.Struct, frozen=True):
    """A part of a message's content."""

    text: str | None = None


class Function(msgspec.Struct, frozen=True):
    """The function of a tool call."""

    name: str | None = None


class ToolCallParameter(msgspec.Struct, frozen=True):
    """A tool call of the model."""

    id: str | None = None
    function: Function | None = None


class MessageParameter(msgspec.Struct, frozen=True):
    """The members of a chat message that must be valid. All others are kept as they are."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[Part] | None = None
    tool_calls: list[ToolCallParameter] | None = None
    tool_call_id: str | None = None


class OffloadParameters(msgspec.Struct, frozen=True, kw_only=True):
    """Moves old content of a conversation out of its messages. The caller continues with the messages of the reply."""

    messages: Annotated[
        list[MessageParameter], Meta(min_length=1, description="the conversation, every field of it is kept")
    ]
    store_dir: Annotated[Path, Meta(description="directory, a name among your own files, that references will carry")]
    context_manage_mode: Annotated[
        Literal["compact", "compress", "auto"],
        Meta(
            description="compact: tool results to files; compress: old messages to summaries; auto: compact, and "
            "compress if that leaves too much"
        ),
    ] = "auto"
    compact_ratio_threshold: Annotated[
        float, Meta(ge=0, description="auto: compress if compaction leaves more than this share")
    ] = 0.75
    max_total_tokens: Annotated[Tokens, Meta(description="nothing happens unless there is more than this")] = 20_000
    max_tool_message_tokens: Annotated[
        Tokens, Meta(description="tool results are moved when they are larger than this")
    ] = 2_000
    group_token_threshold: Annotated[
        Tokens | None, Meta(description="messages for one summary, in tokens; 0 or null: all of them")
    ] = None
    keep_recent_count: Annotated[
        Tokens | None, Meta(description="last messages that stay; null: 1 when compacting, 2 when compressing")
    ] = None
    chat_id: Annotated[
        Annotated[str, Meta(max_length=1_000)] | None,
        Meta(description="part of the names of files with compressed messages; null: a new UUID"),
    ] = None
    preview_char_length: Annotated[int, Meta(ge=0, description="characters of a moved result that stay")] = 100
    compress_system_message: Annotated[bool, Meta(description="whether system messages are compressed too")] = False
    model: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(description="the model that writes summaries; null: the policy's `compress.model`"),
    ] = None


class Search(msgspec.Struct, frozen=True, kw_only=True):
    """Lines that match a regular expression (RE2, ignoring case) in the files below a directory."""

    pattern: Annotated[str, Meta(min_length=1, max_length=MAX_PATTERN, description="RE2 syntax")]
    path: Annotated[Path | None, Meta(description="directory; null: all of your files")] = None
    glob: Annotated[
        Annotated[str, Meta(min_length=1, max_length=MAX_PATH)] | None,
        Meta(description="which files to search; a glob with a slash is matched against the path below the directory"),
    ] = None
    limit: Annotated[Annotated[int, Meta(ge=1)] | None, Meta(description="matches at most; null: no limit")] = None


class Find(msgspec.Struct, frozen=True, kw_only=True):
    """Lines of one file that contain a text, ignoring case."""

    pattern: Annotated[str, Meta(min_length=1, max_length=MAX_PATTERN, description="the text itself")]
    file_path: Annotated[Path, Meta(description="the file")]
    limit: Annotated[Annotated[int, Meta(ge=1)] | None, Meta(description="matches at most")] = 50


class ReadFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file's content, or some lines of it."""

    absolute_path: Annotated[Path, Meta(description="the file")]
    offset: Annotated[Annotated[int, Meta(ge=0)] | None, Meta(description="first line, from 0")] = None
    limit: Annotated[Annotated[int, Meta(ge=0)] | None, Meta(description="number of lines; null: all")] = None


class Body(msgspec.Struct, frozen=True):
    """A request's body: its members as they came, and the elements of `messages` if that is an array."""

    members: dict[str, Raw] = {}
    messages: list[Raw] = []


class _Large(msgspec.Struct, frozen=True):
    messages: Raw = rawjson.NULL


_large = msgspec.json.Decoder(_Large)


def body(raw: bytes) -> Body:
    """Parse a request's body. Raises ClientFault if it is not a JSON object, or too large a one."""
    try:
        rawjson.check_utf8(raw)
        if rawjson.commas(raw) > MAX_COMMAS:
            raise ClientFault(f"The body has more than {MAX_COMMAS} commas")
        large, _ = rawjson.decode(_large, raw)
        if rawjson.strings(raw) - rawjson.strings(large.messages) > rawjson.MAX_STRINGS:
            raise ClientFault(f"The body has more than {rawjson.MAX_STRINGS} strings besides `messages`")
        members = rawjson.members(raw, checked=True)
        return Body(members, rawjson.elements(members["messages"]) if rawjson.is_array(members.get("messages")) else [])
    except NotJson as error:
        raise ClientFault(f"The body is not a JSON object: {error}") from error


def taken(given: Body, kind: type[T]) -> T:
    """The parameters of this kind; others are ignored. Raises ClientFault with the place and the reason."""
    fields = {field.name for field in msgspec.structs.fields(kind)}
    spelled = {ALIASES[name]: name for name in given.members if name not in fields and ALIASES.get(name) in fields}
    older = {name: given.members[alias] for name, alias in spelled.items()}
    newer = {name: given.members[name] for name in fields if name in given.members}
    if newer.keys() & older.keys():
        _checked(newer | older, kind, spelled)  # the newer name takes precedence, but both must be valid
    return _checked(older | newer, kind, {name: alias for name, alias in spelled.items() if name not in newer})


def _checked(members: Mapping[str, Raw], kind: type[T], spelled: Mapping[str, str]) -> T:
    try:
        made = _decoded(rawjson.encode(members), kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ClientFault(_in_callers_words(str(error), spelled)) from error
    for field, appended in PATHS.items():
        try:
            names.key_part(names.canonical(getattr(made, field, None) or "") + appended)
        except BadName as error:
            raise ClientFault(f"`$.{spelled.get(field, field)}` is not a valid path: {error}") from error
    return made


def _decoded(raw: bytes, kind: type[T]) -> T:
    """Decode with msgspec, or with `json` if text contains half a surrogate pair, as JavaScript's `slice` can leave."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError:
        raise
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return msgspec.convert(json.loads(raw), kind)


def _in_callers_words(text: str, spelled: Mapping[str, str]) -> str:
    return re.sub(r"`\$\.(\w+)", lambda match: f"`$.{spelled.get(match[1], match[1])}", text)
