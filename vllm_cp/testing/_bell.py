"""Waiting for the worker's state to change. Lives on one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

__all__ = ["Bell", "Refusal"]


class Refusal(Exception):
    """A call ends with this status."""

    def __init__(self, code: str, detail: str = "") -> None:
        super().__init__(code, detail)
        self.code = code
        self.detail = detail


class Bell:
    """Rung at each change of state; whoever waits looks again. Once stopped, every wait ends with a Refusal."""

    def __init__(self) -> None:
        self.stopped = False
        self._waiting: set[asyncio.Future[None]] = set()

    def ring(self) -> None:
        """The state has changed."""
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)

    async def until(self, true: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Wait for ``true()``, at most ``timeout_s`` seconds; whether it came. Raises Refusal once stopped."""
        loop = asyncio.get_running_loop()
        until = None if timeout_s is None else loop.time() + timeout_s
        while True:
            if self.stopped:
                # What a caller sees of a process that has gone.
                raise Refusal("UNAVAILABLE", "Socket closed")
            if true():
                return True
            left = None if until is None else until - loop.time()
            if left is not None and left <= 0:
                return False
            waiter: asyncio.Future[None] = loop.create_future()
            self._waiting.add(waiter)
            try:
                await asyncio.wait((waiter,), timeout=left)
            finally:
                self._waiting.discard(waiter)
                waiter.cancel()
