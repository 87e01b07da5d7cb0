"""The parameters of the operations, one struct each, and the OpenAPI 3.1 document that is made of
them.

`ALIASES` lists older names of parameters. An error uses the name that the caller used.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Raw

from proxy import rawjson
from proxy.apps.operations.call import BadName, canonical, key_part, shown
from proxy.dialects.request import MAX_MODEL
from proxy.errors import ClientFault
from proxy.plan.preview import Shape
from proxy.policy import Mode
from proxy.rawjson import NotJson

T = TypeVar("T", bound=msgspec.Struct)
Json = dict[str, Any]

MAX_COMMAS = 2_000_000
"""Commas in one call, those in texts included: as many values may have to be validated in one
step."""
LONGEST_NAME = 160
"""The most bytes of a file's name as stored: 64 of a chat's id, or 40 of a call, where a dot takes
three, a digest, a number, and our fixed text."""

MAX_PATH = 1_000
MAX_PATTERN = 1_000
MAX_PARAMETER = 100
"""Characters of an unknown parameter's name that is compared with the known ones."""

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
"""Parameters that name files and directories, each with the longest name that the operation will
append to it."""


class ContentPart(msgspec.Struct, frozen=True):
    """A part of a message's content."""

    text: str | None = None


class Function(msgspec.Struct, frozen=True):
    """The function of a tool call."""

    name: str | None = None


class ToolCallParameter(msgspec.Struct, frozen=True):
    """A tool call of the model."""

    id: str | None = None
    function: Function | None = None


class ContentObject(msgspec.Struct, frozen=True):
    """A tool's result that is an object. It counts as the text that its JSON is."""


class MessageParameter(msgspec.Struct, frozen=True):
    """The members of a chat message that must be valid. All others are kept as they are."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[
        str | list[ContentPart] | ContentObject | None,
        Meta(description="an object in tool messages"),
    ] = None
    tool_calls: list[ToolCallParameter] | None = None
    tool_call_id: str | None = None


KEEP_RECENT = 5
"""How many messages `/context_compress` keeps by default, as its callers expect."""


class CompactParameters(msgspec.Struct, frozen=True, kw_only=True):
    """What every mode of moving old content takes. The caller continues with the messages of the
    reply."""

    messages: Annotated[
        list[MessageParameter],
        Meta(min_length=1, description="the conversation, every field of it is kept"),
    ]
    store_dir: Annotated[
        Path, Meta(description="directory, a name among your own files, that references will carry")
    ]
    compact_ratio_threshold: Annotated[
        float, Meta(ge=0, description="auto: compress if compaction leaves more than this share")
    ] = 0.75
    max_total_tokens: Annotated[
        Tokens, Meta(description="nothing happens unless there is more than this")
    ] = 20_000
    max_tool_message_tokens: Annotated[
        Tokens, Meta(description="tool results are moved when they are larger than this")
    ] = 2_000
    group_token_threshold: Annotated[
        Tokens | None,
        Meta(description="messages for one summary, in tokens; 0 or null: all of them"),
    ] = None
    keep_recent_count: Annotated[
        Tokens | None,
        Meta(description="last messages that stay; null: 1 when compacting, 2 when compressing"),
    ] = None
    chat_id: Annotated[
        Annotated[str, Meta(max_length=1_000)] | None,
        Meta(description="part of the names of files with compressed messages; null: a new UUID"),
    ] = None
    preview_char_length: Annotated[
        int, Meta(ge=0, description="characters of a moved result that stay")
    ] = 100
    compress_system_message: Annotated[
        bool, Meta(description="whether system messages are compressed too")
    ] = False
    model: Annotated[
        Annotated[str, Meta(min_length=1, max_length=MAX_MODEL)] | None,
        Meta(description="the model that writes summaries; null: the policy's `compress.model`"),
    ] = None

    @property
    def mode(self) -> Mode:
        return Mode.COMPACT

    @property
    def shape(self) -> Shape:
        """The form of what stands for a moved result. `store_dir` keeps the caller's spelling."""
        return Shape(self.store_dir.rstrip("/"), self.preview_char_length)

    def keep(self, default: int) -> int:
        """Return how many of the last messages stay."""
        return default if self.keep_recent_count is None else self.keep_recent_count


