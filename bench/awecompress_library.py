"""Runs awecompress in its own environment: reads lines of `{"run": …, "messages": […]}`, prints a line for each.

A printed line has the `messages` that awecompress would send and, as `transcript`, the text that it would have a model
summarise first, or null. It runs at its defaults; each summary is canned, 800 words long.
"""

import json
import sys

from awecompress.compress import apply_summary, plan, prefix_hash, render_transcript  # type: ignore[import-not-found]
from awecompress.config import Config  # type: ignore[import-not-found]
from awecompress.store import SessionRecord  # type: ignore[import-not-found]
from awecompress.summarize import SYSTEM_PROMPT  # type: ignore[import-not-found]

PROTOCOL, SUMMARY = "openai-chat", "word " * 800
config, records = Config(), {}
for line in sys.stdin:
    asked = json.loads(line)
    body, record = {"messages": asked["messages"]}, records.get(asked["run"])
    planned = plan(body, record, config, PROTOCOL)
    transcript = None
    if planned.action in ("init", "extend"):
        span = body["messages"][planned.base_upto : planned.upto]
        transcript = "\n\n".join([SYSTEM_PROMPT, planned.prev_summary, render_transcript(span, config, PROTOCOL)])
        known = prefix_hash(body["messages"], planned.upto)
        records[asked["run"]] = SessionRecord(planned.key, planned.upto, known, SUMMARY)
    if planned.action != "passthrough":
        body["messages"] = apply_summary(body, SUMMARY, planned.upto, PROTOCOL)
    print(json.dumps({"messages": body["messages"], "transcript": transcript}), flush=True)
