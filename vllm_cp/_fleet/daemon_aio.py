"""AsyncFleet.from_daemon."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from vllm_cp._fleet import daemon
from vllm_cp._fleet.aio import AsyncFleet
from vllm_cp._fleet.changes import FleetChange
from vllm_cp._fleet.roster import check_bounds
from vllm_cp._fleet.snapshot import FleetSnapshot
from vllm_cp._http import AsyncHttpClient
from vllm_cp._http_connection import HttpConnection
from vllm_cp.aio import AsyncControlClient
from vllm_cp.discovery.base import DiscoveredTarget, DiscoveryStatus
from vllm_cp.errors import ClientClosed, ControlError
from vllm_cp.models.outcome import Outcome

__all__ = ["AsyncDaemonFleet"]

T = TypeVar("T")


class AsyncDaemonFleet(AsyncFleet):
    """A fleet that a daemon tells of."""

    def __init__(self, url: str | HttpConnection) -> None:
        super().__init__(())
        self._daemon = AsyncHttpClient(url)
        self._seen = daemon.Follower()
        self._over = False

    @property
    def targets(self) -> tuple[DiscoveredTarget, ...]:
        return self._seen.targets

    @property
    def status(self) -> DiscoveryStatus | None:
        return self._seen.status

    def client(self, key: str) -> AsyncControlClient:
        raise daemon.refuse_map()

    async def start(self) -> AsyncFleet:
        await self.snapshot()
        return self

    async def close(self) -> None:
        self._over = True
        await self._daemon.close()
        await super().close()

    async def map(
        self,
        fn: Callable[[AsyncControlClient], Awaitable[T]],
        *,
        deadline_s: float | None = None,
        at_once: int = 64,
    ) -> list[Outcome[T]]:
        raise daemon.refuse_map()

    async def snapshot(self, *, deadline_s: float | None = None, at_once: int = 64) -> FleetSnapshot:
        check_bounds(deadline_s, at_once)
        self._check()
        snapshot, revision = await self._daemon.run(daemon.snapshot_call(), deadline_s)
        for _ in self._seen.all(snapshot, revision):
            pass
        return snapshot

    async def watch(self, *, check_every_s: float = 5.0) -> AsyncIterator[FleetChange]:
        self._check()
        seen = daemon.Follower()
        try:
            while not self._over:
                for change in await self._next(seen):
                    yield change
        except ClientClosed:
            return

    async def _next(self, seen: daemon.Follower) -> list[FleetChange]:
        """What comes next; nothing now and then. Raises ControlError when there was never an answer."""
        try:
            if seen.revision is None:
                changes = list(seen.all(*await self._daemon.run(daemon.snapshot_call())))
            else:
                delta = await self._daemon.run(daemon.changes_since(seen.revision), daemon.POLL_S + 5.0)
                changes = list(seen.some(delta)) if delta is not None else []
                if delta is None:
                    seen.revision = None
        except ControlError as error:
            if seen.status.last_success is None:
                raise
            seen.lost(error)
            self._seen.status = seen.status
            await asyncio.sleep(daemon.PAUSE_S)
            return []
        self._seen.status = seen.status
        return changes

    def _check(self) -> None:
        if self._over:
            raise ClientClosed("this fleet was closed; make a new one")
