"""The recorded runs above 90,000 tokens, in auto mode at the default policy, lose at least 80 % in the median."""

from __future__ import annotations

from statistics import median

from proxy.core.policy import Offload
from tests.bench.reduction import rows, table
from tests.transcripts import load, needed


@needed
def test_long_runs_are_reduced_by_four_fifths() -> None:
    found = list(rows(load(90_000), Offload()))
    assert len(found) >= 20
    assert median(row.reduction for row in found) >= 0.8
    assert all(row.breaks <= row.events + 2 for row in found), "what is previewed at first sight adds our tools"
    assert table(found).endswith("breaks")
