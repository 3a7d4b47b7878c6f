"""One look at one worker for ``/probe``: all questions inside one deadline, over channels that are kept for a while."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from vllm_cp import (
    AsyncControlClient,
    ConfigError,
    Connection,
    ControlError,
    HealthStatus,
    NotSupported,
    Retry,
    RpcRecord,
    ServerInfo,
    WorkerUnreachable,
)
from vllm_cp.models.ladder import Rung
from vllm_cp.observer import Observer
from vllm_cp_exporter.snapshot import Facts

__all__ = ["Busy", "Look", "Lookers"]

T = TypeVar("T")

#: A question to a frozen engine queues there: it is not given up, and a later look waits for the same answer.
_ROUND_TRIP_S = 600.0
#: Least time for a question, seconds; gRPC takes 0 for "over already".
_LEAST_S = 0.01


class Busy(Exception):
    """All channels are in use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What one look brought."""

    observer: Observer
    facts: Facts
    #: Calls that ended, in order.
    calls: tuple[RpcRecord, ...] = ()


class _Looker:
    """One worker as it is reached in one way."""

    def __init__(self, connection: Connection, on_rpc: Callable[[RpcRecord], None]) -> None:
        # One attempt: a broken connection is replaced here, and a refused one is the answer.
        self._connection = replace(connection, retry=Retry(attempts=1))
        self._on_rpc = on_rpc
        self._calls: list[RpcRecord] = []
        self._client: AsyncControlClient | None = None
        self._trip: asyncio.Task[bool | ControlError] | None = None
        self._trip_began = 0.0
        self._looking: asyncio.Task[Look] | None = None
        #: Whether that look asks the engines.
        self._deep = False
        self.users = 0
        self.last_used = time.monotonic()

    @property
    def idle(self) -> bool:
        """Nobody waits for it, and no engine owes it an answer."""
        return self.users == 0 and (self._trip is None or self._trip.done())

    async def look(self, rung: Rung, deadline: float, *, round_trips: bool) -> Look:
        """A look, or the one under way: a worker is not asked twice at once. ``deadline``: monotonic seconds."""
        deep = round_trips and rung.height >= Rung.ANSWERING.height
        while self._looking is not None and not self._looking.done() and deep > self._deep:
            # One that asks no engine is under way; what it finds is not enough here.
            await asyncio.wait({self._looking})
        if self._looking is None or self._looking.done():
            self._deep = deep
            self._looking = asyncio.create_task(self._look(deadline, deep))
        # Who gives up early must not take the look away from others.
        return await asyncio.shield(self._looking)

    async def close(self) -> None:
        """Close the channel."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
        await self._renew()

    async def _look(self, deadline: float, deep: bool) -> Look:
        calls: list[RpcRecord] = []
        self._calls = calls
        observer = Observer()
        kept = self._client is not None
        health = await self._check(observer, deadline)
        if kept and isinstance(health, WorkerUnreachable) and _left(deadline) > _LEAST_S:
            # A kept channel may have died long ago, and says so now; whether anybody is there a new one tells.
            await self._renew()
            health = await self._check(observer, deadline)
        if not isinstance(health, HealthStatus):
            return Look(observer=observer, facts=Facts(), calls=tuple(calls))
        trip = self._ask(observer, deadline) if deep else None
        client, left = self._at_work(), _left(deadline)
        server, model, sources, _ = await asyncio.gather(
            _outcome(client.server_info(timeout_s=left)),
            _outcome(client.model_info(timeout_s=left)),
            _outcome(client.kv_event_sources(timeout_s=left)),
            trip if trip is not None else asyncio.sleep(0),
        )
        observer.server_info(server)
        observer.tick()
        return Look(observer=observer, facts=_facts(server, model, sources), calls=tuple(calls))

    async def _check(self, observer: Observer, deadline: float) -> HealthStatus | ControlError:
        began = observer.clock.monotonic()
        answer = await _outcome(self._at_work().check(timeout_s=_left(deadline)))
        observer.health(answer, began=began)
        return answer

    async def _ask(self, observer: Observer, deadline: float) -> None:
        """A round trip to the engines, or the one that is still under way since an earlier look."""
        if not observer.wants_round_trip:
            return
        if self._trip is None or self._trip.done():
            self._trip_began = observer.clock.monotonic()
            self._trip = asyncio.ensure_future(_outcome(self._at_work().is_paused(timeout_s=_ROUND_TRIP_S)))
        observer.asked()
        await asyncio.wait({self._trip}, timeout=_left(deadline))
        if self._trip.done():
            observer.round_trip(self._trip.result(), began=self._trip_began)

    def _at_work(self) -> AsyncControlClient:
        if self._client is None:
            self._client = AsyncControlClient(self._connection, on_rpc=self._rpc)
        return self._client

    async def _renew(self) -> None:
        """Let the channel go, and the question that waits on it."""
        client, self._client = self._client, None
        trip, self._trip = self._trip, None
        if trip is not None:
            trip.cancel()
            await asyncio.gather(trip, return_exceptions=True)
        if client is not None:
            await client.close()

    def _rpc(self, record: RpcRecord) -> None:
        self._calls.append(record)
        self._on_rpc(record)


