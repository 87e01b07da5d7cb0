"""What a request costs that nothing is done about, as a share of a bare relay: `python -m
bench.passing`.

Histories of user messages with 200 characters, as chats between people have them: many small
messages, none of which can move. The relay is aiohttp's server and client and nothing else. Both
have one process, the same upstream and warm caches, and take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import aiohttp
import uvloop
from aiohttp import web

from bench import bodies, wire
from bench.systems import POLICIES, Launch, Launcher, Site, System, ours, proxy, start

SIZES = {"1 KB": 4, "100 KB": 430, "1 MB": 4_300}
"""The number of messages in each body."""
CHARACTERS = 200
RELAY = "bare aiohttp relay"
Run = tuple[float, float]
SESSION = web.AppKey("session", aiohttp.ClientSession)
HOP_BY_HOP = ("host", "content-length", "transfer-encoding", "connection")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.passing", description=(__doc__ or "").partition(":")[0]
    )
    parser.add_argument("--runs", type=int, default=5, help="runs of each, taking turns [5]")
    parser.add_argument("--seconds", type=float, default=1.0, help="of one run [1]")
    parser.add_argument("--connections", type=int, default=1)
    parser.add_argument("--relay", nargs=2, metavar=("PORT", "UPSTREAM"), help="be the bare relay")
    options = parser.parse_args(arguments)
    if options.relay:
        port, upstream = options.relay
        web.run_app(
            relay(upstream),
            host="127.0.0.1",
            port=int(port),
            print=None,
            loop=uvloop.new_event_loop(),
        )
        return 0
    with ExitStack() as running:
        folder = Path(running.enter_context(tempfile.TemporaryDirectory(prefix="offload-bench-")))
        runner = running.enter_context(asyncio.Runner(loop_factory=uvloop.new_event_loop))
        chosen: dict[str, Launcher] = {
            RELAY: bare,
            **{name: proxy(POLICIES[name]) for name in list(POLICIES)[:2]},
        }
        systems = start(running, folder, chosen)[1:]
        for size, messages in SIZES.items():
            for stream in (False, True):
                request = bodies.request(body(messages, stream=stream))
                taken = measure(systems, runner, request, options)
                show(f"{size}, {'streamed' if stream else 'plain'}", taken)
    return 0


def body(messages: int, *, stream: bool) -> bytes:
    """So many user messages, every one different."""
    chosen = random.Random(1)
    texts = [" ".join(chosen.choices(bodies.WORDS, k=60))[:CHARACTERS] for _ in range(messages)]
    history = [{"role": "user", "content": text} for text in texts]
    return json.dumps({"model": "gpt-4.1", "stream": stream, "messages": history}).encode()


def measure(
    systems: Sequence[System], runner: asyncio.Runner, request: bytes, options: argparse.Namespace
) -> dict[str, list[Run]]:
    """Return the median seconds of a request and its processor seconds, for each system and run.
    The first run only warms up."""
    taken: dict[str, list[Run]] = {one.name: [] for one in systems}
    for turn in range(-1, options.runs):
        for one in systems:
            before = one.busy()
            load = runner.run(
                wire.load(
                    one.port, request, options.connections, options.seconds if turn >= 0 else 0.3
                )
            )
            if turn >= 0:
                taken[one.name].append((load.p50, (one.busy() - before) / load.count))
    return taken


def show(point: str, taken: dict[str, list[Run]]) -> None:
    """Print each system's medians, and how they compare with the relay's in the same turns."""
    relay = taken[RELAY]
    for name, runs in taken.items():
        said = []
        for what, place in (("took", 0), ("processor", 1)):
            share = statistics.median(
                beside[place] / one[place] for beside, one in zip(relay, runs, strict=True)
            )
            median = statistics.median(one[place] for one in runs)
            said.append(f"{what} {median * 1000:6.2f} ms, share {share:.2f}")
        print(f"{point:18} {name:20} {'   '.join(said)}", flush=True)


def bare(site: Site) -> Launch:
    """Start this module as the relay."""
    return ours([sys.executable, "-m", "bench.passing", "--relay", str(site.port), site.url])


def relay(upstream: str) -> web.Application:
    """Return an application that passes on every request and its reply."""

    async def handle(request: web.Request) -> web.StreamResponse:
        headers = {
            name: value for name, value in request.headers.items() if name.lower() not in HOP_BY_HOP
        }
        content = await request.read()
        url = upstream + request.path_qs
        async with request.app[SESSION].request(
            request.method, url, data=content, headers=headers
        ) as reply:
            kept = {
                name: value
                for name, value in reply.headers.items()
                if name.lower() not in HOP_BY_HOP
            }
            response = web.StreamResponse(status=reply.status, headers=kept)
            await response.prepare(request)
            async for chunk in reply.content.iter_any():
                await response.write(chunk)
            await response.write_eof()
            return response

    app = web.Application(client_max_size=1 << 30)
    app.cleanup_ctx.append(opened)
    app.router.add_route("*", "/{path:.*}", handle)
    return app


async def opened(app: web.Application) -> AsyncIterator[None]:
    """Keep a session open while the application runs."""
    async with aiohttp.ClientSession(
        auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar()
    ) as app[SESSION]:
        yield


if __name__ == "__main__":
    sys.exit(main())
