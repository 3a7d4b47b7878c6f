"""A relay in a process of its own. Frozen, it is a host that died: nothing closes, nothing answers, ports accept."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType


class Relay:
    """``with Relay(worker.target) as relay:`` and ``relay.target`` is the worker, through the relay."""

    def __init__(self, target: str, *, unix: Path | None = None) -> None:
        """``unix``: listen on this socket file instead of a port."""
        where = [] if unix is None else [str(unix)]
        self._process = subprocess.Popen(
            [sys.executable, __file__, target, *where], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        #: What to dial.
        self.target = self._process.stdout.readline().strip()

    def freeze(self) -> None:
        """Stop the process where it stands."""
        os.kill(self._process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)

    def thaw(self) -> None:
        """Let it go on: what was sent meanwhile arrives."""
        os.kill(self._process.pid, signal.SIGCONT)

    def close(self) -> None:
        """End it, frozen or not."""
        self._process.kill()
        self._process.communicate()

    def __enter__(self) -> Relay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _serve(target: str, unix: str | None) -> None:
    if unix is None:
        listener = socket.create_server(("127.0.0.1", 0))
        name = f"127.0.0.1:{listener.getsockname()[1]}"
    else:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(unix)
        listener.listen()
        name = f"unix:{unix}"
    sys.stdout.write(name + "\n")
    sys.stdout.flush()
    threading.Thread(target=_with_the_test, daemon=True).start()
    host, _, port = target.rpartition(":")
    while True:
        near, _ = listener.accept()
        try:
            far = socket.create_connection((host.strip("[]"), int(port)))
        except OSError:
            near.close()
            continue
        for pair in ((near, far), (far, near)):
            threading.Thread(target=_copy, args=pair, daemon=True).start()


def _copy(source: socket.socket, sink: socket.socket) -> None:
    try:
        while data := source.recv(65536):
            sink.sendall(data)
    except OSError:
        pass
    for end in (source, sink):
        try:
            end.shutdown(socket.SHUT_RDWR)
        except OSError:
            end.close()


def _with_the_test() -> None:
    """Don't outlive whoever started this."""
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    _serve(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None)
