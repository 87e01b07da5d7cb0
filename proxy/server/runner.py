"""Runs the application under uvicorn: one process or several, and how they end.

SIGTERM and SIGINT drain: no new requests are accepted, and those under way get the drain timeout.
After a further grace the process ends even if something hangs; it then exits with 1 and logs what
hung. A second signal ends it at once. A stream that is cut off first gets its error event, unless a
second signal ends several workers. SIGHUP reloads the policies, in every process.
"""

from __future__ import annotations

import asyncio
import errno
import faulthandler
import gc
import logging
import math
import multiprocessing
import os
import select
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn
from uvicorn.supervisors import Multiprocess

from proxy.errors import UserMistake
from proxy.server.access import Bounds
from proxy.server.app import App
from proxy.server.protocol import IDLE_SECONDS, BoundedProtocol
from proxy.telemetry import logs
from proxy.telemetry.metrics import prepare_multiprocess
from proxy.threads import SWITCH_SECONDS

try:
    import resource
except ImportError:  # Windows, which has no such limit
    resource = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from proxy.server.process import MakePart
    from proxy.settings import Settings

    Handler = Callable[[int, FrameType | None], object]

logger = logging.getLogger(__name__)

_BACKLOG = 2048
"""Most connections that wait to be accepted; uvicorn's own default."""

ACCEPTING = 1_000
QUIET = 4
"""Turns of the event loop in which waiting connections are accepted at the end, and after how many
turns without any it is enough. More come only in a flood."""

_HEARTBEAT = 10
"""Seconds that a worker has to answer its supervisor before it is replaced, which ends its
requests. A thread of its own answers, however busy the worker is."""

GRACE = 5.0
"""Seconds that a process gets on top of the drain timeout. All that is then closed, one after the
other, has a bound of its own, and these bounds together are shorter."""

_MARGIN = 2.0
"""Further seconds until the supervisor kills a worker, so that the worker can first log what hangs
in it."""

_ENDING = signal.SIGINT, signal.SIGTERM

OK = 0
ENDED_EARLY = 1

YOUNG = 10_000
"""So many more objects than before must be there until the collector looks for cycles among them.
At Python's 700 it looks at those of a few dozen requests, most of which are freed soon without
it."""

SHORT_TOKEN = 16
"""Characters below which a token can be guessed over the network, at some thousand tries a
second."""


def announce(address: str) -> None:
    _say(f"offload-proxy listening on {address}")


def serve(
    settings: Settings,
    parts: Sequence[MakePart] = (),
    invite: Callable[[str], str] | None = None,
    ready: Callable[[str], None] = announce,
) -> int:
    """Listen and serve until a signal, with these parts, which can be pickled. `invite` returns a
    line for whoever starts the proxy, or "", and gets its address. `ready` gets it once requests
    are served.

    Returns the exit code: 0, or 1 if a second signal cut requests off.
    If something hangs at the end, it does not return: the process exits with 1.

    Raises UserMistake for errors in settings or policies, and if it cannot listen on the address.
    """
    _prepare(settings)
    # and nothing limits how often one may try
    if settings.admin_token and len(settings.admin_token) < SHORT_TOKEN:
        logger.warning(
            "OFFLOAD_ADMIN_TOKEN can be guessed: choose a longer one (openssl rand -hex 32)"
        )
    app = App(settings, parts)
    with _listener(settings.host, settings.port) as listener:
        address = f"http://{_address(*listener.getsockname()[:2])}"
        if invite and (line := invite(address)):
            _say(f"offload-proxy: {line}")
        listens = partial(ready, address)
        if settings.workers == 1:
            server = _Server(config(settings, _Ending(app, settings)), listens)
            server.run([listener])
            return ENDED_EARLY if server.force_exit else OK
        with prepare_multiprocess():
            shared = config(settings, partial(_worker, settings, parts))
            shared.factory = True
            shared.workers = settings.workers
            supervisor = _Supervisor(shared, [listener], listens)
            supervisor.run()
            return ENDED_EARLY if supervisor.killed else OK


