"""``vllm-cp`` as a process of its own, into pipes and onto terminals."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import Mapping
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
    return {**kept, "TERM": "xterm-256color", "LC_ALL": "C.UTF-8", **(changes or {})}


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
    ours, theirs = pty.openpty()
    try:
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        process = start(*args, env=env, stdout=theirs)
        os.close(theirs)
        seen = b"".join(iter(lambda: _read(ours), b""))
        _, err = process.communicate(timeout=30)
    finally:
        os.close(ours)
    return Ended(process.returncode, seen.decode().replace("\r\n", "\n"), err.decode())


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # the way a pseudo-terminal says that its other side has closed
        return b""
