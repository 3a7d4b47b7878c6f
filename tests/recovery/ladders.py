"""Both ladders behind one face: ``await ladder.observe()`` says a thing of both."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tests.colours import Both, both
from vllm_cp.episodes import WorkerState
from vllm_cp.models.ladder import Rungs
from vllm_cp.models.startup import Startup
from vllm_cp.readiness import AsyncLadder, Ladder


class BothLadders:
    """A ladder of either colour; the synchronous one runs in threads, so that a scenario goes on meanwhile."""

    def __init__(self, client: Both, **options: Any) -> None:
        self.colour = client.colour
        self.client = client
        self.ladder: Any = (Ladder if self.colour == "sync" else AsyncLadder)(client.client, **options)

    @property
    def state(self) -> WorkerState:
        """All that is known."""
        state: WorkerState = self.ladder.state
        return state

    def rungs(self) -> dict[str, bool]:
        """The rungs that are proved or refuted."""
        return {rung.value: held.holds for rung, held in self.state.rungs if held.holds is not None}

    async def observe(self) -> Rungs:
        rungs: Rungs = await self._run("observe")
        return rungs

    async def wait_until(self, *args: Any, **options: Any) -> Rungs:
        rungs: Rungs = await self._run("wait_until", *args, **options)
        return rungs

    async def measure_startup(self, *args: Any, **options: Any) -> Startup:
        startup: Startup = await self._run("measure_startup", *args, **options)
        return startup

    async def close(self) -> None:
        await self._run("close")

    async def _run(self, name: str, *args: Any, **options: Any) -> Any:
        method = getattr(self.ladder, name)
        if self.colour == "sync":
            return await asyncio.to_thread(method, *args, **options)
        return await method(*args, **options)


@asynccontextmanager
async def ladder_to(colour: str, target: str, **options: Any) -> AsyncIterator[BothLadders]:
    """A ladder of that colour with a client of its own, both closed at the end."""
    async with both(colour, target) as client:
        ladder = BothLadders(client, **options)
        try:
            yield ladder
        finally:
            await ladder.close()
