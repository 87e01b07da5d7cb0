"""Messages: measured for the plan, rewritten without changing any other byte, put into readable form, summarised."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import groupby

import msgspec
from msgspec import Raw

from proxy import rawjson
from proxy.dialects import attachments, cache_marks, measuring
from proxy.dialects.attachments import KINDS
from proxy.dialects.cache_marks import Mark
from proxy.dialects.chat.request import CALLS, LIMITS, MESSAGES, PARTS, function_tool
from proxy.dialects.entries import appended, call_section, media_section, sources, texts_in, title, with_texts_in
from proxy.dialects.measuring import Places, known
from proxy.dialects.request import read_summary, summary_members, summary_task, uncalled
from proxy.plan.message import Count, Message, Reading, ToolCall
from proxy.plan.plan import Role
from proxy.plan.summary import Section, SummaryAnswer
from proxy.plan.turn import Request, Unplannable
from proxy.policy import SnapshotRole
from proxy.rawjson import NULL, Members, NotJson, text_of

NAME = "chat"
ROLES = {
    "system": Role.SYSTEM,
    "developer": Role.SYSTEM,
    "user": Role.USER,
    "assistant": Role.ASSISTANT,
    "tool": Role.TOOL,
}


# -- one message ------------------------------------------------------------------------------------------------------


def read(raw: bytes | Raw, reading: Reading, count: Count) -> Message:
    try:
        members = rawjson.members(raw)
    except NotJson as error:
        raise Unplannable(str(error)) from error
    role = text_of(members.get("role"))
    try:
        message = _measured(raw, members, role, reading, count)
        return message if is_known(members) else measuring.sealed(message)
    except (NotJson, msgspec.MsgspecError):  # it counts as a result of its step
        return measuring.unreadable(NAME, raw, ROLES.get(role, Role.TOOL), count)


def _measured(raw: bytes | Raw, members: Members, role: str, reading: Reading, count: Count) -> Message:
    if role not in ROLES:
        raise NotJson(f"unknown role {role[:40]!r}")
    texts, others, calls = texts_in(content := members.get("content")), _others(content), tool_calls(members)
    fixed = sum(map(attachments.tokens, others))
    if ROLES[role] is not Role.ASSISTANT:
        answers = _text(members.get("tool_call_id"))
        media = media_in(content)
        return measuring.of_client(
            NAME, ROLES[role], raw, texts, others, reading, count, answers=answers, fixed=fixed, media=media
        )
    tokens = sum(count(text) for _, text in texts) + count(reasoning(members)) + fixed
    tokens += sum(measuring.call_tokens(call, count) for call in calls)
    said = "".join(text for _, text in texts)
    return measuring.of_model(NAME, raw, said, calls, calls, tokens, fixed, count, others)


def is_known(members: Members) -> bool:
    """Whether we know everything in a message, so that it may be moved or cut. Raises NotJson."""
    content = members.get("content")
    if not (rawjson.is_null(content) or rawjson.is_string(content) or rawjson.is_array(content)):
        return False
    return known(members, MESSAGES, text_of(members.get("role"))) and all(
        known(one, table, text_of(one.get("type")) or unnamed)
        for field, table, unnamed in (("content", PARTS, "text"), ("tool_calls", CALLS, "function"))
        if rawjson.is_array(members.get(field))
        for one in map(rawjson.members, rawjson.elements(members[field]))
    )


def texts(raw: bytes | Raw) -> Places:
    content = rawjson.members(raw).get("content")
    return [*texts_in(content), *((place, part.decode("utf-8", "replace")) for place, part in media_in(content))]


def media_in(content: Raw | None) -> list[tuple[int, bytes]]:
    """Return images, audio and files as canonical JSON, with their places."""
    parts = rawjson.elements(content) if content and rawjson.is_array(content) else []
    found = enumerate(map(rawjson.members, parts))
    return [(place, cache_marks.unmarked(part)) for place, part in found if text_of(part.get("type")) in KINDS]


def reasoning(members: Members) -> str:
    """Return the model's reasoning, under any vendor's name for it."""
    for field in ("reasoning_content", "reasoning"):
        if rawjson.is_string(members.get(field)):
            return rawjson.text(members[field])
    return ""


def tool_calls(members: Members) -> list[ToolCall]:
    """Return an assistant message's calls of functions and custom tools."""
    if rawjson.is_null(members.get("tool_calls")):
        return []
    return [_call(rawjson.members(raw)) for raw in rawjson.elements(members["tool_calls"])]