class CompressParameters(CompactParameters, frozen=True, kw_only=True):
    """The same, but 5 messages stay by default."""

    @property
    def mode(self) -> Mode:
        return Mode.COMPRESS

    def keep(self, default: int) -> int:
        return super().keep(KEEP_RECENT)


class OffloadParameters(CompactParameters, frozen=True, kw_only=True):
    """Moves old content of a conversation out of its messages."""

    context_manage_mode: Annotated[
        Literal["compact", "compress", "auto"],
        Meta(
            description="compact: tool results to files; compress: old messages to summaries; auto: compact, and "
            "compress if that leaves too much"
        ),
    ] = "auto"

    @property
    def mode(self) -> Mode:
        return Mode(self.context_manage_mode)


Session = Annotated[
    str, Meta(pattern=r"^[0-9a-f]{1,16}(?!\n)$", description="a session's id, or its beginning")
]


class Search(msgspec.Struct, frozen=True, kw_only=True):
    """Lines, counted from 1, that match a regular expression (RE2, ignoring case) in the files
    below a directory, or in what conversations moved."""

    pattern: Annotated[str, Meta(min_length=1, max_length=MAX_PATTERN, description="RE2 syntax")]
    path: Annotated[Path | None, Meta(description="directory; null: all of your files")] = None
    glob: Annotated[
        Annotated[str, Meta(min_length=1, max_length=MAX_PATH)] | None,
        Meta(
            description="which files to search; a glob with a slash is matched against the path below the directory"
        ),
    ] = None
    limit: Annotated[
        Annotated[int, Meta(ge=1)] | None, Meta(description="matches at most; null: no limit")
    ] = None
    archive: Annotated[
        bool,
        Meta(
            description="search what your conversations moved, the newest first, and not your files"
        ),
    ] = False
    session: Annotated[Session | None, Meta(description="only what this conversation moved")] = None


class Find(msgspec.Struct, frozen=True, kw_only=True):
    """Lines of one file, counted from 1, that contain a text, ignoring case."""

    pattern: Annotated[
        str, Meta(min_length=1, max_length=MAX_PATTERN, description="the text itself")
    ]
    file_path: Annotated[Path, Meta(description="the file")]
    limit: Annotated[int, Meta(ge=1, description="matches at most")] = 50


class Match(msgspec.Struct, frozen=True):
    """One of the `matches` of a search, of which only the path counts."""

    path: Path


class ReadFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file's content, or some lines of it. Files are the caller's, and the texts that its
    conversations moved."""

    absolute_path: Annotated[
        Path | Match, Meta(description="the file, by its path or by a match in it")
    ]
    offset: Annotated[Annotated[int, Meta(ge=0)] | None, Meta(description="first line, from 0")] = (
        None
    )
    limit: Annotated[
        Annotated[int, Meta(ge=0)] | None, Meta(description="number of lines; null: all")
    ] = None
    column: Annotated[int, Meta(ge=0, description="first character of that line, from 0")] = 0
    characters: Annotated[
        Annotated[int, Meta(ge=1_000, le=16 << 20)] | None,
        Meta(
            description="most characters of the answer, whose last line in brackets says how to go on; null: all"
        ),
    ] = None

    @property
    def file(self) -> str:
        return _path(self.absolute_path)


class RecallSessions(msgspec.Struct, frozen=True, kw_only=True):
    """The newest conversations of this user that moved texts, or the texts that one of them
    moved."""

    session: Session | None = None
    limit: Annotated[int, Meta(ge=1, le=200, description="sessions at most")] = 20


class CompressMessages(msgspec.Struct, frozen=True, kw_only=True):
    """Messages for a gateway that sends the request itself. Other members are ignored."""

    messages: Annotated[
        list[MessageParameter], Meta(min_length=1, description="every field of them is kept")
    ]
    model: Annotated[
        str, Meta(max_length=MAX_MODEL, description="chooses the policy's rule and the window")
    ] = ""


class Compressed(msgspec.Struct, frozen=True, kw_only=True):
    """The reply of `/v1/compress`, in Headroom's shape."""

    messages: list[MessageParameter]
    tokens_before: Tokens
    tokens_after: Tokens
    tokens_saved: int
    compression_ratio: float
    transforms_applied: list[str]
    ccr_hashes: Annotated[
        list[str], Meta(description="for `GET /v1/retrieve/HASH`, which gives a moved result back")
    ]
    reason: Annotated[
        str, Meta(description="what moved and why, or what is waited for, in one sentence")
    ]


