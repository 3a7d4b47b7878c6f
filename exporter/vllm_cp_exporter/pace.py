"""How often: jitter, so that a fleet is not asked in step, and waiting that can be cut short."""

from __future__ import annotations

import asyncio
import random

__all__ = ["jittered", "wait"]


def jittered(seconds: float) -> float:
    """The time, give or take a fifth."""
    return seconds * random.uniform(0.8, 1.2)  # noqa: S311  (spreads load, guards nothing)


async def wait(due: asyncio.Event, seconds: float) -> None:
    """Until the event is set, which is taken back, or the time is up."""
    try:
        await asyncio.wait_for(due.wait(), seconds)
    except asyncio.TimeoutError:
        return
    due.clear()