def with_texts(raw: bytes | Raw, replaced: Mapping[int | None, str]) -> bytes:
    if not replaced:
        return bytes(raw)
    members = rawjson.members(raw)
    return rawjson.encode(members | {"content": with_texts_in(members.get("content", NULL), replaced)})


def said(raw: bytes | Raw) -> tuple[str, list[ToolCall]]:
    members = rawjson.members(raw)
    return "".join(text for _, text in texts_in(members.get("content"))), tool_calls(members)


def answered(raw: bytes | Raw) -> str:
    return text_of(rawjson.members(raw).get("tool_call_id"))


def text_message(role: str, text: str) -> bytes:
    return rawjson.encode({"role": role, "content": text})


def marked(raw: bytes | Raw, mark: Mark) -> bytes | Raw:
    members = rawjson.members(raw)
    content = cache_marks.content(members.get("content"), mark)
    return raw if content is None else rawjson.encode(members | {"content": content})


def _call(members: Members) -> ToolCall:
    kind = "custom" if "custom" in members else "function"
    inner = rawjson.members(members[kind]) if kind in members else members
    arguments = inner.get("input" if kind == "custom" else "arguments")
    return ToolCall(_text(members.get("id")), _text(inner.get("name")), _text(arguments))


def _text(raw: Raw | None) -> str:
    """Return a string's text, or the JSON of any other value: some clients send arguments as objects."""
    if raw is None or rawjson.is_null(raw):
        return ""
    return rawjson.text(raw) if rawjson.is_string(raw) else bytes(raw).decode("utf-8", "replace")


def _others(content: Raw | None) -> list[bytes]:
    """Return images, audio and files as canonical JSON, without cache breakpoints."""
    parts = rawjson.elements(content) if content and rawjson.is_array(content) else []
    return [
        cache_marks.unmarked(part) for part in map(rawjson.members, parts) if not rawjson.is_string(part.get("text"))
    ]


# -- for upstream -----------------------------------------------------------------------------------------------------


def with_snapshot(messages: list[bytes | Raw], leading: int, block: str, role: SnapshotRole) -> list[bytes | Raw]:
    if role is SnapshotRole.USER or (role is SnapshotRole.AUTO and not leading):
        return [*messages[:leading], _user_message(block, messages[leading:]), *messages[leading:]]
    if leading:
        with suppress(NotJson):
            if is_known(rawjson.members(messages[0])):  # otherwise our text might mean what nobody knows
                return [appended(messages[0], "\n\n" + block), *messages[1:]]
    return [text_message("system", block), *messages]


def _user_message(text: str, before: Sequence[bytes | Raw]) -> bytes:
    """Return a user message with the name of the message that it stands before, so that the two can be joined."""
    first = rawjson.members(before[0]) if before else {}
    named = {"name": first["name"]} if "name" in first and text_of(first.get("role")) == "user" else {}
    return rawjson.encode({"role": "user", **named, "content": text})


def is_system(raw: bytes | Raw) -> bool:
    """Whether the message is a system message, by either name."""
    return text_of(rawjson.members(raw).get("role")) in ("system", "developer")


# -- for readers ------------------------------------------------------------------------------------------------------


def sections(raw: bytes | Raw, index: int, message: Message, tool: str) -> list[Section]:
    members = rawjson.members(raw)
    heading = title(index, message, tool)
    thought = reasoning(members)
    made = [Section(f"{heading} reasoning", thought, message.role)] if thought else []
    made += _contents(members.get("content"), heading, message.role)
    made += sources(heading, members, message.role)
    made += [call_section(heading, call, message.role) for call in tool_calls(members)]
    return made or [Section(heading, "", message.role)]


def _contents(content: Raw | None, heading: str, role: Role) -> list[Section]:
    """Return texts unchanged, what images and files are, and other parts as JSON."""
    if content is None or rawjson.is_null(content):
        return []
    if rawjson.is_string(content):
        return [Section(heading, rawjson.text(content), role)]
    media, made = dict(media_in(content)), list[Section]()
    for place, part in enumerate(rawjson.elements(content)):
        said = rawjson.members(part).get("text")
        text = rawjson.text(said) if rawjson.is_string(said) else bytes(part).decode()
        made.append(media_section(heading, media[place], role) if place in media else Section(heading, text, role))
    return made


# -- user messages in a row, which many chat templates refuse, so that a cut must not create them ----------------------


BLANK_LINE = b"\\n\\n"
"""As it is written in a JSON string."""


