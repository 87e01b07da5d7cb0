"""Arrays of tool definitions."""

from __future__ import annotations

import pytest
from msgspec import Raw

from proxy.dialects.request import has_tools, with_tools


def test_ours_stand_behind_the_clients() -> None:
    ours = b'{"name":"grep"}'
    theirs = Raw(b'[ {"type" : "x"} ]')
    both = with_tools(theirs, [ours])
    assert both is not None
    assert bytes(both) == b'[{"type" : "x"},' + ours + b"]"
    for none in (None, Raw(b"null"), Raw(b"[]")):
        assert with_tools(none, []) is none
        assert bytes(with_tools(none, [ours]) or b"") == b"[" + ours + b"]"


@pytest.mark.parametrize(("tools", "some"), [(b"null", False), (b"[]", False), (b"[ ]", False), (b"[{}]", True)])
def test_whether_there_are_tools(tools: bytes, some: bool) -> None:
    assert has_tools(Raw(tools)) is some
