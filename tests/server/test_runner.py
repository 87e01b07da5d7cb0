"""Processes and signals: how the server begins, drains and ends. Always the real command, in
processes of its own.

Some begin as users begin them, others as forks (tests/forking.py).
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO, cast

import pytest
from uvicorn.supervisors import Multiprocess

from proxy.server import runner
from proxy.server.runner import GRACE, SHORT_TOKEN, _Supervisor, accept_waiting
from tests import serving
from tests.clock import PATIENCE, Clock, soon, until
from tests.ports import free_port
from tests.serving import Start, started
from tests.wire import (
    EVENTS,
    OK,
    Handler,
    Peer,
    Wire,
    ask,
    chunk,
    chunks,
    connection,
    read_head,
    replying,
    upstream,
)

GET = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
ROOT = Path(__file__).parents[2]


class Served:
    """The command, running."""

    def __init__(
        self, process: serving.Process, wire: Wire, said: bytes, rest: asyncio.Task[bytes]
    ) -> None:
        self.process = process
        self.rest = rest
        self.wire = wire
        self.said = said
        found = re.fullmatch(rb"offload-proxy listening on http://127\.0\.0\.1:(\d+)\n", said)
        self.port = int(found[1]) if found else 0

    def workers(self) -> set[int]:
        """Their process ids."""
        children = (
            Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        )
        found = set()
        for pid in children:
            with suppress(OSError):  # it has just ended
                if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.add(int(pid))
        return found

    async def ends(self) -> int:
        return await asyncio.to_thread(self.process.wait, PATIENCE)


def command(*flags: str, store: Path) -> Sequence[str]:
    return ("serve", f"--store={store}", "--log-format=full", *flags)


@asynccontextmanager
async def running(
    handler: Handler, folder: Path, *flags: str, start: Start | None = None
) -> AsyncIterator[Served]:
    async with upstream(handler) as wire, reading() as (errors, written):
        given = command("--port=0", f"--upstream={wire.url}/v1", *flags, store=folder / "store")
        with written:
            process = await asyncio.to_thread(
                start or serving.started, given, serving.clean_environment(), written, written
            )
        try:
            said = await soon(errors.readline())
            while said.startswith(b"warning: "):
                said = await soon(errors.readline())
            # Read on, or the pipe fills and the process waits for us.
            rest = asyncio.create_task(errors.read())
            yield Served(process, wire, said, rest)
            process.kill()
            await soon(rest)
        finally:
            process.kill()
            await asyncio.to_thread(process.wait)


@asynccontextmanager
async def reading() -> AsyncIterator[tuple[asyncio.StreamReader, BinaryIO]]:
    """A pipe's two ends."""
    read, write = os.pipe()
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read, "rb")
    )
    try:
        yield reader, os.fdopen(write, "wb")
    finally:
        transport.close()


def steps(go_on: asyncio.Event) -> Handler:
    """A stream whose second half comes when it is let go on."""

    async def handle(peer: Peer) -> None:
        await peer.request()
        await peer.send(EVENTS, chunk(b"one"))
        await go_on.wait()
        await peer.send(chunk(b"two"), chunk(b""))
        await peer.gone()

    return handle


async def refused(port: int) -> None:
    """Returns when nobody listens any more."""

    async def refuses() -> bool:
        try:
            async with connection(port) as (reader, writer):
                writer.write(GET)
                return not await reader.read(1)
        except ConnectionError:
            return True

    await until(refuses)


