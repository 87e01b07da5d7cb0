"""`python -m proxy` is `offload-proxy`."""

import sys

from proxy.cli import main

sys.exit(main())
