"""The tree in the docstring of `proxy.errors` is the tree that the code has."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Iterator

import pytest

import proxy
from proxy import errors
from proxy.errors import OffloadError, ProxyError

OPTIONAL = "proxy.demo"
"""Needs packages of its own."""


@pytest.fixture(scope="module")
def raised() -> set[type[BaseException]]:
    """Every exception class that the proxy defines."""
    for module in pkgutil.walk_packages(proxy.__path__, "proxy."):
        if not module.name.startswith((OPTIONAL, "proxy.__main__")):
            importlib.import_module(module.name)
    found = set(below(Exception))
    return {one for one in found if one.__module__.startswith("proxy.") and not one.__module__.startswith(OPTIONAL)}


def below(kind: type[BaseException]) -> Iterator[type[BaseException]]:
    for one in kind.__subclasses__():
        yield one
        yield from below(one)


def printed() -> dict[str, tuple[str, int | None]]:
    """Each class of the docstring's tree with the class above it and its status."""
    tree: dict[str, tuple[str, int | None]] = {}
    above: list[str] = []
    for indent, name, status in re.findall(r"^( *)[*x+·-] (\w+) *(\d{3})?", errors.__doc__ or "", re.MULTILINE):
        del above[len(indent) // 2 :]
        tree[name] = (above[-1] if above else "Exception", int(status) if status else None)
        above.append(name)
    return tree


def test_the_docstring_shows_the_tree(raised: set[type[BaseException]]) -> None:
    assert printed() == {
        one.__name__: (one.__bases__[0].__name__, one.status if issubclass(one, ProxyError) else None)
        for one in raised
        if issubclass(one, OffloadError)
    }


def test_the_docstring_names_every_exception_outside_of_the_tree(raised: set[type[BaseException]]) -> None:
    outside = {one.__name__ for one in raised if not issubclass(one, OffloadError) and not one.__name__.startswith("_")}
    named = re.findall(r"`([A-Z]\w+)`", errors.__doc__ or "")
    assert outside == set(named)