def joined(messages: Sequence[bytes | Raw]) -> list[bytes | Raw]:
    if len(messages) < 2:
        return list(messages)
    users = [_user(raw) for raw in messages]
    names = [place if user is None else text_of(user.get("name")) for place, user in enumerate(users)]
    found: list[bytes | Raw] = []
    for _, places in groupby(range(len(messages)), key=names.__getitem__):
        first, *others = places
        run = [user for user in users[first : first + 1 + len(others)] if user is not None]
        found.append(_one(run) if others else messages[first])
    return found


def followed(message: bytes | Raw, by: bytes) -> bytes | None:
    """Return a user message that goes on with another one, whatever their names; None if it is no user message."""
    first, second = _user(message), _user(by)
    return None if first is None or second is None else _one([first, second])


def _user(raw: bytes | Raw) -> Members | None:
    """Return the members of a user message in which we know everything; None for everything else."""
    members = rawjson.members(raw)
    try:
        return members if text_of(members.get("role")) == "user" and is_known(members) else None
    except NotJson:
        return None


def _one(users: Sequence[Members]) -> bytes:
    """Return one message with the members of all; where several have one, that of the last message counts."""
    members: Members = {}
    contents: list[Raw] = []
    for user in users:
        members |= user
        if not rawjson.is_null(user.get("content")):
            contents.append(user["content"])
    return rawjson.encode(members | {"content": _content(contents)})


def _content(contents: Sequence[Raw]) -> Raw:
    """Return the contents as one, with a blank line between texts: as a string if all of them are strings."""
    if all(map(rawjson.is_string, contents)):
        texts = [bytes(content)[1:-1] for content in contents]
        return Raw(b'"%b"' % BLANK_LINE.join(text for text in texts if text))
    parts: list[Members] = []
    for content in contents:
        new = _parts(content)
        if new and parts and _is_text(new[0]) and _is_text(parts[-1]):
            new[0] |= {"text": Raw(b'"' + BLANK_LINE + bytes(new[0]["text"])[1:])}
        parts += new
    return Raw(rawjson.array([rawjson.encode(part) for part in parts]))


def _parts(content: Raw | None) -> list[Members]:
    """Return the parts of a message's content. Raises NotJson for a content of an unknown form."""
    if content is None or rawjson.is_null(content):
        return []
    if rawjson.is_string(content):
        return [{"type": Raw(b'"text"'), "text": content}]
    return [rawjson.members(part) for part in rawjson.elements(content)]


def _is_text(part: Members) -> bool:
    return rawjson.is_string(part.get("text"))


# -- summary calls ----------------------------------------------------------------------------------------------------

WHO = ("user", "safety_identifier")
HOW = ("prompt_cache_key", "cache_control", "service_tier", "reasoning_effort")


def summary_request(text: str, model: str, request: Request | None = None, most: int = 0) -> bytes:
    return rawjson.encode(_asking(model, request, most) | {"messages": [{"role": "user", "content": text}]})


def summary_on_prefix(
    text: str, request: Request, entries: Sequence[bytes | Raw], tools: Sequence[bytes], most: int, end: int
) -> bytes:
    """If the last entry is a user message, the task goes on with it, because many chat templates refuse two in a
    row."""
    members = _asking(request.model, request, most)
    members |= uncalled(request, [function_tool(raw) for raw in tools], b'"none"')
    task = summary_task(text, request, end)
    together = followed(entries[-1], by=task) if entries else None
    sent = [*entries, task] if together is None else [*entries[:-1], together]
    return rawjson.encode(members | {"messages": Raw(rawjson.array(sent))})


def _asking(model: str, request: Request | None, most: int) -> Members:
    """Return all members except messages and tools, with the reply's limit in the client's fields, because servers know
    one or the other, or in the older one."""
    members = summary_members(model, request, WHO, (*HOW, *LIMITS))
    limits = [name for name in LIMITS if members.pop(name, None) is not None] or LIMITS[:1]
    return members | (dict.fromkeys(limits, Raw(b"%d" % most)) if most else {})


def summary_answer(status: int, body: bytes) -> SummaryAnswer:
    read = read_summary(status, body, _summary)
    if status == 400 and not read.too_long and LIMITS[1].encode() in body:
        return SummaryAnswer(status, again=_with_newer_limit)
    return read


def _summary(reply: Members) -> tuple[str, bool]:
    choice, *_ = map(rawjson.members, rawjson.elements(reply["choices"]))
    return said(choice["message"])[0], text_of(choice.get("finish_reason")) == "stop"


def _with_newer_limit(body: bytes) -> bytes:
    """Return the body of a call with the reply's limit in the newer field, which some models insist on."""
    members = rawjson.members(body)
    old, new = LIMITS
    return rawjson.encode({new if name == old else name: value for name, value in members.items()})
