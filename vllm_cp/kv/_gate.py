"""Not more than so many replays at a time in this process: after an outage every source wants one at once.

Who has waited for an answer for a while leaves the gate and goes on waiting outside: a dead replay address is no load,
and must not keep all others from their turn.
"""

from __future__ import annotations

import threading
from collections import deque

__all__ = ["PATIENCE_S", "REPLAYS", "Gate"]


class Gate:
    """First come, first served, without waiting: ask again until it is your turn, and leave when it is over."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._inside: set[object] = set()
        self._line: deque[object] = deque()

    def enter(self, who: object) -> bool:
        """Whether ``who`` may begin. Stands in line until then; ``leave`` also leaves the line."""
        with self._lock:
            if who in self._inside:
                return True
            if who not in self._line:
                self._line.append(who)
            if len(self._inside) >= self._limit or self._line[0] is not who:
                return False
            self._line.popleft()
            self._inside.add(who)
            return True

    def leave(self, who: object) -> None:
        """Over, or given up."""
        with self._lock:
            self._inside.discard(who)
            if who in self._line:
                self._line.remove(who)


#: One replay at a time in one process.
REPLAYS = Gate(1)
#: How long one may wait for its first answer inside, seconds; publishers take up to 0.1.
PATIENCE_S = 0.5
