"""A small HTTP/1.1 server on asyncio whose answers a test can script. Lives on one event loop."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from vllm_cp.testing._http_pages import Reply

__all__ = ["HttpServer", "Script", "SeenRequest"]

_ANY = "*"


@dataclass(slots=True, kw_only=True)
class SeenRequest:
    """One request as the server saw it. Only ``status`` changes afterwards, once, when the answer is sent."""

    method: str
    #: As asked for, prefix included.
    path: str
    #: Names in lower case.
    headers: Mapping[str, str]
    body: bytes
    #: When it arrived, seconds on the clock of ``time.monotonic()``.
    at_s: float
    #: ``None`` while in flight, and for ever when no answer was sent.
    status: int | None = None


@dataclass(slots=True)
class Script:
    """What happens to a request instead of its answer, or before it."""

    reply: Reply | None = None
    delay_s: float = 0.0
    #: How often; ``None``: until it is taken back.
    times: int | None = None


class HttpServer:
    """Accepts connections and answers requests; what to answer is somebody else's to say."""

    def __init__(self, answer: Callable[[SeenRequest], Reply], tls: Any) -> None:
        """``tls``: files of the server side, ``TlsFiles`` or alike; ``None`` is plaintext."""
        self.calls: list[SeenRequest] = []
        self._called = asyncio.Condition()
        self._answer = answer
        self._tls = tls
        self._scripts: dict[str, list[Script]] = {}
        self._server: asyncio.Server | None = None
        self._busy: set[asyncio.Task[None]] = set()

    async def open(self, host: str, port: int) -> None:
        """Listen. Raises OSError when the port is taken."""
        if self._server is None:
            context = _context(self._tls) if self._tls is not None else None
            self._server = await asyncio.start_server(self._serve, host, port, ssl=context)

    async def shut(self) -> None:
        """Break all connections and stop listening."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
        busy = list(self._busy)
        for task in busy:
            task.cancel()
        await asyncio.gather(*busy, return_exceptions=True)

    def script(self, path: str, script: Script) -> None:
        """Add to what happens to requests of that path; ``*`` is any, a prefix does not matter."""
        self._scripts.setdefault(_bare(path), []).append(script)

    def forget(self, path: str | None) -> None:
        """Take back what was scripted for a path, or for all."""
        if path is None:
            self._scripts.clear()
        else:
            self._scripts.pop(_bare(path), None)

    async def wait_for_call(self, path: str, count: int, timeout_s: float) -> list[SeenRequest]:
        """Wait until that path was asked for ``count`` times; those requests. Raises TimeoutError."""

        def seen() -> list[SeenRequest]:
            return [call for call in self.calls if path == _ANY or _bare(call.path) == _bare(path)]

        async with self._called:
            try:
                await asyncio.wait_for(self._called.wait_for(lambda: len(seen()) >= count), timeout_s)
            except asyncio.TimeoutError:
                raise TimeoutError(f"{path} was asked for {len(seen())} times, not {count}") from None
        return seen()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task: Any = asyncio.current_task()
        self._busy.add(task)
        try:
            while (request := await _read(reader)) is not None:
                self.calls.append(request)
                async with self._called:
                    self._called.notify_all()
                script = self._scripted(request.path)
                if script.delay_s:
                    await asyncio.sleep(script.delay_s)
                reply = script.reply or self._answer(request)
                request.status = reply.status
                _write(writer, reply)
                await writer.drain()
        except ValueError:
            _write(writer, Reply(400, b"Invalid HTTP request received.", "text/plain"))
            with suppress(OSError):
                await writer.drain()
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the client or the server is gone
        finally:
            self._busy.discard(task)
            writer.transport.abort()

    def _scripted(self, path: str) -> Script:
        whole = Script()
        for key in (_bare(path), _ANY):
            for script in self._scripts.get(key, []):
                if script.times == 0:
                    continue
                script.times = None if script.times is None else script.times - 1
                whole.reply = whole.reply or script.reply
                whole.delay_s += script.delay_s
        return whole


def _bare(path: str) -> str:
    return path.removeprefix("/v1")


async def _read(reader: asyncio.StreamReader) -> SeenRequest | None:
    """One request; ``None`` when the client has closed. Raises ValueError when this is no HTTP."""
    first = await reader.read(1)
    if not first:
        return None
    # Judged by one byte, as the next line end of something else may never come.
    parts = (first + await reader.readline()).decode("latin-1").split() if first.isalpha() else []
    if len(parts) != 3:
        raise ValueError("no HTTP request")
    headers: dict[str, str] = {}
    while (raw := (await reader.readline()).decode("latin-1").strip()) != "":
        name, _, value = raw.partition(":")
        headers[name.lower()] = value.strip()
    length = headers.get("content-length", "0")
    body = await reader.readexactly(int(length)) if length.isdecimal() else b""
    path = parts[1].partition("?")[0]
    return SeenRequest(method=parts[0], path=path, headers=headers, body=body, at_s=time.monotonic())


def _write(writer: asyncio.StreamWriter, reply: Reply) -> None:
    kind = f"content-type: {reply.content_type}\r\n" if reply.content_type else ""
    phrase = HTTPStatus(reply.status).phrase if reply.status in HTTPStatus._value2member_map_ else ""
    head = f"HTTP/1.1 {reply.status} {phrase}\r\n{kind}content-length: {len(reply.body)}\r\n\r\n"
    writer.write(head.encode() + reply.body)


def _context(tls: Any) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tls.cert, tls.key)
    if getattr(tls, "require_client_cert", False):
        context.load_verify_locations(tls.ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context
