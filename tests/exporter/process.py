"""The daemon as a process: started as people start it, read on standard error, stopped by signals."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType

COMMAND = (sys.executable, "-m", "vllm_cp_exporter")


def run(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A start that ends by itself."""
    return subprocess.run(
        [*COMMAND, *args], env={**os.environ, **environment}, capture_output=True, text=True, timeout=30, check=False
    )


class Exporter:
    """A running daemon on a port of its own."""

    def __init__(
        self, *args: str, listen: str = "127.0.0.1:0", command: Sequence[str] = COMMAND, **environment: str
    ) -> None:
        self.process = subprocess.Popen(
            [*command, "--listen", listen, *args],
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        #: Standard error so far.
        self.lines: list[str] = []
        self._grew = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._grew:
                self.lines.append(line.rstrip("\n"))
                self._grew.notify_all()

    def event(self, name: str, timeout_s: float = 15.0) -> dict[str, str]:
        """The first line about this event, once it is there."""
        deadline = time.monotonic() + timeout_s
        with self._grew:
            while True:
                for fields in map(_fields, self.lines):
                    if fields.get("event") == name:
                        return fields
                left = deadline - time.monotonic()
                if left <= 0 or (self.process.poll() is not None and not self._reader.is_alive()):
                    raise TimeoutError(f"no {name} among {self.lines}")
                self._grew.wait(min(left, 0.2))

    def get(self, path: str) -> str:
        """A page."""
        port = self.event("started")["listen"].rpartition(":")[2]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            text: str = answer.read().decode()
            return text

    def eventually(self, check: Callable[[str], bool], path: str = "/metrics", timeout_s: float = 15.0) -> str:
        """The page, once it is as it should be."""
        deadline = time.monotonic() + timeout_s
        text = ""
        while time.monotonic() < deadline:
            with suppress(OSError):
                text = self.get(path)
                if check(text):
                    return text
            time.sleep(0.02)
        raise TimeoutError(text)

    def stop(self, number: int = signal.SIGTERM, pid: int | None = None) -> tuple[int, float]:
        """Send a signal and wait: exit code and seconds."""
        began = time.monotonic()
        os.kill(pid or self.process.pid, number)
        code = self.process.wait(timeout=10)
        took = time.monotonic() - began
        self._reader.join(timeout=5)
        return code, took

    @property
    def stdout(self) -> str:
        """All of standard output, once the process has ended."""
        assert self.process.stdout is not None
        return self.process.stdout.read()

    def __enter__(self) -> Exporter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join(timeout=5)
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()


def _fields(line: str) -> dict[str, str]:
    if line.startswith("{"):
        return {key: str(value) for key, value in json.loads(line).items()}
    return {key: value.strip('"') for key, value in re.findall(r'(\w+)=("(?:[^"\\]|\\.)*"|\S*)', line)}
