"""Cases of which the default run takes a sample: `@pytest.mark.parametrize("name", sample(NAMES,
5))`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def sample(cases: Iterable[Any], most: int) -> list[Any]:
    """Return all cases, and mark as sweeps all but `most` of them, which are spread evenly."""
    listed = list(cases)
    kept = {number * len(listed) // most for number in range(most)}
    return [
        case if number in kept else pytest.param(case, marks=pytest.mark.sweep)
        for number, case in enumerate(listed)
    ]
