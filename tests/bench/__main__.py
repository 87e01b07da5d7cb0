"""`python -m tests.bench [--smoke]`: every benchmark there is."""

import sys

from tests.bench.overhead import main

sys.exit(main())
