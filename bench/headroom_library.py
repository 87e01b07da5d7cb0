"""Runs headroom in its own environment: reads lines of messages (JSON), prints each as `headroom.compress` returns it.

It runs at its defaults, on the whole history before each request, without the compressor that needs weights from a hub
(`kompress`).
"""

import json
import logging
import sys

import headroom  # type: ignore[import-not-found]

logging.disable(logging.CRITICAL)  # log lines would mix with the answers
answers, sys.stdout = sys.stdout, sys.stderr
for line in sys.stdin:
    compressed = headroom.compress(json.loads(line), model="gpt-4o", kompress_model="disabled")
    answers.write(json.dumps(compressed.messages) + "\n")
    answers.flush()
