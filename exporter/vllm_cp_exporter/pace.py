"""How often: jitter, so that a fleet is not asked in step, and waiting that can be cut short.

Waits end a little early, together with others: to wake up for one question costs a process more than the question does,
and a thousand workers asked now one and now another kept half a core awake.
"""

from __future__ import annotations

import asyncio
import math
import random

__all__ = ["early", "jittered", "rest", "wait"]

#: The longest time by which a wait may end early, seconds, and the largest part of it.
_EARLY_S = 0.1
_EARLY = 0.1


def jittered(seconds: float) -> float:
    """The time, give or take a fifth."""
    return seconds * random.uniform(0.8, 1.2)  # noqa: S311  (spreads load, guards nothing)


def early(now: float, seconds: float) -> float:
    """How long to wait in place of ``seconds``: up to a moment that others wait for too."""
    if seconds <= 0:
        return 0.0
    step = min(_EARLY_S, seconds * _EARLY)
    return max(0.0, math.floor((now + seconds) / step) * step - now)


async def rest(seconds: float) -> None:
    """About so long, never longer."""
    await asyncio.sleep(early(asyncio.get_running_loop().time(), seconds))


async def wait(due: asyncio.Event, seconds: float) -> None:
    """Until the event is set, which is taken back, or about so long, never longer."""
    loop = asyncio.get_running_loop()
    # The clock sets the event like anybody else: a time-out of its own would be a task for every wait.
    timer = loop.call_later(early(loop.time(), seconds), due.set)
    try:
        await due.wait()
    finally:
        timer.cancel()
    due.clear()
