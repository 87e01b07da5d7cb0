"""`python -m tests.bench [--smoke]`: every benchmark there is, one behind the other."""

import sys

from tests.bench import grep_speed, history, overhead, savings, startup

sys.exit(overhead.main() or history.main() or savings.main() or startup.main() or grep_speed.main())
