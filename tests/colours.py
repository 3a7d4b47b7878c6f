"""Both clients behind one face, so that one test says a thing of both: ``await both.server_info()``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

from vllm_cp import AsyncControlClient, Connection, ControlClient
from vllm_cp.models.health import HealthStatus

COLOURS = ("sync", "async")


class Both:
    """A client of either colour. Synchronous calls run in threads, so they may overlap as asynchronous ones do."""

    def __init__(self, colour: str, target: str | Connection, **options: Any) -> None:
        self.colour = colour
        self.client: Any = (ControlClient if colour == "sync" else AsyncControlClient)(target, **options)

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        method = getattr(self.client, name)
        if self.colour == "async":
            return method  # type: ignore[no-any-return]

        async def call(*args: Any, **kwargs: Any) -> Any:
            return await asyncio.to_thread(method, *args, **kwargs)

        return call

    @property
    def target(self) -> str:
        return str(self.client.target)

    def watch(self, service: str = "", **options: Any) -> AsyncIterator[HealthStatus]:
        """The health, as an asynchronous iterator in both colours."""
        if self.colour == "async":
            return self.client.watch(service, **options)  # type: ignore[no-any-return]
        return _in_threads(self.client.watch(service, **options))

    async def close(self) -> None:
        if self.colour == "async":
            await self.client.close()
        else:
            self.client.close()


@asynccontextmanager
async def both(colour: str, target: str | Connection, **options: Any) -> AsyncIterator[Both]:
    """A client of that colour, closed at the end."""
    client = Both(colour, target, **options)
    try:
        yield client
    finally:
        await client.close()


async def _in_threads(values: Iterator[HealthStatus]) -> AsyncIterator[HealthStatus]:
    end = object()
    try:
        while (value := await asyncio.to_thread(next, values, end)) is not end:
            yield value  # type: ignore[misc]  # the end is no status
    finally:
        if hasattr(values, "close"):
            values.close()
