"""Runs a client as a process that reaches one port of this machine and nothing else."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from tests.serving import PLAIN

LIMIT = 300
"""Seconds until a run is killed; the slowest client takes a twentieth of it on an idle machine."""


def answers(url: str) -> bool:
    """Whether a server is there."""
    try:
        return not httpx.get(url, verify=PLAIN, trust_env=False).is_server_error
    except httpx.TransportError:
        return False


async def run(
    command: Sequence[str | Path],
    port: int,
    workspace: Path,
    settings: Mapping[str, str],
    unreachable: Collection[str] = (),
    limit: int = LIMIT,
) -> str:
    """The command's output; it has to succeed. For the rest see `ended`."""
    code, output, errors = await ended(command, port, workspace, settings, unreachable, limit)
    assert code == 0, f"It ended with {code}.\n{errors}\n{output}"
    return output


async def ended(
    command: Sequence[str | Path],
    port: int,
    workspace: Path,
    settings: Mapping[str, str],
    unreachable: Collection[str] = (),
    limit: int = LIMIT,
) -> tuple[int | None, str, str]:
    """The command's exit status, output and errors. It gets nothing of our environment but PATH,
    and can call nothing but `port`.

    It may ask for hosts in `unreachable`, and gets no answer.
    """
    async with nobody(unreachable) as nowhere:
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd=workspace,
            env={**_environment(workspace.parent / "home", port, nowhere), **settings},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        output, errors = await _finished(process, limit)
    return process.returncode, output, errors


def _environment(home: Path, port: int, nowhere: str) -> dict[str, str]:
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "OPENAI_BASE_URL": f"http://127.0.0.1:{port}/v1",
        "OPENAI_API_KEY": "a-key",
        "ANTHROPIC_BASE_URL": f"http://127.0.0.1:{port}",
        "ANTHROPIC_API_KEY": "a-key",
        "HTTP_PROXY": nowhere,
        "HTTPS_PROXY": nowhere,
        "NO_PROXY": "127.0.0.1",
    }


async def _finished(process: asyncio.subprocess.Process, limit: int) -> tuple[str, str]:
    """Standard output and error. A run that takes longer than `limit` seconds is killed with its
    children. Raises AssertionError then."""
    ends = asyncio.create_task(process.communicate())
    finished, _ = await asyncio.wait([ends], timeout=limit)
    if not finished:
        os.killpg(process.pid, signal.SIGKILL)
    output, errors = await ends
    assert finished, f"It was killed after {limit} s.\n{errors.decode()}\n{output.decode()}"
    return output.decode(), errors.decode()


@asynccontextmanager
async def nobody(unreachable: Collection[str] = ()) -> AsyncIterator[str]:
    """The address of an outgoing proxy. The test fails if anything asks it for another host than
    `unreachable`."""
    callers: list[bytes] = []

    async def turned_away(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        callers.append(await reader.readline())
        writer.close()

    server = await asyncio.start_server(turned_away, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    unexpected = {
        line for line in callers if not any(host.encode() in line for host in unreachable)
    }
    assert not unexpected, unexpected
