"""What the dialects' `parse` functions share: limits on a body's parts, and the names of our tools in a request."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import Raw

from proxy import rawjson
from proxy.dialects.values import Members
from proxy.plan.turn import Reason, Request, Unplannable
from proxy.rawjson import TooManyElements
from proxy.tools.answer import NAMES, OTHER_NAMES, Names

T = TypeVar("T", bound=msgspec.Struct)

MAX_DEFINITIONS = 2_000
"""The most tools of a request that we parse. A request with more is forwarded unchanged."""
MAX_MODEL = 1_000
"""The most bytes of the model's name. A request with more is forwarded unchanged, because caches and patterns use the
name at every request and for each message."""
MAX_OTHERS = 20_000
"""The most commas outside of the history and the tools. A request with more is forwarded unchanged, because each comma
may separate top-level members, and each member becomes an object. A large schema for the reply has a thousand."""

MAX_TOOLS = 128
"""OpenAI's limit for the tools of one request. Our two tools count towards it."""


def known(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """Decode the known members of an event, without creating objects for what is Raw. Raises NotJson."""
    rawjson.check_utf8(body)
    found, masked = rawjson.decode(decoder, body)
    if not masked:
        return found
    values = msgspec.structs.astuple(found)
    return type(found)(*(rawjson.unmasked(value) if isinstance(value, Raw) else value for value in values))


def model(raw: Raw) -> str:
    """Return the model's name; empty for none. Raises Unplannable for a very long one."""
    if len(memoryview(raw)) > MAX_MODEL:
        raise Unplannable(f"the model's name has more than {MAX_MODEL} bytes")
    return "" if rawjson.is_null(raw) else rawjson.string(raw)


class _Large(msgspec.Struct, frozen=True):
    """The top-level members that may be large, in any API."""

    messages: Raw = rawjson.NULL
    input: Raw = rawjson.NULL
    tools: Raw = rawjson.NULL
    system: Raw = rawjson.NULL
    instructions: Raw = rawjson.NULL


_large = msgspec.json.Decoder(_Large)


def opened(body: bytes) -> Members:
    """Return the top-level members of a body. Raises NotJson, and Unplannable if there is too much besides the large
    ones."""
    rawjson.check_utf8(body)
    found, _ = rawjson.decode(_large, body)
    large = msgspec.structs.astuple(found)
    if len(body) - sum([len(memoryview(raw)) for raw in large]) > MAX_OTHERS:
        others = rawjson.commas(body) - sum(map(rawjson.commas, large))
        if others > MAX_OTHERS:
            raise Unplannable(f"more than {MAX_OTHERS} commas outside of messages and tools", Reason.TOO_MANY_MEMBERS)
    return rawjson.members(body, checked=True)


def request(
    body: bytes,
    members: Members,
    entries: list[Raw],
    *,
    limits: Sequence[str],
    name: Callable[[Raw], str],
    known: frozenset[str],
    obstacle: str,
    bound: bool,
    others: Collection[str] = (),
    **more: Any,
) -> Request:
    """Return the request with these entries. `limits` are members that limit the reply, `name` returns the name in one
    of the client's definitions, `others` are the names of tools that are not among them, and `known` are the members
    with which a history means what it means without them."""
    tools = members.get("tools", rawjson.NULL)
    names, theirs = our_names(tools, name, others)
    return Request(
        body=body,
        members=members,
        entries=entries,
        model=model(members.get("model", rawjson.NULL)),
        stream=bytes(members.get("stream", b"")) == b"true",
        tools=tools,
        reply_tokens=max(whole(members.get(limit, rawjson.NULL)) for limit in limits),
        names=names,
        theirs=theirs,
        bound=bound,
        obstacle=obstacle or ("" if names else "tools"),
        unknown=tuple(sorted(key for key in members.keys() - known if not rawjson.is_null(members[key]))),
        **more,
    )


def elements(raw: Raw, reason: Reason) -> list[Raw]:
    """Return an array's elements. Raises Unplannable with this reason if there are too many."""
    try:
        return rawjson.elements(raw)
    except TooManyElements as error:
        raise Unplannable(str(error), reason) from error


def our_names(
    tools: Raw, name: Callable[[Raw], str], others: Collection[str] = ()
) -> tuple[Names | None, frozenset[str]]:
    """Return what our tools are called beside the client's, and the names of all of the client's.

    `name` returns the name of one of the client's definitions, and `others` are the names of tools that are not among
    them. Ours are None if there is no room for them. Raises Unplannable if there are too many.
    """
    if rawjson.is_null(tools) and not others:
        return NAMES, frozenset()
    defined = [] if rawjson.is_null(tools) else elements(tools, Reason.TOO_MANY_TOOLS)
    check_number(len(defined) + len(others))
    taken = frozenset((*map(name, defined), *others))
    if len(defined) > MAX_TOOLS - len(NAMES):
        return None, taken
    return next((names for names in (NAMES, OTHER_NAMES) if not taken.intersection(names)), None), taken


def check_number(definitions: int) -> None:
    """Raises Unplannable if a request defines too many tools."""
    if definitions > MAX_DEFINITIONS:
        raise Unplannable(f"more than {MAX_DEFINITIONS} tools", Reason.TOO_MANY_TOOLS)


def whole(raw: Raw) -> int:
    """Return a limit that the client set; 0 for none."""
    text = bytes(raw)
    return int(text) if text.isdigit() and len(text) < 10 else 0
