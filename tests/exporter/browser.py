"""A headless Chromium, driven over its debugging port."""

from __future__ import annotations

import asyncio
import re
import shutil
import tempfile
import time
from itertools import count
from types import TracebackType
from typing import Any

import aiohttp

#: Debian's name, and others'.
_NAMES = ("chromium", "chromium-browser", "google-chrome")
BINARY = next((found for name in _NAMES if (found := shutil.which(name))), None)
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-port=0",
)
_WITHIN_S = 30.0


class BrowserError(Exception):
    """A command failed."""


class Browser:
    """``async with Browser() as browser``: one tab."""

    def __init__(self) -> None:
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self._process: asyncio.subprocess.Process | None = None
        self._session: aiohttp.ClientSession | None = None
        self._tab: aiohttp.ClientWebSocketResponse | None = None
        self._numbers = count(1)
        #: What the page complained of.
        self.complaints: list[str] = []

    async def __aenter__(self) -> Browser:
        assert BINARY is not None
        self._process = await asyncio.create_subprocess_exec(
            BINARY,
            *_FLAGS,
            f"--user-data-dir={self._profile.name}",
            "about:blank",
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            port = await asyncio.wait_for(self._port(), _WITHIN_S)
            self._session = aiohttp.ClientSession()
            async with self._session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                tabs = await answer.json()
            url = next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page")
            self._tab = await self._session.ws_connect(url, max_msg_size=0)
            for domain in ("Page", "Runtime", "Log"):
                await self.send(f"{domain}.enable")
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._close()

    async def _close(self) -> None:
        if self._tab is not None:
            await self._tab.close()
        if self._session is not None:
            await self._session.close()
        if self._process is not None:
            if self._process.returncode is None:
                self._process.kill()
            await self._process.communicate()
        self._profile.cleanup()

    async def _port(self) -> int:
        assert self._process is not None
        assert self._process.stderr is not None
        async for line in self._process.stderr:
            if found := re.search(rb"DevTools listening on ws://[^:]+:(\d+)/", line):
                return int(found[1])
        raise RuntimeError("Chromium ended without a debugging port")

    async def send(self, method: str, **params: Any) -> dict[str, Any]:
        """One command; its result."""
        assert self._tab is not None
        number = next(self._numbers)
        await self._tab.send_json({"id": number, "method": method, "params": params})
        while True:
            message = await self._tab.receive_json(timeout=_WITHIN_S)
            if message.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.complaints.append(str(message["params"]))
            if message.get("id") == number:
                if "error" in message:
                    raise BrowserError(message["error"]["message"])
                result: dict[str, Any] = message["result"]
                return result

    async def open(self, url: str, *, width: int = 1400, height: int = 900, script: bool = True) -> None:
        """Load a page."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        await self.send("Emulation.setDeviceMetricsOverride", **size)
        await self.send("Emulation.setScriptExecutionDisabled", value=not script)
        await self.send("Page.navigate", url=url)

    async def value(self, expression: str) -> Any:
        """What an expression is on the page; ``None`` while another page takes its place."""
        try:
            result = await self.send("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        except BrowserError as error:
            if "navigated" not in str(error) and "context" not in str(error):
                raise
            return None
        return result["result"].get("value")

    async def until(self, expression: str, what: str) -> None:
        """Wait until an expression is true on the page."""

        deadline = time.monotonic() + _WITHIN_S
        while not await self.value(expression):
            if time.monotonic() > deadline:
                raise AssertionError(f"not seen: {what}; on the page: {await self.value('document.body.innerText')}")
            # The page draws in its own time; each question is a round trip to it.
            await self.value("new Promise(done => setTimeout(done, 50))")