class Envelope(msgspec.Struct):
    """Every reply."""

    success: bool
    answer: Annotated[str, Meta(description="the result, or the reason of a failure")]
    messages: Annotated[
        list[Any],
        Meta(
            description="offload operations only: the messages to continue with; after a failure the caller's own, "
            "except for a caller who was refused before the body was read (401, 403, 503)"
        ),
    ]
    metadata: Json


PARAMETERS = frozenset(ALIASES).union(
    field.name
    for kind in (OffloadParameters, Search, Find, ReadFile, RecallSessions)
    for field in msgspec.structs.fields(kind)
)
"""All that any operation knows."""

# -- a body and what it asks for --

Body = Mapping[str, Raw]
"""A request's members as they came, but for those that are null: clients send that for what they
leave out."""


def body(raw: bytes) -> tuple[Body, list[Raw]]:
    """Parse a request's body, and the elements of `messages` if that is an array. Raises
    ClientFault if it is not a JSON object, or too large a one."""
    try:
        rawjson.check_utf8(raw)
        if rawjson.commas(raw) > MAX_COMMAS:
            raise ClientFault(f"The body has more than {MAX_COMMAS} commas")
        members = {
            name: value
            for name, value in rawjson.members(raw, checked=True).items()
            if not rawjson.is_null(value)
        }
        return members, rawjson.elements(members["messages"]) if rawjson.is_array(
            members.get("messages")
        ) else []
    except NotJson as error:
        raise ClientFault(f"The body is not a JSON object: {error}") from error


def taken(given: Body, kind: type[T]) -> T:
    """The parameters of this kind; those of other operations are ignored. Raises ClientFault with
    the place and the reason, also for a parameter that no operation has: its caller would take a
    default for what it asked for."""
    fields = {field.name for field in msgspec.structs.fields(kind)}
    if kind is not CompressMessages:
        _check_known(given, fields)
    older = {
        name: alias
        for alias, name in ALIASES.items()
        if name in fields and alias in given.keys() - fields
    }
    newer = {name: name for name in fields & given.keys()}
    if newer.keys() & older.keys():
        _converted(given, newer | older, kind)  # the newer name counts, but both must be valid
    return _converted(given, older | newer, kind)


def _check_known(given: Body, fields: Collection[str]) -> None:
    """Raises ClientFault for a parameter that no operation has."""
    unknown = next((name for name in given if name not in PARAMETERS), None)
    if unknown is None:
        return
    known = sorted([*fields, *(alias for alias, name in ALIASES.items() if name in fields)])
    close = get_close_matches(unknown[:MAX_PARAMETER], known, 1)
    cure = f"did you mean `{close[0]}`?" if close else f"expected one of {', '.join(known)}"
    raise ClientFault(f"{shown(unknown)} is not a parameter; {cure}")


def _check_contents(messages: Sequence[MessageParameter]) -> None:
    """Raises ClientFault for an object as the content of a message that has no tool's result."""
    for place, message in enumerate(messages):
        if isinstance(message.content, ContentObject) and message.role not in ("tool", "function"):
            raise ClientFault(
                f"Expected `str | array | null`, got `object` - at `$.messages[{place}].content`"
            )


