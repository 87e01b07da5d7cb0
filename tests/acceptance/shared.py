"""One strict upstream and one tight proxy for all tests of a module, and a text in which a fact is
hidden."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from zlib import crc32

import pytest

from tests.fake_upstream import StrictUpstream
from tests.serving import Proxy, served, tight

BIG = (
    "".join(f"line {number}: nothing of interest here\n" for number in range(60))
    + "the code is heliotrope-7291\n"
)


@pytest.fixture(scope="module")
def up() -> Iterator[StrictUpstream]:
    with StrictUpstream() as upstream:
        yield upstream


@pytest.fixture(scope="module")
def proxy(up: StrictUpstream) -> Iterator[Proxy]:
    with served({"default": tight(up.url)}) as one:
        yield one


def own_ids(request: pytest.FixtureRequest) -> Callable[[int], str]:
    """Makes ids that are those of no other test, so that no test finds another one's records."""
    return lambda number: f"{crc32(request.node.name.encode()):x}_{number}"
