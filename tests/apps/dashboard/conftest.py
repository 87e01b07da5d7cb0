from __future__ import annotations

from collections.abc import Iterator

import pytest

from proxy.apps.dashboard import writer


@pytest.fixture(scope="session", autouse=True)
def hurried() -> Iterator[None]:
    """Let this process' writers gather rows for no second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "LATEST", 0.02)
        patch.setattr(writer, "AGAIN", 0.05)
        yield
