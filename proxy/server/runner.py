"""Runs the application under uvicorn: one process or several, and how they end.

SIGTERM and SIGINT drain: nobody new is let in, requests under way go on for the drain timeout at most. A grace later
the process ends, whatever hangs in it, with 1 and a log line that names it. A second signal ends at once. SIGHUP
reloads the policies, in every process.
"""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn
from uvicorn.supervisors import Multiprocess

from proxy.errors import UserMistake
from proxy.server.app import App, build
from proxy.server.inbound import Inbound
from proxy.server.protocol import ExactProtocol
from proxy.telemetry import logs
from proxy.telemetry.metrics import prepare_multiprocess

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from proxy.settings import Settings

logger = logging.getLogger(__name__)

_BACKLOG = 2048
"""Connections that may wait to be accepted, as uvicorn's own default."""

_HEARTBEAT = 30
"""Seconds within which a worker has to answer its supervisor, or is replaced. Generous: a replaced worker takes its
requests with it."""

_GRACE = 5.0
"""Seconds that a process gets on top of the drain timeout to close its store and its connections."""

_MARGIN = 2.0
"""Seconds more until the supervisor kills a worker, which can itself say best what hangs in it."""

_IDLE = os.path.join("concurrent", "futures", "thread.py")
"""Where a pool's thread is that has nothing to do."""

OK, ENDED_EARLY = 0, 1

logger = logging.getLogger(__name__)


def serve(settings: Settings) -> int:
    """Listen and serve until a signal says to stop. The exit code: 0, or 1 where a second signal cut requests off.

    Where something hangs at the end, it does not return: the process ends with 1.

    Raises UserMistake for what is wrong with the settings or the policies, or where the address cannot be had.
    """
    _prepare(settings)
    app = build(settings)
    with _listener(settings.host, settings.port) as listener:
        if settings.workers == 1:
            return _serve_alone(settings, app, listener)
        with prepare_multiprocess():
            return _serve_together(settings, listener)


def _serve_alone(settings: Settings, app: App, listener: socket.socket) -> int:
    server = _Server(config(settings, _Ending(app, settings)))
    server.run([listener])
    return ENDED_EARLY if server.force_exit else OK


def _serve_together(settings: Settings, listener: socket.socket) -> int:
    """Workers are spawned, not forked: each builds its application anew."""
    shared = config(settings, partial(_worker, settings))
    shared.factory = True
    shared.workers = settings.workers
    supervisor = _Supervisor(shared, [listener])
    supervisor.run()
    return ENDED_EARLY if supervisor.killed else OK


def _worker(settings: Settings) -> ASGIApp:
    """A worker's application."""
    _prepare(settings)
    threading.Thread(target=_end_with_supervisor, daemon=True).start()
    return _Ending(build(settings), settings)


def _end_with_supervisor() -> None:
    """Drain when the supervisor was killed: nobody else would tell this worker to, and it has the port."""
    if supervisor := multiprocessing.parent_process():
        supervisor.join()
        os.kill(os.getpid(), signal.SIGTERM)


def _prepare(settings: Settings) -> None:
    logs.configure(settings.log_format)
    # What uvicorn says at INFO is that it starts and stops. And that a reply was left unfinished it says as of a bug,
    # but it is how we cut off a stream that upstream broke; the request's own line has the reason.
    logger = logging.getLogger("uvicorn.error")
    logger.setLevel(logging.WARNING)
    logger.addFilter(lambda record: record.msg != "ASGI callable returned without completing response.")
    if hasattr(signal, "SIGHUP"):
        # Until the application listens to it: by default it would end the process.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)


def config(settings: Settings, app: object) -> uvicorn.Config:
    """uvicorn as it has to be for the relay to be exact; `app` is the application, or makes it."""
    return uvicorn.Config(
        app,  # type: ignore[arg-type]
        http=partial(ExactProtocol, inbound=Inbound(settings, logs.Limited(logger))),  # type: ignore[arg-type]
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,
        backlog=_BACKLOG,
        timeout_graceful_shutdown=math.ceil(settings.drain_timeout),
        timeout_worker_healthcheck=_HEARTBEAT,
    )


