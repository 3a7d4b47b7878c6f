"""Servers to be audited: HTTP with a status for each path, and ones that say given bytes."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from vllm_cp._audit_net import Endpoint


class Http:
    """An HTTP server; paths that it was not told of are 404."""

    def __init__(
        self, statuses: Mapping[str, int], *, cert: Path | None = None, key: Path | None = None, ca: Path | None = None
    ) -> None:
        self.seen: list[tuple[str, str, dict[str, str]]] = []
        seen = self.seen

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                seen.append((self.command, self.path, dict(self.headers)))
                self.send_response(statuses.get(self.path, 404))
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            def handle_error(self, *_: Any) -> None:
                pass  # a client that was turned away

        self._server = Server(("127.0.0.1", 0), Handler)
        if cert is not None and key is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(cert, key)
            if ca is not None:
                context.load_verify_locations(ca)
                context.verify_mode = ssl.CERT_REQUIRED
            self._server.socket = context.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        scheme = "http" if cert is None else "https"
        self.endpoint = Endpoint("127.0.0.1", self._server.server_address[1])
        self.url = f"{scheme}://{self.endpoint}"

    def __enter__(self) -> Http:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class Scripted:
    """Says the same bytes to everybody who has said something, then hangs up; or ``drips`` them, one at a time."""

    def __init__(self, says: bytes, *, hang_up: bool = True, drips: bool = False) -> None:
        self._says, self._hang_up, self._drips = says, hang_up, drips
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self.endpoint = Endpoint("127.0.0.1", self._listener.getsockname()[1])

    def _serve(self) -> None:
        while not self._ended.is_set():
            with suppress(OSError), self._listener.accept()[0] as client:
                client.settimeout(5)
                client.recv(4096)
                if self._drips:
                    while not self._ended.wait(0.02):
                        client.sendall(b"x")
                client.sendall(self._says)
                if not self._hang_up:
                    self._ended.wait(5)
                client.shutdown(socket.SHUT_WR)
                client.recv(4096)

    def __enter__(self) -> Scripted:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        with suppress(OSError):  # wakes the one that accepts
            socket.create_connection(self.endpoint, timeout=1).close()
        self._thread.join()
        self._listener.close()
