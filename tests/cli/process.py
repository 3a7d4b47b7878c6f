"""``vllm-cp`` as a process of its own, into pipes and onto terminals."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping
from types import TracebackType
from typing import NamedTuple

COMMAND = (sys.executable, "-m", "vllm_cp.cli")
#: What the environment of the test run must not decide.
_CLEARED = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "PYTHONWARNINGS", "PYTHONIOENCODING", "GRPC_VERBOSITY")
_PROXIES = ("http_proxy", "https_proxy", "grpc_proxy", "no_proxy", "no_grpc_proxy", "all_proxy")


class Ended(NamedTuple):
    """How a run ended, and what it wrote."""

    code: int
    out: str
    err: str


def environment(changes: Mapping[str, str] | None = None) -> dict[str, str]:
    """This environment without settings that change output or transport, and with ``changes``."""
    gone = {*_CLEARED, *_PROXIES, *(name.upper() for name in _PROXIES)}
    kept = {k: v for k, v in os.environ.items() if k not in gone and not k.startswith("VLLM_CP_")}
    # No context file of the machine's owner either.
    plain = {"TERM": "xterm-256color", "LC_ALL": "C.UTF-8", "XDG_CONFIG_HOME": "/nonexistent"}
    return {**kept, **plain, **(changes or {})}


def start(*args: str | bytes, env: Mapping[str, str] | None = None, **settings: object) -> subprocess.Popen[bytes]:
    """A run that goes on, both streams into pipes unless said otherwise."""
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **settings}
    return subprocess.Popen([*COMMAND, *args], env=environment(env), **streams)  # type: ignore[call-overload,no-any-return]


def ended(process: subprocess.Popen[bytes], timeout_s: float = 30.0) -> Ended:
    """Wait for a run and collect what it wrote."""
    out, err = process.communicate(timeout=timeout_s)
    return Ended(process.returncode, (out or b"").decode(), (err or b"").decode())


def run(*args: str | bytes, env: Mapping[str, str] | None = None, **settings: object) -> Ended:
    """One whole run."""
    return ended(start(*args, env=env, **settings))


def shell(script: str, *args: str, env: Mapping[str, str] | None = None) -> Ended:
    """A POSIX shell script in which ``vllm-cp "$@"`` is our command with ``args``."""
    define = 'run() { "$PYTHON" -m vllm_cp.cli "$@"; }; '
    process = subprocess.Popen(
        ["/bin/sh", "-c", define + script, "sh", *args],
        env=environment({"PYTHON": sys.executable, **(env or {})}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    return ended(process)


def on_terminal(*args: str, columns: int = 80, env: Mapping[str, str] | None = None) -> Ended:
    """One run with a terminal of that width as its standard output."""
    ours, theirs = _terminal(columns)
    try:
        process = start(*args, env=env, stdout=theirs)
        os.close(theirs)
        seen = b"".join(iter(lambda: _read(ours), b""))
        _, err = process.communicate(timeout=30)
    finally:
        os.close(ours)
    return Ended(process.returncode, seen.decode().replace("\r\n", "\n"), err.decode())


class Terminal:
    """A run that has a terminal to itself: what it shows is read, what it asks is answered.

    with Terminal("shutdown", "--target", target) as terminal:
        terminal.expect("Go on?")
        terminal.press("y\\n")
        assert terminal.end() == 0
    """

    def __init__(self, *args: str, columns: int = 80, env: Mapping[str, str] | None = None) -> None:
        self._ours, theirs = _terminal(columns)
        # The run leads its own session, so that it can have this terminal for Ctrl-C.
        command = [sys.executable, "-c", _TAKE_TERMINAL, *COMMAND, *args]
        self._process = subprocess.Popen(
            command, env=environment(env), stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
        )
        os.close(theirs)
        #: All that was shown so far.
        self.shown = ""

    def expect(self, text: str, timeout_s: float = 15.0) -> str:
        """Wait until ``text`` has been shown; gives all that was shown so far."""
        deadline = time.monotonic() + timeout_s
        while text not in self.shown:
            assert time.monotonic() < deadline, f"{text!r} was never shown, but {self.shown!r}"
            if not self._more(0.1) and self._process.poll() is not None:
                assert text in self.shown, f"ended without {text!r}, after {self.shown!r}"
        return self.shown

    def press(self, keys: str) -> None:
        """Press keys."""
        os.write(self._ours, keys.encode())

    def resize(self, columns: int) -> None:
        """Another width, which the run is told of as a real terminal would."""
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def signal(self, number: int) -> None:
        """Send the run a signal."""
        self._process.send_signal(number)

    def end(self, timeout_s: float = 15.0) -> int:
        """Wait for its end, reading on; the exit code."""
        deadline = time.monotonic() + timeout_s
        while self._process.poll() is None:
            assert time.monotonic() < deadline, f"it goes on, after {self.shown!r}"
            self._more(0.05)
        while self._more(0.0):
            pass
        return self._process.returncode

    def _more(self, wait_s: float) -> bool:
        ready, _, _ = select.select([self._ours], [], [], wait_s)
        data = _read(self._ours) if ready else b""
        self.shown += data.decode(errors="replace").replace("\r\n", "\n")
        return bool(data)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        os.close(self._ours)


_TAKE_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
)


def _terminal(columns: int) -> tuple[int, int]:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    return ours, theirs


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # the way a pseudo-terminal says that its other side has closed
        return b""