def _listener(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        reason = str(error.strerror).partition(" (while")[0]  # it would name the address once more
        raise UserMistake(f"cannot listen on {_address(host, port)}: {reason}") from error
    listener.set_inheritable(True)
    return listener


def _announce(listener: socket.socket) -> None:
    host, port, *_ = listener.getsockname()
    sys.stderr.write(f"offload-proxy listening on http://{_address(host, port)}\n")
    sys.stderr.flush()


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class _Ending:
    """The application of a process that ends in time, whatever hangs in it."""

    def __init__(self, app: App, settings: Settings) -> None:
        self._app = app
        self._seconds = math.ceil(settings.drain_timeout) + _GRACE
        self._begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            return await self._app(scope, receive, send)

        async def sent(message: Message) -> None:
            if message["type"] == "lifespan.shutdown.complete" and self._app.hangs:
                self._end()  # the store has said what it is
            await send(message)

        self._listen()
        await self._app(scope, receive, sent)

    def _listen(self) -> None:
        """Hear of the signals that end the process, before the server does, whose handlers stand by now."""
        for number in (signal.SIGINT, signal.SIGTERM):
            if callable(before := signal.getsignal(number)):
                signal.signal(number, partial(self._told, before))

    def _told(self, server: Callable[[int, FrameType | None], object], number: int, frame: FrameType | None) -> None:
        seconds = _GRACE if self._begun else self._seconds
        if not self._begun:
            self._begun = True
            self._app.ending()
        threading.Thread(target=self._last_resort, args=(seconds,), name="last-resort", daemon=True).start()
        server(number, frame)

    def _last_resort(self, seconds: float) -> None:
        time.sleep(seconds)
        logger.error("the process did not end within %g s and is cut off; it hangs in: %s", seconds, _busy())
        self._end()

    def _end(self) -> None:
        """At once: the interpreter would wait for threads that never end."""
        with suppress(Exception):
            self._app.flush()
        logging.shutdown()
        os._exit(ENDED_EARLY)


def _busy() -> str:
    """Where the threads are that keep the process from ending: names of functions, and nothing that they work on."""
    frames = sys._current_frames()
    held = ((thread, frames.get(thread.ident or 0)) for thread in threading.enumerate() if not thread.daemon)
    places = [
        f"{thread.name}, {frame.f_code.co_qualname} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"
        for thread, frame in held
        if frame is not None and not frame.f_code.co_filename.endswith(_IDLE)
    ]
    return "; ".join(places)


class _Server(uvicorn.Server):
    """One process, that says when it is ready and whose second signal ends it whatever the two are."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and sockets:
            _announce(sockets[0])

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # Not remembered as uvicorn does, which raises the signals again at the end: the exit code is ours to give.
        self.force_exit = self.should_exit
        self.should_exit = True


class _Supervisor(Multiprocess):
    """Several workers on one listening socket."""

    killed = False

    def init_processes(self) -> None:
        super().init_processes()
        if all(process.wait_until_ready(_HEARTBEAT, self.should_exit) for process in self.processes):
            _announce(self.sockets[0])

    def handle_hup(self) -> None:
        """Policies reload in place; uvicorn would replace the workers."""
        for process in self.processes:
            if process.pid is not None:
                os.kill(process.pid, signal.SIGHUP)

    def terminate_all(self) -> None:
        # Ours is a copy of the workers' socket, and as long as it is open connections are taken that nobody serves.
        for listener in self.sockets:
            listener.close()
        super().terminate_all()

    def join_all(self) -> None:
        deadline = time.monotonic() + (self.config.timeout_graceful_shutdown or 0) + _GRACE + _MARGIN
        for process in self.processes:
            while process.process.is_alive():
                process.process.join(0.1)
                if self._told_again() or time.monotonic() > deadline:
                    self.killed = True
                    logger.error("worker %s is killed before it has ended", process.pid)
                    process.process.kill()
            self.killed |= process.exitcode == ENDED_EARLY

    def _told_again(self) -> bool:
        return not {signal.SIGINT, signal.SIGTERM}.isdisjoint(self.signal_queue)