class Lookers:
    """The channels: a bounded number, closed when nobody used them for a while."""

    def __init__(
        self, on_rpc: Callable[[RpcRecord], None], *, at_most: int = 256, idle_s: float = 120.0, sweep_s: float = 5.0
    ) -> None:
        self._on_rpc = on_rpc
        self._at_most = at_most
        self._idle_s = idle_s
        self._sweep_s = sweep_s
        #: The one used longest ago first.
        self._kept: OrderedDict[Hashable, _Looker] = OrderedDict()
        self._sweeping: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._kept)

    async def look(self, connection: Connection, rung: Rung, deadline: float, *, round_trips: bool = True) -> Look:
        """A look over a kept or a new channel. Raises Busy, ConfigError, and TimeoutError when the deadline passes."""
        looker = await self._taken(connection)
        looker.users += 1
        try:
            # The calls end by themselves at the deadline; this is for a look that began with somebody else's.
            look = looker.look(rung, deadline, round_trips=round_trips)
            return await asyncio.wait_for(look, _left(deadline) + 0.2)
        finally:
            looker.users -= 1
            looker.last_used = time.monotonic()

    async def close(self) -> None:
        """Close all."""
        if self._sweeping is not None:
            self._sweeping.cancel()
        kept, self._kept = list(self._kept.values()), OrderedDict()
        await asyncio.gather(*(looker.close() for looker in kept), return_exceptions=True)

    async def _taken(self, connection: Connection) -> _Looker:
        if self._sweeping is None:
            self._sweeping = asyncio.create_task(self._sweep())
        looker = self._kept.get(connection)
        if looker is None:
            spare = None
            if len(self._kept) >= self._at_most:
                spare = next((key for key, kept in self._kept.items() if kept.idle), None)
                if spare is None:
                    raise Busy(f"{len(self._kept)} targets are being probed already")
            looker = self._kept[connection] = _Looker(connection, self._on_rpc)
            if spare is not None:
                await self._kept.pop(spare).close()
        self._kept.move_to_end(connection)
        return looker

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(self._sweep_s)
            late = time.monotonic() - self._idle_s
            for key in [key for key, kept in self._kept.items() if kept.idle and kept.last_used < late]:
                await self._kept.pop(key).close()


def _facts(server: Any, model: Any, sources: Any) -> Facts:
    info = server if isinstance(server, ServerInfo) else None
    problem = ""
    if isinstance(sources, ControlError):
        problem = "not supported" if isinstance(sources, NotSupported) else sources.meaning
    return Facts(
        server=info,
        model=None if isinstance(model, ControlError) else model.seen_on(info.engine_version if info else ""),
        sources=None if isinstance(sources, ControlError) else sources,
        sources_problem=problem,
    )


def _left(deadline: float) -> float:
    return max(_LEAST_S, deadline - time.monotonic())


async def _outcome(call: Awaitable[T]) -> T | ControlError:
    try:
        return await call
    except ControlError as error:
        return error
    except ConfigError as error:  # a token file that went away is our trouble, and no reason to fail the page
        return ControlError("", "", "", str(error))
