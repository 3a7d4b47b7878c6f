"""Watching workers: one task each for the health stream and the round trips, all in one event loop.

What a broken stream means, a new call says: a Check goes out before each attempt at the stream.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from vllm_cp.aio import AsyncControlClient
from vllm_cp.cli._context import name_of
from vllm_cp.config import Connection, Retry
from vllm_cp.episodes import Rules, Transition, WorkerState
from vllm_cp.errors import ClientClosed, ControlError, OutOfTime, WorkerUnreachable
from vllm_cp.models.health import HealthStatus
from vllm_cp.models.probe import EngineMetrics
from vllm_cp.models.rpc import RpcRecord
from vllm_cp.models.server import ServerInfo
from vllm_cp.observer import Observer

__all__ = ["Pace", "Stop", "Watcher", "watch_all"]

Emit = Callable[[str, Transition], None]

#: A question to a frozen engine queues there, so it is not given up and asked again.
_ROUND_TRIP_S = 600.0
#: After a stream broke, how long a new call may take before the worker counts as unreachable.
_CONFIRM_S = 1.0
#: Between two dials: in the first minute of an outage, and later.
_REDIAL_S, _REDIAL_LATER_S, _FIRST_MINUTE_S = 1.0, 10.0, 60.0
_TICK_S = 0.5
#: How often it is looked whether anybody still reads.
_LOOK_S = 0.2


class Stop(Exception):
    """Raised by ``emit`` to end the watch."""


class Pace(NamedTuple):
    """How long to watch, and how closely."""

    #: Health name to follow.
    service: str
    #: Seconds between round trips.
    every_s: float
    #: Seconds in all; ``None`` goes on until something else ends it.
    for_s: float | None


def watch_all(
    connections: Sequence[Connection],
    emit: Emit,
    pace: Pace,
    *,
    ended: Callable[[], bool],
    on_rpc: Callable[[RpcRecord], None] | None,
) -> None:
    """Hand each transition of each worker to ``emit``, until the time is up, it raises Stop, or ``ended`` says so.

    Raises KeyboardInterrupt on Ctrl-C, after all streams were closed.
    """
    watchers = [partial(Watcher, connection, emit, pace, on_rpc) for connection in connections]
    with suppress(Stop):
        if asyncio.run(_watch_all(watchers, pace.for_s, ended)):
            raise KeyboardInterrupt


async def _watch_all(watchers: Sequence[Callable[[], Watcher]], for_s: float | None, ended: Callable[[], bool]) -> bool:
    """Whether it was Ctrl-C that ended it."""
    interrupted = asyncio.Event()
    loop = asyncio.get_running_loop()

    def interrupt() -> None:
        interrupted.set()
        # Whoever presses it again has no patience for a clean end.
        loop.add_signal_handler(signal.SIGINT, os._exit, 130)

    with suppress(ValueError, RuntimeError):  # not in the main thread: then it is for others to end it
        loop.add_signal_handler(signal.SIGINT, interrupt)
    deadline = None if for_s is None else time.monotonic() + for_s
    tasks = [asyncio.create_task(make().run()) for make in watchers]
    stop = asyncio.create_task(interrupted.wait())
    try:
        while not ended() and (deadline is None or time.monotonic() < deadline):
            left = _LOOK_S if deadline is None else min(_LOOK_S, max(0.0, deadline - time.monotonic()))
            done, _ = await asyncio.wait([*tasks, stop], timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if stop in done:
                return True
            for task in done:
                task.result()
        return False
    finally:
        stop.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with suppress(ValueError, RuntimeError):
            loop.remove_signal_handler(signal.SIGINT)


class Watcher:
    """One worker."""

    def __init__(
        self,
        connection: Connection,
        emit: Emit,
        pace: Pace,
        on_rpc: Callable[[RpcRecord], None] | None,
    ) -> None:
        # Each loop here asks again by itself, and a retry would only hide how long an answer took.
        self._connection = replace(connection, retry=Retry(attempts=1))
        self._service = pace.service
        self._every_s = pace.every_s
        self._on_rpc = on_rpc
        self._client = self._new_client()
        self._due = asyncio.Event()
        self._dialling = False

        def changed(transitions: tuple[Transition, ...]) -> None:
            for transition in transitions:
                emit(self.name, transition)

        self.name = name_of(connection)
        #: The last answer to GetServerInfo, which is asked for anew with each instance.
        self.info: ServerInfo | None = None
        self._observer = Observer(rules=Rules(interval_s=pace.every_s), on_transitions=changed)

    @property
    def state(self) -> WorkerState:
        """All that is known now."""
        return self._observer.state

    def metrics(self, page: EngineMetrics) -> None:
        """The worker's own /metrics page, read by somebody else."""
        self._observer.metrics(page)

    async def run(self) -> None:
        """Watch until cancelled, then close the connection."""
        loops = [self._listen(), self._ask(), self._tick()]
        tasks = [asyncio.create_task(loop) for loop in loops]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._client.close()

    async def _listen(self) -> None:
        down_since: float | None = None
        broke = False
        while True:
            answer = await self._dial(_CONFIRM_S if broke else None)
            broke = False
            began = time.monotonic()
            if isinstance(answer, HealthStatus):
                down_since = None
                broke = await self._stream()
            now = time.monotonic()
            if broke and now - began > _REDIAL_S:
                continue
            down_since = now if down_since is None else down_since
            await asyncio.sleep(_jittered(_REDIAL_S if now - down_since < _FIRST_MINUTE_S else _REDIAL_LATER_S))

    async def _dial(self, timeout_s: float | None) -> HealthStatus | ControlError:
        began = self._observer.clock.monotonic()
        answer: HealthStatus | ControlError
        self._dialling = True
        try:
            answer = await self._client.check(self._service, timeout_s=timeout_s)
        except ControlError as error:
            answer = error
        finally:
            self._dialling = False
        self._heard(answer, began)
        return answer

    async def _stream(self) -> bool:
        """Follow the health stream; True when it is worth dialling again at once."""
        try:
            async for status in self._client.watch(self._service, check_every_s=self._every_s):
                self._heard(status)
        except OutOfTime:
            # The peer vanished without a word: this connection may never notice, so a new one is made.
            old, self._client = self._client, self._new_client()
            await old.close()
            return True
        except ControlError as error:
            # Any other error is a server without a Watch for us: Checks go on at the pace of the dials.
            return isinstance(error, WorkerUnreachable)
        self._observer.stream_ended()
        return True

    def _heard(self, answer: HealthStatus | ControlError, began: float | None = None) -> None:
        before = self._observer.state.evidence.health
        self._observer.health(answer, began=began)
        if isinstance(answer, HealthStatus) and answer is not before:
            self._due.set()

    async def _ask(self) -> None:
        """Which instance it is, and round trips, one at a time: the next is only asked when the last was answered."""
        while True:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._due.wait(), _jittered(self._every_s))
            self._due.clear()
            with suppress(ClientClosed):  # replaced under way; the question goes on being unanswered
                await self._ask_once()

    async def _ask_once(self) -> None:
        if self._observer.wants_instance:
            answer = await _outcome(self._client.server_info())
            self.info = answer if isinstance(answer, ServerInfo) else self.info
            self._observer.server_info(answer)
        if self._observer.wants_round_trip:
            began = self._observer.clock.monotonic()
            self._observer.asked()
            self._observer.round_trip(await _outcome(self._client.is_paused(timeout_s=_ROUND_TRIP_S)), began=began)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self._observer.tick()

    def _new_client(self) -> AsyncControlClient:
        return AsyncControlClient(self._connection, on_rpc=self._rpc)

    def _rpc(self, record: RpcRecord) -> None:
        if self._on_rpc is not None:
            self._on_rpc(record)
        # A Check beside the stream; what one of ours brought follows at once.
        if record.method == "Health.Check" and record.code == "OK" and not self._dialling:
            self._observer.contact()


async def _outcome(call: Any) -> Any:
    try:
        return await call
    except ControlError as error:
        return error


def _jittered(seconds: float) -> float:
    return seconds * random.uniform(0.8, 1.2)  # noqa: S311  (spreads load, guards nothing)