def _path(given: str | Match | None) -> str:
    return given.path if isinstance(given, Match) else given or ""


def _converted(given: Body, spelled: Mapping[str, str], kind: type[T]) -> T:
    """Return the parameters, which the caller spells so."""
    raw = rawjson.encode({name: given[said] for name, said in spelled.items()})
    try:
        try:
            made = msgspec.json.decode(raw, type=kind)
        except msgspec.ValidationError:
            raise
        # half a surrogate pair, as JavaScript's `slice` can leave
        except (msgspec.MsgspecError, UnicodeDecodeError):
            made = msgspec.convert(json.loads(raw), kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        text = re.sub(
            r"`\$\.(\w+)", lambda match: f"`$.{spelled.get(match[1], match[1])}", str(error)
        )
        raise ClientFault(text) from error
    for field, appended in PATHS.items():
        try:
            key_part(canonical(_path(getattr(made, field, None))) + appended)
        except BadName as error:
            raise ClientFault(
                f"`$.{spelled.get(field, field)}` is not a valid path: {error}"
            ) from error
    _check_contents(getattr(made, "messages", ()))
    return made


# -- OpenAPI --

_REPLIES = {
    "200": "Done",
    "400": "The request is not valid; `answer` says where and why",
    "401": "No key, or an unknown one",
    "404": "No file or directory of this name",
    "405": "Not a POST",
    "413": "The body is too large",
    "500": "A bug of this server",
    "502": "The model that writes summaries failed",
    "503": "The store failed, or there are too many requests",
    "504": "The model that writes summaries did not answer in time",
}


def document(operations: Mapping[str, tuple[str, Sequence[type[msgspec.Struct]]]]) -> bytes:
    """Return the OpenAPI document as JSON. Takes each path's summary, and what it takes."""
    types = [kind for _, taking in operations.values() for kind in taking]
    described = [*types, Compressed, Envelope]
    schemas, components = msgspec.json.schema_components(
        described, ref_template="#/components/schemas/{name}"
    )
    for kind in types:
        _complete(components[kind.__name__])
    kinds = dict(zip(described, schemas, strict=True))

    def content(about: str, schema: Json) -> Json:
        return {"description": about, "content": {"application/json": {"schema": schema}}}

    paths: Json = {}
    for path, (summary, taking) in operations.items():
        schema = (
            kinds[taking[0]] if len(taking) == 1 else {"anyOf": [kinds[kind] for kind in taking]}
        )
        replies = {status: content(text, kinds[Envelope]) for status, text in _REPLIES.items()}
        asked = {"required": True, "content": {"application/json": {"schema": schema}}}
        paths[path] = {"post": {"summary": summary, "requestBody": asked, "responses": replies}}
    paths["/v1/compress"]["post"]["responses"]["200"] = content("Done", kinds[Compressed])
    whole = {
        "openapi": "3.1.0",
        "info": {"title": "Offload Proxy: operations", "version": "1"},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}],
    }
    # the types' names for callers
    return re.sub(rb"(?<=[a-z])Parameters?\b", b"", msgspec.json.encode(whole))


def _complete(schema: Json) -> None:
    """Add the older names of parameters, either of which will do, and null for what can be left
    out."""
    properties = schema["properties"]
    required = schema.get("required", [])
    older = {
        alias: name
        for alias, name in ALIASES.items()
        if name in properties and alias not in properties
    }
    for alias, name in older.items():
        if name in required:
            required.remove(name)
            schema["anyOf"] = [{"required": [name]}, {"required": [alias]}]
    for name in properties.keys() - set(required):
        properties[name] = {"anyOf": [properties[name], {"type": "null"}]}
    for alias, name in older.items():
        properties[alias] = properties[name] | {
            "deprecated": True,
            "description": f"older name of `{name}`",
        }
