"""Both HTTP clients behind one face, so that one test says a thing of both: ``await client.status()``."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from vllm_cp import engine_page, faults
from vllm_cp.models.probe import EngineMetrics
from vllm_cp.models.recovery import RankRecovery

COLOURS = ("sync", "async")


class Both:
    """A client of either colour. Synchronous calls run in threads, so they may overlap as asynchronous ones do."""

    def __init__(self, colour: str, url: str | faults.HttpConnection, **options: Any) -> None:
        self.colour = colour
        self.client: Any = (faults.FaultTolerance if colour == "sync" else faults.AsyncFaultTolerance)(url, **options)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.client, name)
        if self.colour == "async":
            return method

        async def call(*args: Any, **kwargs: Any) -> Any:
            return await asyncio.to_thread(method, *args, **kwargs)

        return call

    @property
    def target(self) -> str:
        return str(self.client.target)

    async def read_page(self, **options: Any) -> EngineMetrics:
        if self.colour == "async":
            return await engine_page.read_page_async(self.client, **options)
        return await asyncio.to_thread(engine_page.read_page, self.client, **options)


async def recover(ranks: Sequence[Both], **options: Any) -> tuple[RankRecovery, ...]:
    """Either ``recover``, as the colour of the clients is."""
    clients = [rank.client for rank in ranks]
    if ranks and ranks[0].colour == "async":
        return await faults.recover_async(clients, **options)
    return await asyncio.to_thread(faults.recover, clients, **options)
