"""The door of the daemon's HTTP server: TLS, passwords, headers and limits, the same for every page.

What the web config file asks for holds for all paths, ``/-/healthy`` included, as with the exporter-toolkit: a probe of
Kubernetes then needs the credentials too. The file and what it names are read again when they change; a new one that
is wrong changes nothing and is told. TLS may come and go that way, for the daemon keeps the listening sockets itself.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from vllm_cp import ConfigError
from vllm_cp_exporter.basicauth import BasicAuth
from vllm_cp_exporter.webfile import WebFile, read_web_file

__all__ = ["Door", "Limits"]

log = logging.getLogger("vllm_cp_exporter.web")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
#: Files at one moment.
_Stamp = tuple[tuple[int, int, int] | None, ...]
#: They are how somebody finds out that the daemon is busy.
_ALWAYS = ("/-/healthy", "/-/ready")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one client, or all of them, may ask of the daemon. Times in seconds."""

    #: Requests that are being answered.
    requests: int = 256
    #: Open connections.
    connections: int = 1024
    #: Until the first request of a connection is there whole, TLS included.
    headers_s: float = 10.0
    #: For which an answer may be stuck because nobody reads it.
    reading_s: float = 30.0
    #: For which a connection may be idle between two requests; Prometheus comes every minute.
    idle_s: float = 90.0
    #: Characters of a path and query.
    target: int = 4096
    #: Between two looks at the web config file.
    look_s: float = 1.0


class Door:
    """Listens, and looks at every request before the pages do."""

    def __init__(self, path: Path | None = None, *, limits: Limits | None = None) -> None:
        """``path``: the web config file. Raises ConfigError."""
        self.limits = limits or Limits()
        self._path = path
        self._auth = BasicAuth()
        self._file = read_web_file(path) if path is not None else WebFile()
        self._stamp = self._stamped()
        self._context = self._file.tls.context() if self._file.tls else None
        self._sockets: list[socket.socket] = []
        self._servers: list[asyncio.Server] = []
        self._manager: web.Server | None = None
        self._open: set[_Connection] = set()
        self._busy = 0
        self._looking: asyncio.Task[None] | None = None
        #: Whether the file was taken over when it was last read.
        self.ok = True
        self._told = ""

    # -- connections -------------------------------------------------------------------------

    async def listen(self, manager: web.Server, sockets: Sequence[socket.socket]) -> None:
        """Accept connections on sockets that listen already, and follow the web config file."""
        self._manager, self._sockets = manager, list(sockets)
        await self._serve()
        if self._path is not None:
            self._looking = asyncio.create_task(self._look())

    async def close(self) -> None:
        """Accept no more."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
        for server in self._servers:
            server.close()
        for listening in self._sockets:
            listening.close()
        self._auth.close()

    async def _serve(self) -> None:
        """(Again) with the TLS of now. What connects in between waits in the socket's queue."""
        loop = asyncio.get_running_loop()
        before, self._servers = self._servers, []
        for server in before:
            server.close()
        timeout_s = self.limits.headers_s if self._context is not None else None
        for listening in self._sockets:
            # A copy: asyncio closes what it is given, and the port must not be lost meanwhile.
            copy = listening.dup()
            server = await loop.create_server(
                self._connect, sock=copy, ssl=self._context, ssl_handshake_timeout=timeout_s
            )
            self._servers.append(server)

    def _connect(self) -> asyncio.Protocol:
        assert self._manager is not None
        return _Connection(self, self._manager)

    def admit(self, connection: _Connection) -> bool:
        """Whether there is room for another connection."""
        self._open.add(connection)
        return len(self._open) <= self.limits.connections

    def left(self, connection: _Connection) -> None:
        """A connection ended."""
        self._open.discard(connection)

    # -- requests ----------------------------------------------------------------------------

    @web.middleware
    async def guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Every request comes through here, before anything is done for it."""
        if isinstance(request.protocol, _Connection):
            request.protocol.began()
        file = self._file
        if len(request.raw_path) > self.limits.target:
            return self._refusal(414, "this is a longer request than any page needs")
        if file.users and not await self._auth.allows(file.users, request.headers.get("Authorization", "")):
            return self._refusal(401, "Unauthorized", {"WWW-Authenticate": "Basic"})
        if self._busy >= self.limits.requests and request.path not in _ALWAYS:
            return self._refusal(503, f"{self._busy} requests are being answered already", {"Retry-After": "5"})
        self._busy += 1
        try:
            return await handler(request)
        finally:
            self._busy -= 1

    async def adorn(self, _: web.Request, response: web.StreamResponse) -> None:
        """Put the file's headers on an answer; a page that has its own keeps it. Made for ``on_response_prepare``."""
        for name, value in self._file.headers.items():
            response.headers.setdefault(name, value)

    @staticmethod
    def _refusal(status: int, why: str, headers: dict[str, str] | None = None) -> web.Response:
        response = web.Response(status=status, text=f"{why}\n", headers=headers)
        if status != 401:
            response.force_close()
        return response

    # -- the file ----------------------------------------------------------------------------

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(self.limits.look_s)
            try:
                await self.look()
            except Exception:
                log.exception("web_config_not_read")

    async def look(self) -> None:
        """Read the file again if it, or one that it names, has changed."""
        # One that was refused may have named a file that is there now.
        if self._path is None or (self.ok and self._stamped() == self._stamp):
            return
        try:
            file = await asyncio.to_thread(read_web_file, self._path)
            context = file.tls.context() if file.tls else None
        except ConfigError as error:
            self._refused(str(error))
            return
        secured = self._file.tls is not None or file.tls is not None
        self._file, self.ok, self._told = file, True, ""
        self._stamp = self._stamped()
        log.info(
            "web_config_read", extra={"fields": {"path": os.fspath(self._path), "tls": str(bool(file.tls)).lower()}}
        )
        if secured:
            self._context = context
            await self._serve()

    def _refused(self, why: str) -> None:
        self.ok = False
        if why != self._told:
            self._told = why
            log.error("web_config_refused", extra={"fields": {"error": why, "hint": "the old one stays in force"}})

    def _stamped(self) -> _Stamp:
        if self._path is None:
            return ()
        tls = self._file.tls
        return tuple(map(_stat, (self._path, *(tls.files if tls else ()))))


def _stat(path: Path) -> tuple[int, int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_ino, stat.st_size


class _Connection(web.RequestHandler):
    """One client, who has to say what it wants, and to take what it asked for, in reasonable time."""

    def __init__(self, door: Door, manager: web.Server) -> None:
        limits = door.limits
        super().__init__(
            manager,
            loop=asyncio.get_running_loop(),
            access_log=None,  # type: ignore[arg-type]  # which is how it is switched off
            keepalive_timeout=limits.idle_s,
            # Nobody sends us a body that matters.
            lingering_time=1.0,
        )
        self._door = door
        self._wire: asyncio.Transport | None = None
        self._late: asyncio.TimerHandle | None = None
        self._stuck: asyncio.TimerHandle | None = None

    def began(self) -> None:
        """A request is there."""
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        assert isinstance(transport, asyncio.Transport)
        self._wire = transport
        if not self._door.admit(self):
            transport.abort()
            return
        self._late = asyncio.get_running_loop().call_later(self._door.limits.headers_s, transport.abort)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._door.left(self)
        for timer in (self._late, self._stuck):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._wire is not None:
            self._stuck = asyncio.get_running_loop().call_later(self._door.limits.reading_s, self._wire.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stuck is not None:
            self._stuck.cancel()
            self._stuck = None
