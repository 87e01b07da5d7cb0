"""Fixtures for tests of the HTTP operations: one proxy for each module, and a new caller for each
test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.apps.operations.served import Caller, World, operated


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """A proxy with the operations, in front of a model that writes summaries. A bug in its log
    fails the test."""
    with operated() as made:
        yield made


@pytest.fixture
def caller(world: World) -> Iterator[Caller]:
    """A caller that the proxy has never seen."""
    with Caller(world.proxy) as one:
        yield one
