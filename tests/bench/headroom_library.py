"""Run by the interpreter of headroom's environment: a line of messages (JSON) in, as `headroom.compress` left it out.

Its defaults, called with the whole history before each request. What needs weights from a hub (`kompress`) is off.
"""

import json
import logging
import sys

import headroom  # type: ignore[import-not-found]

logging.disable(logging.CRITICAL)  # it would stand between the answers
answers, sys.stdout = sys.stdout, sys.stderr
for line in sys.stdin:
    compressed = headroom.compress(json.loads(line), model="gpt-4o", kompress_model="disabled")
    answers.write(json.dumps(compressed.messages) + "\n")
    answers.flush()
