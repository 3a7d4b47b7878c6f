"""What a worker's HTTP server tells: its /metrics page, fault tolerance, and health where there is no gRPC."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

from vllm_cp import ControlError, HealthStatus, NotSupported
from vllm_cp.engine_page import read_page_async
from vllm_cp.faults import AsyncFaultTolerance, HttpConnection
from vllm_cp.models.probe import Answer, EngineMetrics, EngineState, RoundTrip
from vllm_cp.observer import Observer
from vllm_cp_exporter.dials import Dials
from vllm_cp_exporter.pace import jittered, rest

__all__ = ["HttpSide"]

#: A route that a server does not have is asked for again this rarely, in case another server took its place.
_AGAIN_S = 600.0
#: Between two looks at a worker that is down, in its first minute and later.
_REDIAL_S = 1.0
_REDIAL_LATER_S = 10.0
_FIRST_MINUTE_S = 60.0


class HttpSide:
    """The HTTP half of watching one worker."""

    def __init__(
        self,
        connection: HttpConnection,
        observer: Observer,
        *,
        interval_s: float,
        has_grpc: bool,
        gives_up_after_s: float,
        dials: Dials,
        attempted: asyncio.Event,
        publish: Callable[[], None],
    ) -> None:
        """``gives_up_after_s``: how long an unhealthy engine waits for an instruction before it dies."""
        self._client = AsyncFaultTolerance(connection)
        self._observer = observer
        self._interval = interval_s
        self._has_grpc = has_grpc
        self._gives_up_after = gives_up_after_s
        self._dials = dials
        self._attempted = attempted
        self._publish = publish
        self._page: tuple[float, EngineMetrics] | None = None
        self._gives_up: dict[int, float] = {}
        self._counting: str | None = None
        if not has_grpc:
            # Fault tolerance and health know no round trip; the token counters may prove what they do not.
            observer.feed(round_trip=RoundTrip(answer=Answer.UNSUPPORTED))

    @property
    def page(self) -> EngineMetrics | None:
        """The worker's page, unless the last one is older than three intervals."""
        if self._page is None or time.monotonic() - self._page[0] > 3 * self._interval:
            return None
        return self._page[1]

    @property
    def gives_up_at(self) -> dict[int, float]:
        """Unix seconds at which each unhealthy engine dies unless it is told to retry."""
        engines = self._observer.state.evidence.engines
        ill = {each.engine for each in engines if each.state is EngineState.UNHEALTHY}
        return {engine: at for engine, at in self._gives_up.items() if engine in ill}

    def loops(self) -> list[Coroutine[Any, Any, None]]:
        """What has to run, all at once, until cancelled."""
        loops: list[Coroutine[Any, Any, None]] = [self._read_pages(), self._read_faults()]
        return loops if self._has_grpc else [*loops, self._ask_health()]

    def change(self, *, interval_s: float, gives_up_after_s: float) -> None:
        """Go on in another way, on the same connections."""
        self._interval = interval_s
        self._gives_up_after = gives_up_after_s

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def _read_pages(self) -> None:
        while True:
            pause = self._interval
            if self._observer.state.evidence.broken is not None:  # nobody there; its health says when it is back
                await rest(jittered(pause))
                continue
            try:
                page = await read_page_async(self._client)
            except NotSupported:
                pause = _AGAIN_S
            except ControlError:
                pass  # an absent page accuses nobody; what was proved by it grows old
            else:
                self._page = (time.monotonic(), page)
                self._observer.metrics(page)
                if not self._has_grpc and page.process_start is not None:
                    # Without GetServerInfo the process's start tells one instance from the next.
                    self._observer.feed(instance_id=f"started-{page.process_start:.2f}")
                self._publish()
            await rest(jittered(pause))

    async def _read_faults(self) -> None:
        while True:
            pause = self._interval
            if self._observer.state.evidence.broken is not None:
                await rest(jittered(pause))
                continue
            try:
                status = await self._client.status()
            except NotSupported:
                pause = _AGAIN_S
            except ControlError:
                pass  # that the worker is gone is for its health to say
            else:
                self._observer.fault_tolerance(status.engines)
                self._count_down({e.engine for e in status.engines if e.state is EngineState.UNHEALTHY})
                self._publish()
            await rest(jittered(pause))

    def _count_down(self, unhealthy: set[int]) -> None:
        now, instance = self._observer.clock.wall(), self._observer.state.instance_id
        known = self._gives_up if instance == self._counting else {}
        self._counting = instance
        self._gives_up = {engine: known.get(engine, now + self._gives_up_after) for engine in sorted(unhealthy)}

    async def _ask_health(self) -> None:
        down_since: float | None = None
        while True:
            began = self._observer.clock.monotonic()
            answer = await (self._health() if down_since is None and self._attempted.is_set() else self._dial())
            self._observer.health(answer, began=began)
            self._attempted.set()
            self._publish()
            pause = self._interval
            if isinstance(answer, ControlError):
                now = time.monotonic()
                down_since = now if down_since is None else down_since
                early = now - down_since < _FIRST_MINUTE_S
                pause = min(_REDIAL_S, self._interval) if early else _REDIAL_LATER_S
            else:
                down_since = None
            await rest(jittered(pause))

    async def _dial(self) -> HealthStatus | ControlError:
        async with self._dials:
            return await self._health()

    async def _health(self) -> HealthStatus | ControlError:
        try:
            return await self._client.health()
        except ControlError as error:
            return error
