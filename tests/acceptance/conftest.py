"""For tests of the HTTP operations: one proxy a module, a caller of its own for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.acceptance.operations import Caller, World, operated


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """A proxy that has the operations, in front of a model that writes summaries. It must not log any bug."""
    with operated() as made:
        yield made


@pytest.fixture
def caller(world: World) -> Iterator[Caller]:
    """Somebody whom the proxy has never seen."""
    with Caller(world.proxy) as one:
        yield one
