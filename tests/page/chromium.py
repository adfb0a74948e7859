"""A headless Chromium, driven by its DevTools protocol over a WebSocket: what a reader does and sees."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import re
import shutil
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome")
# No GPU, no sandbox within a container, and nothing asked of anybody but the server under test.
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--mute-audio"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-extensions", "--disable-dev-shm-usage", "--remote-debugging-port=0", "about:blank"),
)
DEADLINE_S = 60.0


def find_chromium() -> str | None:
    """The program, where there is one."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Tab:
    """A page that is open. `problems` is what its console has complained of, errors of scripts included."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket, self._numbers = socket, itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self.problems: list[str] = []
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for message in self._socket:
            told = message.json()
            if "id" in told:
                self._answers.pop(told["id"]).set_result(told)
            elif told["method"] == "Runtime.exceptionThrown":
                details = told["params"]["exceptionDetails"]
                self.problems.append(details.get("exception", {}).get("description", details["text"]))
            elif told["method"] == "Log.entryAdded" and told["params"]["entry"]["level"] == "error":
                entry = told["params"]["entry"]
                self.problems.append(f"{entry['text']} {entry.get('url', '')}")
            elif told["method"] == "Runtime.consoleAPICalled" and told["params"]["type"] == "error":
                self.problems.append(str(told["params"]["args"]))

    async def send(self, method: str, **params: Any) -> Any:
        """A command of the protocol, and its result."""
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        told = await asyncio.wait_for(answer, DEADLINE_S)
        if "error" in told:
            raise RuntimeError(f"{method}: {told['error']['message']}")
        return told["result"]

    async def run(self, script: str) -> Any:
        """The value of an expression; a promise is waited for."""
        told = await self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in told:
            raise RuntimeError(told["exceptionDetails"]["exception"].get("description", script))
        return told["result"].get("value")

    async def until(self, script: str, seconds: float = DEADLINE_S) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if await self.run(f"!!({script})"):
                return
            await asyncio.sleep(0.05)
        raise TimeoutError(f"not within {seconds:g} s: {script}; the page complains: {self.problems}")

    async def open(self, address: str, width: int = 1440, height: int = 900, dark: bool = False) -> None:
        """Go to a page, on a screen of that size."""
        for domain in ("Runtime", "Log", "Page", "DOM"):
            await self.send(f"{domain}.enable")
        await self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.send("Emulation.setEmulatedMedia", features=[scheme])
        await self.send("Page.navigate", url=address)

    async def click(self, selector: str) -> None:
        """A mouse click in the middle of what a selector finds."""
        box = await self.run(
            f"(() => {{ const e = document.querySelector({selector!r}); "
            "e.scrollIntoView({block: 'center'}); const b = e.getBoundingClientRect(); "
            "return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        await self.click_at(*box)

    async def click_at(self, x: float, y: float) -> None:
        for kind in ("mousePressed", "mouseReleased"):
            at = {"type": kind, "x": x, "y": y, "button": "left", "clickCount": 1}
            await self.send("Input.dispatchMouseEvent", **at)

    async def type(self, text: str) -> None:
        await self.send("Input.insertText", text=text)

    async def press(self, key: str) -> None:
        """A key of the keyboard, as `event.key` names it; a letter is its own text."""
        code = {"Enter": 13, " ": 32, "ArrowLeft": 37, "ArrowRight": 39, "ArrowDown": 40, "Escape": 27}
        text = {"Enter": "\r", " ": " "}.get(key, key if len(key) == 1 else "")
        event = {"key": key, "windowsVirtualKeyCode": code.get(key, ord(key[0].upper())), "text": text}
        await self.send("Input.dispatchKeyEvent", type="keyDown", **event)
        await self.send("Input.dispatchKeyEvent", type="keyUp", **{**event, "text": ""})

    async def choose_file(self, selector: str, path: Path) -> None:
        root = (await self.send("DOM.getDocument"))["root"]["nodeId"]
        node = (await self.send("DOM.querySelector", nodeId=root, selector=selector))["nodeId"]
        await self.send("DOM.setFileInputFiles", nodeId=node, files=[str(path)])

    async def picture(self, path: Path, kind: str = "png", whole: bool = False) -> None:
        """A screenshot: png, or webp of good quality."""
        quality = {} if kind == "png" else {"quality": 85}
        shot = await self.send("Page.captureScreenshot", format=kind, captureBeyondViewport=whole, **quality)
        path.write_bytes(base64.b64decode(shot["data"]))  # noqa: ASYNC240

    async def close(self) -> None:
        await self._socket.close()
        await self._reading


@contextlib.asynccontextmanager
async def chromium(*flags: str) -> AsyncIterator[Tab]:
    """A browser with one tab; it is ended, and its profile is gone, on leaving."""
    program = find_chromium()
    assert program is not None, "there is no Chromium"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            program,
            f"--user-data-dir={profile}",
            *flags,
            *FLAGS,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        assert process.stderr is not None
        try:
            async with asyncio.timeout(DEADLINE_S):
                while not (found := re.search(rb"ws://\S+?:(\d+)/", await process.stderr.readline())):
                    assert process.returncode is None, "Chromium has ended"
            drain = asyncio.create_task(process.stderr.read())
            base = f"http://127.0.0.1:{int(found[1])}"
            async with aiohttp.ClientSession() as session:
                async with session.get(f"{base}/json") as answer:
                    tabs = await answer.json()
                address = next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page")
                async with session.ws_connect(address, max_msg_size=0) as socket:
                    tab = Tab(socket)
                    try:
                        yield tab
                    finally:
                        await tab.close()
            process.terminate()
            await asyncio.wait_for(process.wait(), DEADLINE_S)
            await drain
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