def _worker(settings: Settings, parts: Sequence[MakePart]) -> ASGIApp:
    """Return the application of a worker, which is spawned, not forked, and builds it anew."""

    def end_with_supervisor() -> None:
        """Drain when the supervisor has ended: nothing else would stop this worker, which holds the
        port."""
        if supervisor := multiprocessing.parent_process():
            supervisor.join()
            os.kill(os.getpid(), signal.SIGTERM)

    _prepare(settings)
    threading.Thread(target=end_with_supervisor, daemon=True).start()
    return _Ending(App(settings, parts), settings, alone=False)


def _prepare(settings: Settings) -> None:
    _raise_descriptors()
    sys.setswitchinterval(SWITCH_SECONDS)
    logs.configure(settings.log_format)
    # at INFO, it logs only that it starts and stops
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    if hasattr(signal, "SIGHUP"):
        # Ignored until the application handles it: by default it would end the process.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)


def _raise_descriptors() -> None:
    """Allow as many file descriptors as this process may: shells and systemd allow 1,024, for
    programs that use `select`."""
    if resource is not None:
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        with suppress(OSError, ValueError):  # macOS names no limit and has one
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def config(settings: Settings, app: object) -> uvicorn.Config:
    """Return uvicorn's configuration for an exact relay. `app` is the application, or a function
    that makes it."""
    bounds = Bounds(settings, logs.Limited(logger))
    return uvicorn.Config(
        app,  # type: ignore[arg-type]
        interface="asgi3",
        http=partial(BoundedProtocol, bounds=bounds),  # type: ignore[arg-type]
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,
        backlog=_BACKLOG,
        timeout_keep_alive=math.ceil(IDLE_SECONDS),
        timeout_graceful_shutdown=math.ceil(settings.drain_timeout),
        timeout_worker_healthcheck=_HEARTBEAT,
    )


