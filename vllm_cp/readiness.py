"""The ladder of one worker: how far it is proved that it can serve.

One look asks the health service, reads the instance once per connection, and keeps at most one round trip to the
engines in flight. A look costs the frontend two small calls and the engines one; see ``Rung`` for what each proves.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any

from vllm_cp._goals import Goal, Progress
from vllm_cp.aio import AsyncControlClient
from vllm_cp.client import ControlClient
from vllm_cp.episodes import Rules, WorkerState
from vllm_cp.errors import ClientClosed, ControlError
from vllm_cp.models.ladder import Rung, Rungs
from vllm_cp.models.startup import Startup
from vllm_cp.observer import CANARY, ROUND_TRIP_S, Clock, Observer

__all__ = ["AsyncLadder", "Ladder", "Progress"]

#: How long one look waits for the engines; a later look collects an answer that takes longer.
PATIENCE_S = 1.0


class Ladder:
    """The ladder of one worker, for one thread at a time. Close it, or use ``with``; the client stays yours."""

    def __init__(
        self,
        client: ControlClient,
        *,
        rules: Rules | None = None,
        clock: Clock | None = None,
        service: str = "",
        canary: bool = False,
    ) -> None:
        """``service``: the health name that must be SERVING. ``canary``: allow a one-token generation per instance."""
        self._client = client
        self._observer = Observer(rules=rules, clock=clock)
        self._observer.feed(canaries=canary)
        self._service = service
        self._canary = canary
        self._canary_s = self._observer.state.rules.answer_within_s
        self._asked = 0.0
        self._answers: list[bool | ControlError] = []
        self._answered = threading.Event()
        self._pending = False

    @property
    def state(self) -> WorkerState:
        """All that is known, faults included."""
        return self._observer.state

    def close(self) -> None:
        """Stop looking. A round trip in flight ends with its client."""
        self._pending = False

    def __enter__(self) -> Ladder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def observe(self) -> Rungs:
        """Look once; the ladder as it stands then. Never raises ControlError: a failure is what is seen."""
        observer = self._observer
        began = observer.clock.monotonic()
        observer.health(_outcome(lambda: self._client.check(self._service)), began=began)
        if observer.wants_instance:
            observer.server_info(_outcome(self._client.server_info))
        self._collect()
        if observer.wants_round_trip and not self._pending:
            self._ask()
        if self._pending and self._answered.wait(PATIENCE_S):
            self._collect()
        if self._canary and observer.wants_canary:
            observer.canary(_outcome(lambda: self._client.generate(CANARY, timeout_s=self._canary_s)))
        observer.tick()
        return observer.state.rungs

    def wait_until(
        self,
        goal: Rung | str,
        deadline_s: float,
        on_progress: Callable[[Progress], None] | None = None,
        *,
        every_s: float = 1.0,
    ) -> Rungs:
        """Look until the goal is reached: a rung, ``"gone"`` (the port is closed) or ``"drained"`` (draining or gone).

        Raises OutOfTime with the last state seen, and NotSupported when this worker can never prove the rung.
        ``on_progress`` is called after each look.
        """
        aim = Goal(goal, self._client.target, deadline_s, self._observer.clock)
        while True:
            self.observe()
            if aim.reached(self.state, on_progress):
                return self.state.rungs
            time.sleep(aim.pause(every_s))

    def measure_startup(self, deadline_s: float, *, every_s: float = 0.1) -> Startup:
        """The clocks of a start, from a closed port to the first generated token. Sends one canary of one token.

        Call it when the worker is started; of one that is up already no clock can be read. Raises OutOfTime.
        """
        self._canary, self._canary_s = True, deadline_s
        self._observer.feed(canaries=True)
        self.wait_until(Rung.WARM, deadline_s, every_s=every_s)
        return self.state.startup

    def _ask(self) -> None:
        self._asked = self._observer.clock.monotonic()
        self._observer.asked()
        self._pending = True
        self._answered.clear()

        def ask() -> None:
            try:
                self._answers.append(_outcome(lambda: self._client.is_paused(timeout_s=ROUND_TRIP_S)))
            except ClientClosed:
                return
            self._answered.set()

        threading.Thread(target=ask, daemon=True, name="vllm-cp-round-trip").start()

    def _collect(self) -> None:
        if self._answered.is_set() and self._answers:
            self._observer.round_trip(self._answers.pop(), began=self._asked)
            self._pending = False


class AsyncLadder:
    """The ladder of one worker for asyncio: the same names and meanings as ``Ladder``."""

    def __init__(
        self,
        client: AsyncControlClient,
        *,
        rules: Rules | None = None,
        clock: Clock | None = None,
        service: str = "",
        canary: bool = False,
    ) -> None:
        """``service``: the health name that must be SERVING. ``canary``: allow a one-token generation per instance."""
        self._client = client
        self._observer = Observer(rules=rules, clock=clock)
        self._observer.feed(canaries=canary)
        self._service = service
        self._canary = canary
        self._canary_s = self._observer.state.rules.answer_within_s
        self._asked = 0.0
        self._pending: asyncio.Task[bool | ControlError] | None = None

    @property
    def state(self) -> WorkerState:
        """All that is known, faults included."""
        return self._observer.state

    async def close(self) -> None:
        """Stop looking; a round trip in flight is given up."""
        if self._pending is not None:
            self._pending.cancel()
            await asyncio.gather(self._pending, return_exceptions=True)
            self._pending = None

    async def __aenter__(self) -> AsyncLadder:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def observe(self) -> Rungs:
        """Look once; the ladder as it stands then. Never raises ControlError: a failure is what is seen."""
        observer = self._observer
        began = observer.clock.monotonic()
        observer.health(await _aoutcome(self._client.check(self._service)), began=began)
        if observer.wants_instance:
            observer.server_info(await _aoutcome(self._client.server_info()))
        self._collect()
        if observer.wants_round_trip and self._pending is None:
            self._asked = observer.clock.monotonic()
            observer.asked()
            self._pending = asyncio.ensure_future(_aoutcome(self._client.is_paused(timeout_s=ROUND_TRIP_S)))
        if self._pending is not None:
            await asyncio.wait({self._pending}, timeout=PATIENCE_S)
            self._collect()
        if self._canary and observer.wants_canary:
            observer.canary(await _aoutcome(self._client.generate(CANARY, timeout_s=self._canary_s)))
        observer.tick()
        return observer.state.rungs

    async def wait_until(
        self,
        goal: Rung | str,
        deadline_s: float,
        on_progress: Callable[[Progress], None] | None = None,
        *,
        every_s: float = 1.0,
    ) -> Rungs:
        """Look until the goal is reached; see ``Ladder.wait_until``."""
        aim = Goal(goal, self._client.target, deadline_s, self._observer.clock)
        while True:
            await self.observe()
            if aim.reached(self.state, on_progress):
                return self.state.rungs
            await asyncio.sleep(aim.pause(every_s))

    async def measure_startup(self, deadline_s: float, *, every_s: float = 0.1) -> Startup:
        """The clocks of a start; see ``Ladder.measure_startup``."""
        self._canary, self._canary_s = True, deadline_s
        self._observer.feed(canaries=True)
        await self.wait_until(Rung.WARM, deadline_s, every_s=every_s)
        return self.state.startup

    def _collect(self) -> None:
        if self._pending is not None and self._pending.done():
            self._observer.round_trip(self._pending.result(), began=self._asked)
            self._pending = None


def _outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except ControlError as error:
        return error


async def _aoutcome(call: Coroutine[Any, Any, Any]) -> Any:
    try:
        return await call
    except ControlError as error:
        return error
