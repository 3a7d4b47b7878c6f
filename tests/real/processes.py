"""Processes a test starts, freezes and kills: always by a handle, never by name, so no stranger is ever hit."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.real.waiting import eventually


class Process:
    """A running process, held by a pidfd: once it is gone, a signal fails instead of reaching its pid's next owner."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._descriptor = os.pidfd_open(pid)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; ProcessLookupError when the process is gone."""
        signal.pidfd_send_signal(self._descriptor, number)

    def kill(self, timeout: float = 2.0) -> None:
        """SIGKILL, and wait until it is gone."""
        self.signal(signal.SIGKILL)
        if not self.gone(timeout):
            raise TimeoutError(f"process {self.pid} outlived SIGKILL by {timeout} s")

    def freeze(self, timeout: float = 2.0) -> None:
        """SIGSTOP, and wait until it has stopped."""
        self.signal(signal.SIGSTOP)
        eventually(lambda: self._state() == "T", timeout, f"process {self.pid} to stop")

    def thaw(self) -> None:
        """SIGCONT."""
        self.signal(signal.SIGCONT)

    def _state(self) -> str:
        # The command in parentheses may hold anything, so the state is what follows the last one.
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]

    def gone(self, timeout: float = 0.0) -> bool:
        """Whether the process has ended, waiting up to ``timeout`` seconds for it."""
        poller = select.poll()
        poller.register(self._descriptor, select.POLLIN)
        return bool(poller.poll(timeout * 1000))

    def stop(self, grace: float = 0.0) -> None:
        """End it: SIGTERM with ``grace`` seconds if any, then SIGKILL; then let go of the handle."""
        with contextlib.suppress(ProcessLookupError):
            if grace:
                self.thaw()
                self.signal(signal.SIGTERM)
            if not self.gone(grace):
                self.kill(10.0)
        os.close(self._descriptor)


class Child(Process):
    """A process we started; stdout and stderr are appended to ``log``."""

    def __init__(
        self, command: Sequence[str], log: Path, env: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> None:
        with log.open("ab") as out:
            self._popen = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env, cwd=cwd, close_fds=True
            )
        super().__init__(self._popen.pid)

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative is the signal that ended it."""
        return self._popen.poll()

    def wait_exit(self, timeout: float) -> int:
        """The exit code, as soon as there is one; TimeoutError after ``timeout`` seconds."""
        if not self.gone(timeout):
            raise TimeoutError(f"process {self.pid} still runs after {timeout} s")
        return self._popen.wait()

    def stop(self, grace: float = 0.0) -> None:
        """End it and collect its exit code."""
        super().stop(grace)
        self._popen.wait()
