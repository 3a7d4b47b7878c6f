"""No herd: how many workers may be dialled at once, and how fast."""

from __future__ import annotations

import asyncio
from types import TracebackType

__all__ = ["Dials"]


class Dials:
    """``async with dials:`` around the first call on a connection. Waits for its turn."""

    def __init__(self, at_once: int = 64, per_second: float = 100.0) -> None:
        self._slots = asyncio.Semaphore(at_once)
        self._gap = 1.0 / per_second
        self._next = 0.0

    async def __aenter__(self) -> None:
        await self._slots.acquire()
        try:
            loop = asyncio.get_running_loop()
            turn = max(self._next, loop.time())
            self._next = turn + self._gap
            await asyncio.sleep(turn - loop.time())
        except BaseException:
            self._slots.release()
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._slots.release()
