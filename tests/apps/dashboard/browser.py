"""Drives Debian's headless Chromium over the DevTools protocol, as far as the dashboard's tests
need it."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Self

import aiohttp

from tests.clock import PATIENCE

BINARY = shutil.which("chromium-headless-shell") or shutil.which("chromium")
MISSING = "needs Debian's chromium-headless-shell, or chromium"

AXE = Path(__file__).parent / "axe" / "node_modules" / "axe-core" / "axe.min.js"

SHOWN = "document.getElementById('content')?.dataset.shown"
"""Which page of the dashboard is complete."""

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-port=0",
    "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--hide-scrollbars", "--force-color-profile=srgb", "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
)  # fmt: skip


class Navigated(Exception):
    """The page was left before it answered."""


class Page:
    """A page of the browser, with everything that it asked for and complained about."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._reading = asyncio.create_task(self._read())
        self.asked: list[str] = []
        """The addresses of all requests."""
        self.complaints: list[str] = []
        """Errors and warnings of the console, and exceptions."""

    async def start(self) -> Self:
        for domain in ("Page", "Runtime", "Network", "Log"):
            await self.call(f"{domain}.enable")
        return self

    async def call(self, method: str, **parameters: Any) -> Any:
        number = next(self._ids)
        self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_str(
            json.dumps({"id": number, "method": method, "params": parameters})
        )
        return await asyncio.wait_for(self._answers[number], PATIENCE)

    async def evaluate(self, expression: str) -> Any:
        """Return the value of an expression in the page."""
        answer = await self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def until(self, expression: str) -> Any:
        """Wait for an expression to become true, and return its value."""
        deadline = asyncio.get_running_loop().time() + PATIENCE
        while True:
            with suppress(Navigated):
                if value := await self.evaluate(expression):
                    return value
            assert asyncio.get_running_loop().time() < deadline, (
                f"{expression} in {await self.text()}"
            )
            await asyncio.sleep(0.05)

    async def open(self, address: str, token: str = "") -> None:
        """Open a page of the dashboard. With the admin token, log in first."""
        if token:
            await self.call("Page.navigate", url=f"{address}login")
            await self.until("document.getElementById('token') !== null")
            await self.enter("token", token)
            await self.until(f"{SHOWN} !== undefined")
        await self.call("Page.navigate", url=address)
        await self.until(
            f"location.href.startsWith({json.dumps(address)}) && {SHOWN} !== undefined"
        )

    async def show(self, place: str) -> str:
        """Go to a page of the dashboard, and return its text once it is complete."""
        place = json.dumps(place)
        await self.evaluate(
            f"location.hash === {place} || (delete {SHOWN}, location.hash = {place})"
        )
        await self.until(f"{SHOWN} === {place}")
        return await self.text()

    async def enter(self, field: str, value: str) -> None:
        """Fill a field of a form and send it."""
        field = f"document.getElementById({json.dumps(field)})"
        await self.evaluate(f"{field}.value = {json.dumps(value)}, {field}.form.requestSubmit()")

    async def text(self) -> str:
        text: str = await self.evaluate("document.body?.innerText ?? ''")
        return text

    async def faults(self) -> list[str]:
        """Return what axe-core finds wrong with the page; nothing where it is not installed (`make
        test-all`)."""
        if not AXE.exists():
            return []
        if not await self.evaluate("typeof axe === 'object'"):
            await self.evaluate(await asyncio.to_thread(AXE.read_text, "utf-8"))
        found = await self.evaluate(
            "axe.run(document).then((found) => JSON.stringify(found.violations))"
        )
        return [
            f"{one['id']}: {node['html'][:200]}: {node['failureSummary']}"
            for one in json.loads(found)
            for node in one["nodes"]
        ]

    async def size(self, width: int, height: int = 900) -> None:
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    async def scheme(self, name: str) -> None:
        """Prefer `light` or `dark`."""
        await self.call(
            "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}]
        )

    async def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            text = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            code = {"Tab": 9, "Enter": 13}[key]
            await self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=code,
                **text,
            )

    async def screenshot(self) -> bytes:
        shot = await self.call("Page.captureScreenshot", format="png")
        return base64.b64decode(shot["data"])

    async def close(self) -> None:
        self._reading.cancel()
        await self._socket.close()

    async def _read(self) -> None:
        async for message in self._socket:
            said = json.loads(message.data)
            if (waiting := self._answers.pop(said.get("id", 0), None)) is not None:
                if "error" in said:
                    waiting.set_exception(Navigated(said["error"]))
                else:
                    waiting.set_result(said["result"])
            else:
                self._hear(said["method"], said["params"])

    def _hear(self, method: str, said: dict[str, Any]) -> None:
        match method:
            case "Network.requestWillBeSent":
                self.asked.append(said["request"]["url"])
            case "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(said["exceptionDetails"]))
            case "Log.entryAdded":
                self.complaints.append(json.dumps(said["entry"]))
            case "Runtime.consoleAPICalled" if said["type"] in ("error", "warning", "assert"):
                self.complaints.append(json.dumps(said["args"]))


@asynccontextmanager
async def browser(folder: Path) -> AsyncIterator[Page]:
    """Run Chromium with a profile in `folder`, and yield its one page."""
    assert BINARY
    command = [BINARY, *FLAGS, f"--user-data-dir={folder}", "about:blank"]
    nowhere = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(
        *command, stdout=nowhere, stderr=nowhere, start_new_session=True
    )
    try:
        port = await _port(folder / "DevToolsActivePort")
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as reply:
                [target] = [one for one in await reply.json() if one["type"] == "page"]
            async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                page = await Page(socket).start()
                yield page
                await page.close()
    finally:
        # the command may be a script that has started the browser
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def _port(told: Path) -> str:
    """Return the port that the browser has written into this file."""
    deadline = asyncio.get_running_loop().time() + PATIENCE
    while not (lines := await asyncio.to_thread(_lines, told)):
        assert asyncio.get_running_loop().time() < deadline, "the browser does not start"
        await asyncio.sleep(0.05)
    return lines[0]


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []
