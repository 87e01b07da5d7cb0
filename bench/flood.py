"""How long one tenant's requests take while many callers of another tenant send histories that are
new.

Each caller sends one history of 327 KB; all of its results move, so that some 80 originals are
written for each. Another tenant continues a conversation with hidden rounds meanwhile. It prints
median, 99th percentile and longest of that tenant's turns, without and with the flood, and what the
store did not do in time: a `get` there can change a prefix, a `put` is an original that was not
kept.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import re
import time
from multiprocessing import Pipe, Process
from multiprocessing.connection import Connection
from typing import Any

import httpx

from tests.fake_upstream import Message, Recorded, StrictUpstream, calls, text
from tests.serving import spawned, tight

Json = dict[str, Any]

CALLERS = 600
AT_ONCE = 40
"""Callers in the flood, and their requests under way at a time."""

TOOL: Json = {"type": "function", "function": {"name": "fetch", "parameters": {"type": "object"}}}
KEY = "other-tenants-key"


def history(name: str, results: int, size: int) -> list[Json]:
    """Return a conversation with so many results of so many characters."""
    messages: list[Json] = [{"role": "user", "content": f"Fetch {name}."}]
    for number in range(results):
        call = {
            "id": f"k{number}",
            "type": "function",
            "function": {"name": "fetch", "arguments": "{}"},
        }
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        line = f"{name} {number}: nothing of interest\n"
        content = f"the code is {number}\n" + line * (size // len(line))
        messages.append({"role": "tool", "tool_call_id": f"k{number}", "content": content})
    return [
        *messages,
        {"role": "assistant", "content": "Done."},
        {"role": "user", "content": "What is the code?"},
    ]


def answer(request: Recorded) -> Message:
    """Search the first text that was moved, then answer."""
    if request.messages[-1]["role"] == "user" and (
        found := re.search(rb"stored in (/[^\s;)]+)", request.body)
    ):
        return calls(("grep", {"pattern": "code is", "path": found[1].decode()}))
    return text("It is 0.")


async def ask(client: httpx.AsyncClient, key: str, messages: list[Json]) -> tuple[float, Json]:
    """Return the seconds that a request took, and the message of its reply."""
    began = time.perf_counter()
    body = {"model": "m", "messages": messages, "tools": [TOOL]}
    reply = await client.post(
        "/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key}"}
    )
    return time.perf_counter() - began, reply.raise_for_status().json()["choices"][0]["message"]


async def talk(client: httpx.AsyncClient, name: str, until: asyncio.Event) -> list[float]:
    """Continue a conversation until the event is set. Returns the seconds of its turns."""
    messages = history(name, 4, 3_000)
    taken = []
    while not until.is_set():
        seconds, said = await ask(client, KEY, messages)
        taken.append(seconds)
        messages += [said, {"role": "user", "content": f"And the code now, {len(taken)}?"}]
        await asyncio.sleep(0.1)
    return taken


async def measure(root: str, flood: Connection) -> None:
    """Print the figures of one proxy."""
    async with httpx.AsyncClient(base_url=root, timeout=120, verify=False) as client:
        until = asyncio.Event()
        alone = asyncio.create_task(talk(client, "alone", until))
        await asyncio.sleep(5)
        until.set()
        show("alone", await alone)
        until = asyncio.Event()
        flooded = asyncio.create_task(talk(client, "flooded", until))
        flood.send(root)
        await asyncio.to_thread(flood.recv)
        until.set()
        show("in the flood", await flooded)
        page = (await client.get("/metrics")).raise_for_status().text
        print(
            "\n".join(
                line for line in page.splitlines() if line.startswith("offload_store_errors_total")
            )
        )


async def send(root: str, callers: int) -> None:
    """Send the flood."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=root, timeout=120, limits=limits, verify=False) as client:
        slots = asyncio.Semaphore(AT_ONCE)

        async def one(number: int) -> None:
            async with slots:
                await ask(client, f"caller-{number}", history(f"day {number}", 80, 4_080))

        await asyncio.gather(*(one(number) for number in range(callers)))


def flooding(pipe: Connection, callers: int) -> None:
    """Run the flood with its upstream, in a process of its own: that it keeps its clients busy is
    no figure of ours."""
    with StrictUpstream() as up:
        up.respond(answer)
        pipe.send(up.url)
        asyncio.run(send(pipe.recv(), callers))
        pipe.send("done")


def show(name: str, taken: list[float]) -> None:
    """Print a row: median, 99th percentile and longest."""
    ordered = sorted(taken)
    figures = [ordered[len(ordered) // 2], ordered[int(len(ordered) * 0.99)], ordered[-1]]
    print(
        f"{name}: {len(taken)} turns,", ", ".join(f"{seconds * 1e3:.0f} ms" for seconds in figures)
    )


def main(options: argparse.Namespace) -> None:
    """Run the proxy as users do, and measure."""
    key = {"sha256": hashlib.sha256(KEY.encode()).hexdigest()}
    ours, theirs = Pipe()
    callers = 10 if options.smoke else CALLERS
    flood = Process(target=flooding, args=(theirs, callers), daemon=True)
    flood.start()
    with StrictUpstream() as up:
        up.respond(answer)
        policies = {
            "default": tight(ours.recv()),
            "other": {**tight(up.url), "tenant": "other", "api_keys": [key]},
        }
        with spawned(policies) as proxy:
            asyncio.run(measure(proxy.root, ours))