async def metrics(port: int, *lines: bytes) -> None:
    """Returns when the metrics have these lines."""

    async def there() -> bool:
        page = (await ask(port, b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")).body
        return all(line in page for line in lines)

    await until(there)


WORKERS = pytest.mark.parametrize(
    "flags",
    [
        pytest.param((), id="alone"),
        pytest.param(("--workers=2",), id="workers", marks=pytest.mark.sweep),
    ],
)


@WORKERS
async def test_ready_line_one_line_for_each_request_and_clean_end(
    tmp_path: Path, flags: tuple[str, ...]
) -> None:
    """The log has nothing of the server's own."""
    async with running(replying(OK), tmp_path, *flags, start=started) as served:
        assert served.port, served.said
        assert (await ask(served.port, GET)).body == b"ok"
        served.process.terminate()
        assert await served.ends() == 0
        [line] = (await served.rest).splitlines()
        assert b"proxy.request" in line


@asynccontextmanager
async def serving_with_log(
    log: BinaryIO, folder: Path, flags: Sequence[str]
) -> AsyncIterator[tuple[serving.Process, int]]:
    """The command and its port, with standard error going to `log`."""
    port = free_port()
    async with upstream(replying(OK)) as wire:
        given = command(
            f"--port={port}", f"--upstream={wire.url}/v1", *flags, store=folder / "store"
        )
        process = await asyncio.to_thread(
            serving.started, given, serving.clean_environment(), log, log
        )
        try:

            async def serves() -> bool:
                with suppress(OSError):
                    return (await ask(port, GET)).body == b"ok"
                return process.poll() is not None

            await until(serves)
            assert process.poll() is None
            yield process, port
        finally:
            process.kill()


def full_pipe() -> tuple[int, int]:
    """A pipe with room for one page, or less."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    with suppress(BlockingIOError):
        while os.write(write, bytes(512)):
            pass
    os.read(read, 4096)
    os.set_blocking(write, True)
    return read, write


FULL = pytest.mark.skipif(
    not Path("/dev/full").exists(), reason="this system has no device that is always full"
)


@pytest.mark.parametrize(
    ("flags", "disk"),
    [
        ((), False),
        pytest.param((), True, marks=FULL),
        pytest.param(("--workers=2",), False, marks=pytest.mark.sweep),
    ],
    ids=["unread pipe", "full disk", "unread pipe of workers"],
)
async def test_a_log_that_takes_nothing_keeps_nobody_from_serving(
    tmp_path: Path, flags: tuple[str, ...], disk: bool
) -> None:
    """A pipe to a program that hangs is full after the first lines."""
    read, write = (
        (os.open(os.devnull, os.O_RDONLY), os.open("/dev/full", os.O_WRONLY))
        if disk
        else full_pipe()
    )
    with os.fdopen(read, "rb"), os.fdopen(write, "wb") as log:
        async with serving_with_log(log, tmp_path, flags) as (process, port):
            for _ in range(3 if disk else 20):
                assert (await soon(ask(port, GET))).body == b"ok"
            process.terminate()
            assert await asyncio.to_thread(process.wait, PATIENCE) == 0


@pytest.mark.parametrize("flags", [(), ("--workers=2",)], ids=["alone", "workers"])
async def test_sigterm_drains(tmp_path: Path, flags: tuple[str, ...]) -> None:
    go_on = asyncio.Event()
    async with running(steps(go_on), tmp_path, *flags) as served:
        async with (
            connection(served.port) as (idle_reader, idle_writer),
            connection(served.port) as (reader, writer),
        ):
            idle_writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            await read_head(idle_reader)
            writer.write(GET)
            await read_head(reader)
            got = chunks(reader)
            assert await anext(got) == b"one"
            workers = served.workers()
            served.process.terminate()
            await refused(served.port)
            for worker in workers:  # as systemd and terminals do, beside the supervisor
                os.kill(worker, signal.SIGTERM)
            await soon(idle_reader.read())
            assert served.process.poll() is None
            go_on.set()
            assert [piece async for piece in got] == [b"two"]
        assert await served.ends() == 0


@WORKERS
async def test_draining_is_bounded(tmp_path: Path, flags: tuple[str, ...]) -> None:
    """A reply that has begun is cut off, and one that has not is an error."""

    async def handle(peer: Peer) -> None:
        if (await peer.request()).target.endswith(b"models"):
            await peer.send(EVENTS, chunk(b"one"))
        await peer.gone()

    async with running(handle, tmp_path, "--drain-timeout=1", *flags) as served:
        async with connection(served.port) as (reader, writer):
            writer.write(GET)
            await reader.readuntil(b"one")
            waiting = asyncio.create_task(ask(served.port, GET.replace(b"models", b"files")))
            await until(lambda: len(served.wire.requests) == 2)
            served.process.terminate()
            # The rest of the chunk, and then the end without the last one: cut off, and to be seen.
            assert await soon(reader.read()) == b"\r\n"
            reply = await soon(waiting)
        assert await served.ends() == 0
    assert (reply.status, reply.get(b"connection")) == (503, [b"close"])


STREAMS = {
    # what upstream begins with, what the client sends, and the event with which the stream has to
    # end
    "chat": (
        b'data: {"choices": [{"index": 0, "delta": {"content": "Hel"}}]}\n\n',
        b'{"model": "m", "stream": true, "messages": [{"role": "user", "content": "Hi"}]%b}',
        rb'data: {"error":{"message":"The proxy is shutting down",',
    ),
    "responses": (
        b'data: {"type": "response.created", "sequence_number": 0, "response": {"id": "r"}}\n\n',
        b'{"model": "m", "stream": true, "input": [{"role": "user", "content": "Hi"}]%b}',
        rb'event: error\ndata: {"type":"error","sequence_number":\d,"code":"overloaded","message":',
    ),
    "messages": (
        b'event: message_start\ndata: {"type": "message_start", "message": {"id": "m", "usage": {}}}\n\n',
        b'{"model": "m", "stream": true, "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]%b}',
        rb'event: error\ndata: {"type":"error","error":{"type":"overloaded_error",',
    ),
}
PATHS = {"chat": b"chat/completions"}
TOOLS = {
    "chat": b', "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]',
    "responses": b', "tools": [{"type": "function", "name": "f", "parameters": {}}]',
    "messages": b', "tools": [{"name": "f", "input_schema": {}}]',
}


def halves(peers: dict[bytes, bytes]) -> Handler:
    """Streams that begin, and then say no more."""

    async def handle(peer: Peer) -> None:
        asked = await peer.request()
        if asked.target in peers:
            await peer.send(EVENTS, chunk(peers[asked.target]))
            await peer.gone()
        await peer.send(OK)

    return handle


@pytest.mark.parametrize(
    ("flags", "twice"),
    [((), False), ((), True), pytest.param(("--workers=2",), False, marks=pytest.mark.sweep)],
    ids=["timeout", "second signal", "timeout of workers"],
)
async def test_streams_that_are_cut_off_end_with_an_error_event(
    tmp_path: Path, flags: tuple[str, ...], twice: bool
) -> None:
    """In each API, those that are relayed and those that the proxy writes itself."""
    asked = {
        (api, tools): PATHS.get(api, api.encode()) for api in STREAMS for tools in (False, True)
    }
    peers = {b"/v1/" + path: STREAMS[api][0] for (api, _), path in asked.items()}
    drain = "--drain-timeout=120" if twice else "--drain-timeout=1"
    async with running(halves(peers), tmp_path, drain, *flags) as served, AsyncExitStack() as held:
        streams = []
        for (api, tools), path in asked.items():
            body = STREAMS[api][1] % (TOOLS[api] if tools else b"")
            reader, writer = await held.enter_async_context(connection(served.port))
            writer.write(b"POST /v1/%b HTTP/1.1\r\nHost: localhost\r\n" % path)
            writer.write(b"Content-Length: %d\r\n\r\n%b" % (len(body), body))
            await read_head(reader)
            got = chunks(reader)
            streams.append((api, tools, got, await soon(anext(got))))
        assert any(b"read_file" in request.body for request in served.wire.requests)
        served.process.terminate()
        if twice:
            await refused(served.port)
            served.process.send_signal(signal.SIGINT)  # any will do
        for api, tools, got, beginning in streams:
            rest = beginning + b"".join([piece async for piece in got])
            assert re.search(STREAMS[api][2], rest), (api, tools, rest)
            assert rest.endswith(b"}\n\n")
        assert await served.ends() == int(twice)
        assert b"Traceback" not in await served.rest


HANGS = """
import threading, time
from proxy import stores
from proxy.server import access, runner
from proxy.stores import local
{patch}
"""
RELAYED = b'offload_requests_total{dialect="",kind="relay",status="200",tenant="default"} %d.0'
MONITOR = "--monitor-networks=127.0.0.0/8"
"""Lets the tests ask for deep health and metrics."""

STORE_HANGS = """
access.SECONDS = 0.2
stores.CLOSE_SECONDS = 0.2
local.Folder.get = lambda folder, key: time.sleep(3600)
"""
POLICIES_HANG = """
from proxy import policies
runner.GRACE = 0.5
look = policies._read

def hang(*given):
    if threading.current_thread() is threading.main_thread():
        return look(*given)
    open(__file__ + ".hangs", "w")
    time.sleep(3600)

policies._read = hang
"""
IMPATIENT = """
def alive(supervisor, keep=runner._Supervisor.keep_subprocess_alive):
    supervisor.config.timeout_worker_healthcheck = 1 if supervisor.announced else 10
    keep(supervisor)

runner._Supervisor.keep_subprocess_alive = alive
"""
"""Once all workers serve, they have one second to answer."""


@pytest.fixture
def hanging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes something hang in every process that is begun from now on."""

    def patched(patch: str) -> None:
        (tmp_path / "site").mkdir()
        file = tmp_path / "site" / "sitecustomize.py"
        file.write_text(HANGS.format(patch=patch))
        monkeypatch.setenv("PATCH", str(file))  # for forks; and for workers, which are spawned:
        monkeypatch.setenv("PYTHONPATH", f"{file.parent}:{ROOT}")

    return patched


@WORKERS
async def test_a_store_that_hangs_does_not_keep_the_process(
    tmp_path: Path, flags: tuple[str, ...], hanging: Callable[[str], None]
) -> None:
    hanging(STORE_HANGS)
    async with running(replying(OK), tmp_path, "--drain-timeout=1", MONITOR, *flags) as served:
        assert (
            await ask(served.port, b"GET /health?deep=1 HTTP/1.1\r\nHost: localhost\r\n\r\n")
        ).status == 503
        served.process.terminate()
        assert await served.ends() == 1
        assert b"the store's folder hangs: 1 operations have not ended" in await served.rest


async def test_a_thread_that_hangs_does_not_keep_the_process(
    tmp_path: Path, hanging: Callable[[str], None]
) -> None:
    hanging(POLICIES_HANG)
    async with running(replying(OK), tmp_path, "--drain-timeout=1") as served:
        await until((tmp_path / "site" / "sitecustomize.py.hangs").exists)
        served.process.terminate()
        assert await served.ends() == 1
        said = await served.rest
    assert b"the process did not end within 1.5 s and is cut off; its threads are in" in said
    assert b"sitecustomize.py" in said


@pytest.mark.sweep
async def test_a_second_signal_of_another_kind_ends_workers_at_once(tmp_path: Path) -> None:
    flags = ("--drain-timeout=120", "--workers=2")
    async with (
        running(steps(asyncio.Event()), tmp_path, *flags) as served,
        connection(served.port) as (reader, writer),
    ):
        writer.write(GET)
        await reader.readuntil(b"one")
        served.process.terminate()
        await refused(served.port)
        served.process.send_signal(signal.SIGINT)
        assert await served.ends() == 1
        assert b"Traceback" not in await served.rest


@WORKERS
async def test_sighup_reloads_policies(tmp_path: Path, flags: tuple[str, ...]) -> None:
    policies = tmp_path / "policies"
    policies.mkdir()
    async with upstream(replying(OK)) as other:
        (policies / "default.yaml").write_text("limits: {concurrent_requests: 5}\n")
        async with running(replying(OK), tmp_path, f"--policies={policies}", *flags) as served:
            assert (await ask(served.port, GET)).status == 200
            (policies / "default.yaml").write_text(f"upstream: {{base_url: '{other.url}'}}\n")
            served.process.send_signal(signal.SIGHUP)

            async def every_one_goes_there() -> bool:
                before = len(other.requests)
                for _ in range(8):
                    assert (await ask(served.port, GET)).status == 200
                return len(other.requests) == before + 8

            await until(every_one_goes_there)
            assert served.process.poll() is None


async def test_a_worker_that_is_stopped_keeps_neither_the_others_nor_the_end(
    tmp_path: Path, hanging: Callable[[str], None]
) -> None:
    hanging(IMPATIENT)
    async with running(replying(OK), tmp_path, "--workers=2", "--drain-timeout=1") as served:
        stopped, other = sorted(served.workers())  # the supervisor asks in this order
        os.kill(stopped, signal.SIGSTOP)
        os.kill(other, signal.SIGKILL)
        await until(lambda: served.workers() - {stopped, other})
        served.process.terminate()
        # A worker that hangs for long is killed and replaced before the end, and then all end well.
        ended, told = (
            await served.ends(),
            (await served.rest).count(b"is killed before it has ended"),
        )
        assert (ended, told) in ((1, 1), (0, 0))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")
async def test_workers_share_port_and_metrics_are_replaced_and_end_with_their_supervisor(
    tmp_path: Path,
) -> None:
    async with running(replying(OK), tmp_path, "--workers=2", MONITOR) as served:
        victim, other = served.workers()
        await asyncio.gather(*(ask(served.port, GET) for _ in range(40)))
        await metrics(served.port, RELAYED % 40)
        os.kill(victim, signal.SIGKILL)
        await until(lambda: not served.workers() <= {victim, other})
        assert (await ask(served.port, GET)).status == 200
        served.process.kill()
        await served.ends()
        await refused(served.port)


def test_a_supervisor_that_fails_ends_its_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter waits for them at its end, and they would serve on, deaf to the signals that
    it gets."""

    def fails(self: object) -> None:
        raise OSError("no space left")

    done: list[str] = []
    monkeypatch.setattr(Multiprocess, "run", fails)
    monkeypatch.setattr(_Supervisor, "terminate_all", lambda self: done.append("told"))
    monkeypatch.setattr(_Supervisor, "join_all", lambda self: done.append("ended"))
    with pytest.raises(OSError, match="no space left"):
        object.__new__(_Supervisor).run()
    assert done == ["told", "ended"]


class Hanging:
    """A worker that does not end unless it is killed, as uvicorn sees it."""

    pid = 1
    exitcode: int | None = None

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.process = self
        self.killed: float | None = None

    def is_alive(self) -> bool:
        return self.killed is None

    def join(self, seconds: float) -> None:
        self._clock.move(seconds)

    def kill(self) -> None:
        self.killed = self._clock()


@pytest.mark.parametrize("again", [[], [signal.SIGINT], [signal.SIGTERM], [signal.SIGHUP]])
def test_a_worker_that_hangs_has_the_time_to_log_it_unless_a_second_signal_comes(
    monkeypatch: pytest.MonkeyPatch, again: list[int]
) -> None:
    clock = Clock()
    monkeypatch.setattr(runner, "time", SimpleNamespace(monotonic=clock))
    supervisor = object.__new__(_Supervisor)
    supervisor.config = cast("Any", SimpleNamespace(timeout_graceful_shutdown=30))
    supervisor.signal_queue = again
    supervisor.processes = cast("Any", [worker := Hanging(clock)])
    supervisor.join_all()
    assert supervisor.killed and worker.killed is not None
    if again in ([], [signal.SIGHUP]):
        assert 30 + GRACE + 1 < worker.killed < 30 + GRACE + 10
    else:
        assert worker.killed < 1


def run(*flags: str, store: Path, **environment: str) -> tuple[int, str]:
    """Return the exit code, and what was said."""
    told = serving.clean_environment() | environment
    with (store / "said").open("w+b") as said:
        code = serving.started(command(*flags, store=store), told, said, said).wait(PATIENCE)
        said.seek(0)
        return code, said.read().decode()


async def test_connections_that_wait_when_the_listener_closes_are_served() -> None:
    """The kernel would reset them, and nginx sends no POST a second time."""

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        writer.close()

    listener = socket.create_server(("127.0.0.1", 0), backlog=16)
    server = await asyncio.start_server(greet, sock=listener)
    with ExitStack() as held:
        waiting = [
            held.enter_context(socket.create_connection(listener.getsockname())) for _ in range(8)
        ]
        await accept_waiting([listener])
        server.close()
        for one in waiting:
            one.setblocking(False)
            assert await soon(asyncio.get_running_loop().sock_recv(one, 5)) == b"hello"


def test_an_address_in_use_is_a_user_mistake(tmp_path: Path) -> None:
    long = "a" * SHORT_TOKEN  # long enough not to be warned of
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, said = run(f"--port={port}", store=tmp_path, OFFLOAD_ADMIN_TOKEN=long)
    assert code == 2
    assert said == (
        f"offload-proxy: cannot listen on 127.0.0.1:{port}: Address already in use; "
        "--port takes another\n"
    )


def test_a_foreign_address_is_a_user_mistake(tmp_path: Path) -> None:
    """And a token that can be guessed is warned of before."""
    code, said = run(
        "--port=0", "--host=nowhere.invalid", store=tmp_path, OFFLOAD_ADMIN_TOKEN="hunter2"
    )
    assert code == 2
    assert "\noffload-proxy: cannot listen on nowhere.invalid:0: " in said
    assert "OFFLOAD_ADMIN_TOKEN can be guessed" in said and "hunter2" not in said


@pytest.mark.parametrize("host", ["\xe9..x", "x" * 64 + "\xe9"])
def test_a_name_that_is_no_host_is_a_user_mistake(tmp_path: Path, host: str) -> None:
    code, said = run("--port=0", f"--host={host}", store=tmp_path)
    assert code == 2
    assert said == f"offload-proxy: cannot listen on {host}:0: expected a host name or an address\n"


def test_invalid_policies_are_a_user_mistake(tmp_path: Path) -> None:
    (tmp_path / "policies").mkdir()
    (tmp_path / "policies" / "default.yaml").write_text("offload: {mode: never}\n")
    code, said = run("--port=0", f"--policies={tmp_path / 'policies'}", store=tmp_path)
    assert code == 2
    assert "default.yaml" in said and "Traceback" not in said and "listening" not in said


@pytest.mark.parametrize("host", ["::1", "[::1]", "::"])
async def test_an_ipv6_address_is_served(host: str, tmp_path: Path) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    async with running(
        replying(OK), tmp_path, f"--host={host}", "--monitor-networks=127.0.0.1"
    ) as served:
        found = re.fullmatch(rb"offload-proxy listening on http://\[(\S+)\]:(\d+)\n", served.said)
        assert found and found[1].decode() == host.strip("[]")
        if host == "::":  # all addresses of IPv4, too, and those with all their rules
            for name, status in ((b"localhost", 200), (b"evil.example", 403)):
                asked = b"GET /metrics HTTP/1.1\r\nHost: %b\r\nConnection: close\r\n\r\n" % name
                assert (await ask(int(found[2]), asked)).status == status
