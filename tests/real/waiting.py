"""Waiting for something to become true, never longer than a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def eventually(check: Callable[[], T], timeout: float, what: str = "it", every: float = 0.005) -> T:
    """The first true answer of ``check``, asked every ``every`` seconds; TimeoutError after ``timeout`` seconds.

    For a test in an event loop: ``await asyncio.to_thread(eventually, check, 2.0)``.
    """
    deadline = time.monotonic() + timeout
    while True:
        answer = check()
        if answer:
            return answer
        if time.monotonic() >= deadline:
            raise TimeoutError(f"waited {timeout} s for {what}")
        time.sleep(every)
