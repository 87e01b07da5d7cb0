"""Everything that the newest SDKs can put into a history, made from their types.

A value of a `TypedDict` is made with one of each of its members; of a union, each variant is made.
Every text in it is unlike all others, so that it can be looked for.
"""

from __future__ import annotations

import itertools
import sys
import types
import typing
from collections.abc import Iterable, Iterator
from typing import Any

import typing_extensions

Json = dict[str, Any]
WRAPPERS = (typing.Required, typing.NotRequired, typing.Annotated, typing_extensions.Required)
DEPTH = 6
"""Levels of a value; schemas and filters contain themselves."""

_number = itertools.count()


def word() -> str:
    """A text that is unlike all others, and long enough to be moved."""
    return f"word-{next(_number)}-of-the-sdk " + "and more " * 60


def plain(kind: Any) -> Any:
    """The type without what only says whether it is required."""
    while typing.get_origin(kind) in WRAPPERS:
        kind = typing.get_args(kind)[0]
    return kind


def members(kind: Any) -> dict[str, Any]:
    return typing_extensions.get_type_hints(kind, vars(sys.modules[kind.__module__]))


def variants(kind: Any) -> list[Any]:
    """The types of a union, those of unions within it included."""
    kind = plain(kind)
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return [one for part in typing.get_args(kind) for one in variants(part)]
    return [kind]


def typed_dicts(kind: Any) -> list[Any]:
    """The `TypedDict`s that a value, or an element of it, may be."""
    found: list[Any] = []
    for one in variants(kind):
        if typing_extensions.is_typeddict(one):
            found.append(one)
        else:
            found += [inner for part in typing.get_args(one) for inner in typed_dicts(part)]
    return list(dict.fromkeys(found))


def named(kind: Any, key: str = "type") -> str:
    """The name of a `TypedDict`'s type, or of its role; empty for none."""
    given = members(kind).get(key)
    return next((name for one in variants(given) for name in literals(one)), "")


def literals(kind: Any) -> list[Any]:
    return list(typing.get_args(kind)) if typing.get_origin(kind) is typing.Literal else []


def values(kind: Any, depth: int = 0) -> Iterator[Any]:
    """Values of this type: together they have every type and member that it knows."""
    for one in variants(kind):
        yield from _values(one, depth)


def value(kind: Any, depth: int = 0) -> Any:
    return next(values(kind, depth), None)


def _values(kind: Any, depth: int) -> Iterable[Any]:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if typing_extensions.is_typeddict(kind):
        return _dicts(kind, depth)
    if origin is typing.Literal:
        return arguments[:1]
    if kind is str:
        return [word()]
    if kind is type(None):
        return [None]
    if kind in (int, float, bool):
        return [kind(1)]
    if origin is dict or kind in (dict, object, Any):
        return [{f"key-{next(_number)}": word()}]
    # of a reply: the SDKs take it in the place of what they would send for it
    if hasattr(kind, "model_fields"):
        return []
    if arguments and depth < DEPTH:  # a list, or something iterable
        return ([inner] for inner in values(arguments[0], depth + 1))
    return [[]]


def _dicts(kind: Any, depth: int) -> Iterator[Json]:
    """The dict with one value of each member; then with each further value of its content."""
    given = {key: plain(one) for key, one in members(kind).items()}
    whole = {key: value(one, depth + 1) for key, one in given.items()} if depth < DEPTH else {}
    yield whole
    for key in ("content", "output", "tool_calls"):
        if key in given and depth < DEPTH:
            yield from (
                {**whole, key: one}
                for one in itertools.islice(values(given[key], depth + 1), 1, None)
            )


def words(value: Any) -> Iterator[str]:
    """All texts in a value that stand for something said."""
    if isinstance(value, dict):
        yield from (word for one in value.values() for word in words(one))
    elif isinstance(value, list):
        yield from (word for one in value for word in words(one))
    elif isinstance(value, str) and value.startswith("word-"):
        yield value.split()[0]
