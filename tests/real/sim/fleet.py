"""All data-parallel ranks of one deployment, or those of them that live in this process."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from tests.real.sim.engine import SimEngine
from tests.real.sim.facts import EngineFacts
from tests.real.sim.moments import Moment

PerRank = Mapping[int, Mapping[str, Any]]


class Fleet:
    """Engines by rank.

    ``async with Fleet("tcp://127.0.0.1:5550")`` returns once the frontend has all of them.  ``per_rank`` replaces
    single facts of a rank; ``ranks`` says which run here (default: all ``size``).
    """

    def __init__(
        self,
        handshake: str,
        size: int = 1,
        facts: EngineFacts | None = None,
        per_rank: PerRank | None = None,
        ranks: Iterable[int] | None = None,
    ) -> None:
        self.handshake = handshake
        self.size = size
        self.facts = facts or EngineFacts()
        self.per_rank = per_rank or {}
        self.moments: list[Moment] = []
        self.engines = {rank: self._make(rank) for rank in (range(size) if ranks is None else ranks)}

    def _make(self, rank: int) -> SimEngine:
        facts = dataclasses.replace(self.facts, **self.per_rank.get(rank, {}))
        return SimEngine(self.handshake, rank, self.size, facts, self.moments)

    async def join(self, timeout: float = 600.0) -> None:
        """Bring every engine here through the handshake; ``timeout`` in seconds."""
        await asyncio.gather(*(engine.join(timeout) for engine in self.engines.values()))

    async def rejoin(self, rank: int, timeout: float = 10.0) -> SimEngine:
        """Replace a rank by a fresh engine that runs the handshake again."""
        await self.engines[rank].close()
        self.engines[rank] = self._make(rank)
        await self.engines[rank].join(timeout)
        return self.engines[rank]

    async def close(self) -> None:
        """Close every engine without a word to the frontend."""
        await asyncio.gather(*(engine.close() for engine in self.engines.values()))

    async def __aenter__(self) -> Fleet:
        try:
            await self.join()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()
