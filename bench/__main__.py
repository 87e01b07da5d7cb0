"""`python -m bench [--smoke]`: runs all benchmarks, one after another."""

import sys

from bench import bounds, house, overhead, savings

given = sys.argv[1:]
failed = [one for one in (overhead, savings, bounds) if one.main(given)]
house.main()
sys.exit(bool(failed))
