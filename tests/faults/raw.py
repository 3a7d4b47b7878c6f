"""Servers that misbehave on the socket, for one connection after another."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress


@contextmanager
def raw_server(behave: Callable[[socket.socket], None]) -> Iterator[str]:
    """``host:port`` of a server that hands each connection to ``behave``, in a thread each, and closes it after."""
    stopping = threading.Event()
    open_now: set[socket.socket] = set()
    threads: list[threading.Thread] = []

    def serve(connection: socket.socket) -> None:
        with connection:
            try:
                behave(connection)
            except OSError:
                pass  # the client is gone, or the test is over
            finally:
                open_now.discard(connection)

    def accept() -> None:
        while True:
            connection, _ = listener.accept()
            if stopping.is_set():
                connection.close()
                return
            open_now.add(connection)
            threads.append(threading.Thread(target=serve, args=(connection,)))
            threads[-1].start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        accepting = threading.Thread(target=accept)
        accepting.start()
        try:
            yield f"127.0.0.1:{listener.getsockname()[1]}"
        finally:
            stopping.set()
            socket.create_connection(listener.getsockname()).close()
            accepting.join()
            for connection in list(open_now):
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join()


def read_request(connection: socket.socket) -> bytes:
    """One request without a body."""
    seen = b""
    while b"\r\n\r\n" not in seen:
        piece = connection.recv(4096)
        if not piece:
            raise ConnectionError
        seen += piece
    return seen