def _listener(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    both = ":" in host and socket.has_dualstack_ipv6()  # `::` stands for all addresses
    try:
        listener = socket.create_server(
            (host, port), family=family, backlog=_BACKLOG, dualstack_ipv6=both
        )
    except OSError as error:
        reason = str(error.strerror).partition(" (while")[0]  # the rest repeats the address
        cure = "; --port takes another" if error.errno == errno.EADDRINUSE else ""
        raise UserMistake(f"cannot listen on {_address(host, port)}: {reason}{cure}") from error
    except (TypeError, ValueError) as error:  # the name cannot be written as DNS wants it
        raise UserMistake(
            f"cannot listen on {_address(host, port)}: expected a host name or an address"
        ) from error
    return listener


def _say(line: str) -> None:
    # a full disk below standard error is no reason not to serve
    with suppress(OSError, ValueError):
        sys.stderr.write(f"{line}\n")


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class _Ending:
    """An application whose process ends in time even if something in it hangs."""

    def __init__(self, app: App, settings: Settings, *, alone: bool = True) -> None:
        """`alone` says that no supervisor ends this process, and so a second signal ends it at
        once."""
        self._app = app
        self._alone = alone
        self._seconds = math.ceil(settings.drain_timeout) + GRACE
        self._begun = False

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] == "lifespan":
            return self._live(scope, receive, send)
        return self._app(scope, receive, send)

    async def _live(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def sent(message: Message) -> None:
            if message["type"] == "lifespan.startup.complete":
                # All objects made so far live as long as the process. If the collector scanned them
                # again and again, 64 requests at once would take 1.5 times as long at the 99th
                # percentile.
                gc.collect()
                gc.freeze()
                gc.set_threshold(YOUNG, *gc.get_threshold()[1:])
            if message["type"] == "lifespan.shutdown.complete" and self._app.process.hangs:
                self._end()  # the store has logged what hangs
            await send(message)

        # The server's handlers of the signals that end the process are installed already.
        loop = asyncio.get_running_loop()
        for number in _ENDING:
            before = signal.getsignal(number)
            if callable(before):
                signal.signal(number, partial(self._signalled, loop, before))
        await self._app(scope, receive, sent)

    def _signalled(
        self, loop: asyncio.AbstractEventLoop, server: Handler, number: int, frame: FrameType | None
    ) -> None:
        seconds = GRACE if self._begun else self._seconds
        if not self._begun:
            self._begun = True
            self._app.process.ending()
        elif self._alone:
            loop.call_soon_threadsafe(self._app.cut)
        else:  # systemd and terminals tell every process, and so does the supervisor
            return

        def last_resort() -> None:
            time.sleep(seconds)
            logger.error(
                "the process did not end within %g s and is cut off; its threads are in", seconds
            )
            with suppress(Exception):
                faulthandler.dump_traceback()  # places in the code, without data
            self._end()

        threading.Thread(target=last_resort, name="last-resort", daemon=True).start()
        server(number, frame)

    def _end(self) -> None:
        """Exit at once: the interpreter would wait for threads that never end."""
        with suppress(Exception):
            self._app.process.flush()
        logging.shutdown()
        os._exit(ENDED_EARLY)


async def accept_waiting(listeners: Sequence[socket.socket]) -> None:
    """Let the event loop accept the connections that wait, until none does: the kernel resets those
    that wait when a listener is closed, and their clients may have sent a request by then."""
    waiting = select.poll()
    for listener in listeners:
        waiting.register(listener, select.POLLIN)
    # turns since the last one waited; the loop takes some until an accepted connection is a
    # protocol's
    quiet = 0
    for _ in range(ACCEPTING):
        quiet = 0 if waiting.poll(0) else quiet + 1
        if quiet == QUIET:
            return
        await asyncio.sleep(0)


class _Server(uvicorn.Server):
    """One process. It calls `ready` when it listens, and any second signal ends it."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await accept_waiting(sockets or [])
        await super().shutdown(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and sockets:
            self._ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # uvicorn would remember the signals and raise them again at the end; we choose the exit
        # code ourselves. what ends in the middle from here on does so as it was told, and is no
        # error
        if self.should_exit:
            self.force_exit = True
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        self.should_exit = True


class _Supervisor(Multiprocess):
    """Several workers on one listening socket."""

    killed = announced = False

    def __init__(
        self, config: uvicorn.Config, sockets: list[socket.socket], ready: Callable[[], None]
    ) -> None:
        super().__init__(config, sockets)
        self._ready = ready

    def run(self) -> None:
        try:
            super().run()
        # the interpreter would wait for the workers, which nothing else ends then
        except BaseException:
            self.terminate_all()
            self.join_all()
            raise

    def init_processes(self) -> None:
        super().init_processes()
        for process in self.processes:
            process.wait_until_ready(_HEARTBEAT, self.should_exit)
        self.keep_subprocess_alive()

    def keep_subprocess_alive(self) -> None:
        super().keep_subprocess_alive()
        if not self.announced and all(process.is_ready() for process in self.processes):
            self.announced = True
            self._ready()

    def handle_hup(self) -> None:
        """Pass the signal on: policies reload in place, while uvicorn would replace the workers."""
        for process in self.processes:
            if process.pid is not None:
                os.kill(process.pid, signal.SIGHUP)

    def terminate_all(self) -> None:
        # This is a copy of the workers' socket. While it is open, it accepts connections that
        # nobody serves.
        for listener in self.sockets:
            listener.close()
        super().terminate_all()

    def join_all(self) -> None:
        deadline = time.monotonic() + (self.config.timeout_graceful_shutdown or 0) + GRACE + _MARGIN
        for process in self.processes:
            while process.process.is_alive():
                process.process.join(0.1)
                told_again = not set(_ENDING).isdisjoint(self.signal_queue)
                if told_again or time.monotonic() > deadline:
                    self.killed = True
                    logger.error("worker %s is killed before it has ended", process.pid)
                    process.process.kill()
                    process.process.join(GRACE)
            self.killed |= process.exitcode == ENDED_EARLY
