"""`python -m bench [--smoke]`: runs all benchmarks, one after another."""

import sys

from bench import (
    fidelity,
    grep_speed,
    history,
    liveness,
    needed,
    overhead,
    pauses,
    savings,
    scale,
    startup,
)

BENCHMARKS = (
    overhead,
    history,
    savings,
    fidelity,
    needed,
    pauses,
    scale,
    startup,
    grep_speed,
    liveness,
)

sys.exit(next((fault for benchmark in BENCHMARKS if (fault := benchmark.main())), 0))
