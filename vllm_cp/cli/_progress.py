"""One line on a terminal that says how the waiting goes; nothing anywhere else."""

from __future__ import annotations

import os
import sys
import threading
import time

from vllm_cp.cli import _stdio
from vllm_cp.cli._text import cut, plain

__all__ = ["Progress"]

#: Between two repaints, seconds: ssh and the eye take no more.
_PACE_S = 0.2


class Progress:
    """How far a fleet has got. Workers report from their own threads."""

    def __init__(self, what: str, workers: int) -> None:
        self._what = what
        self._workers = workers
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self._painted = 0.0
        self._lag: dict[str, str] = {}
        self._there = 0
        self._shown = sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"

    def at(self, target: str, why: str) -> None:
        """A worker is not there yet, and why."""
        self._lag[target] = why
        self._paint()

    def there(self, target: str) -> None:
        """A worker has arrived."""
        with self._lock:
            self._lag.pop(target, None)
            self._there += 1
        self._paint()

    def close(self) -> None:
        """Leave the line as if nothing had been."""
        with self._lock:
            if self._shown:
                self._shown = False
                _stdio.talk("\r\x1b[K")

    def _paint(self) -> None:
        with self._lock:
            now = time.monotonic()
            if not self._shown or now - self._painted < _PACE_S:
                return
            self._painted = now
            _stdio.talk("\r\x1b[K" + self._line(now))

    def _line(self, now: float) -> str:
        text = f"{self._what}: {now - self._began:.0f} s"
        if self._workers > 1:
            text += f", {self._there} of {self._workers} there"
        target, why = next(iter(self._lag.items()), ("", ""))
        if why:
            text += f"; {target}: {why}" if self._workers > 1 else f"; {why}"
        try:
            width = os.get_terminal_size(sys.stderr.fileno()).columns
        except (OSError, ValueError):
            width = 80
        # One column less: a line that fills the last one wraps on some terminals, and could not be taken back.
        return cut(plain(text), max(1, width - 1), "...")
