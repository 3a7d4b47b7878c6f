"""A TCP relay that can go silent without closing anything, as a network does that is cut."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from types import TracebackType


class Relay:
    """Forwards connections to ``port``; ``freeze`` stops every byte both ways, ``thaw`` lets them go on."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._peers: dict[socket.socket, socket.socket] = {}
        self._frozen = False
        self._stopping = False
        self._waker, self._woken = socket.socketpair()
        self._stands_still = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    @property
    def address(self) -> str:
        """For ZeroMQ."""
        return f"tcp://127.0.0.1:{self.port}"

    def freeze(self) -> None:
        """From now on nothing passes and nothing is accepted; nobody is told."""
        self._frozen = True
        self._stands_still.clear()
        self._waker.send(b"!")
        self._stands_still.wait()

    def thaw(self) -> None:
        """What was held up passes."""
        self._frozen = False
        self._waker.send(b"!")

    def __enter__(self) -> Relay:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stopping = True
        self._waker.send(b"!")
        self._thread.join()
        for each in (self._listener, self._woken, self._waker, *self._peers):
            each.close()

    def _run(self) -> None:
        while not self._stopping:
            with selectors.DefaultSelector() as waiting:
                waiting.register(self._woken, selectors.EVENT_READ)
                if not self._frozen:
                    for each in (self._listener, *self._peers):
                        waiting.register(each, selectors.EVENT_READ)
                else:
                    self._stands_still.set()
                for key, _ in waiting.select():
                    self._handle(key.fileobj)  # type: ignore[arg-type]

    def _handle(self, ready: socket.socket) -> None:
        if ready is self._woken:
            ready.recv(1024)
        elif ready is self._listener:
            near, _ = ready.accept()
            try:
                far = socket.create_connection(("127.0.0.1", self._to), 1.0)
            except OSError:
                near.close()
                return
            self._peers |= {near: far, far: near}
        elif ready in self._peers:
            self._forward(ready)

    def _forward(self, near: socket.socket) -> None:
        data = b""
        with contextlib.suppress(OSError):
            data = near.recv(1 << 16)
        far = self._peers[near]
        try:
            if not data:
                raise ConnectionError
            far.sendall(data)
        except OSError:
            for each in (near, far):
                self._peers.pop(each, None)
                each.close()
