"""A dashboard's file that looks like some weeks of agents' work: sessions that grow, events,
errors."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from proxy.apps.dashboard.rows import Recorded, Rows
from proxy.errors import Fault
from proxy.telemetry.outcome import Basis, Kind, Outcome, ToolUse

MODELS = ("gpt-5.5", "claude-opus-4.5", "gpt-5.4-mini", "qwen3-coder")
TENANTS = ("research", "support", "build")
WORDS = (
    "Moved {moved} results to files: {before:,} tokens became {after:,}. Sending them seven more times would cost more "
    "than writing the rest of the prompt again."
)


def sessions(count: int, until: float, period: float, seed: int = 7) -> Iterator[Recorded]:
    """Yield so many requests, the newest at the end."""
    draw = random.Random(seed)
    number, session = 0, 0
    while number < count:
        session += 1
        turns = min(draw.choice((4, 12, 34, 60)), count - number)
        tenant, model = draw.choice(TENANTS), draw.choice(MODELS)
        tokens, moved, left = draw.randint(4_000, 12_000), 0, 0
        for turn in range(turns):
            tokens += draw.randint(200, 4_000)
            event = turn > 3 and tokens - left > 30_000
            if event:
                moved, left = moved + draw.randint(2, 6), int(tokens * 0.72)
            read = moved and draw.random() < 0.08
            cost = round(tokens * 0.1 + draw.randint(300, 3_000))
            sent = tokens - left + 350 * bool(moved)
            loses = session % 11 == 0 and moved
            after = round(cost * (1.2 if loses else sent / tokens + 0.05)) if moved else 0
            at = until - period * (1 - (number + 1) / count)
            wrong = draw.random() < 0.01
            outcome = Outcome(
                request_id=f"req_{number:032x}", tenant=tenant, namespace=f"{tenant}-{session % 40:016x}",
                kind=Kind.OFFLOADED if moved else Kind.UNTOUCHED, method="POST", path="/v1/chat/completions",
                dialect="messages" if model.startswith("claude") else "chat", model=model, status=502 if wrong else 200,
                fault=Fault.CONNECT if wrong else Fault.NONE, mode="auto", messages=3 + 2 * turn, stream=True,
                tokens_before=tokens, tokens_after=sent, cost_before=cost if moved else 0, cost_after=after,
                usage=Basis.BILLED if moved else Basis.NONE, compacted=moved, events=int(moved > 0), new_event=event,
                rounds=int(bool(read)), tool_uses=(ToolUse("grep", "ok", 240),) if read else (), prompt_tokens=sent,
                cached_tokens=int(sent * 0.8), completion_tokens=300, seconds=draw.lognormvariate(1, 0.6),
                first_byte_seconds=draw.lognormvariate(-0.5, 0.5), added_seconds=draw.lognormvariate(-6, 0.5),
                words=WORDS.format(moved=moved, before=tokens, after=sent) if event else "",
            )  # fmt: skip
            head, whole = 2_400, sent - 2_400 - 1_100
            kinds = [head, 1_100, whole // 10, whole // 4, 0, whole // 6 if moved else 0, 0, 0]
            kinds[4] = sent - sum(kinds)
            yield Recorded(at, outcome, session, kinds)
            number += 1


def fill(path: Path, count: int, until: float, period: float) -> None:
    rows, batch = Rows(path, 512 << 20), []
    for one in sessions(count, until, period):
        batch.append(one)
        if len(batch) == 2_000:
            rows.write(batch)
            batch.clear()
    rows.write(batch)
    rows.close()
