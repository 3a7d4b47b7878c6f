"""A fleet is upgraded while it is watched: fifty workers go and come back, and only the one that crashes is a fault."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from vllm_cp import Connection
from vllm_cp.episodes import Rules, WorkerState
from vllm_cp.testing import FakeFleet
from vllm_cp_exporter.config import ExporterConfig, WorkerConfig
from vllm_cp_exporter.dials import Dials
from vllm_cp_exporter.selfmetrics import SelfMetrics
from vllm_cp_exporter.snapshot import Board, WorkerView
from vllm_cp_exporter.watch import Watcher

SIZE = 50
#: Slower than elsewhere: fifty watchers and fifty workers share this machine.
RULES = Rules(answer_within_s=4.0, window_s=2.5, interval_s=1.0, drain_after_s=0.6)
DRAIN_S = 1.6
#: From one worker's turn to the next one's.
STEP_S = 0.03


class _Watch:
    """Fifty watchers, as the daemon has them; targets may come and go."""

    def __init__(self, fleet: FakeFleet) -> None:
        self.fleet = fleet
        self.board = Board()
        self.dials = Dials()
        self.metrics = SelfMetrics()
        self.watchers: dict[str, Watcher] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}
        #: What was counted for targets that are gone by now.
        self.gone: list[WorkerState] = []

    def add(self, key: str, target: str) -> None:
        config = WorkerConfig(key=key, connection=Connection.parse(target), rules=RULES)
        settings = ExporterConfig(workers=(config,), probe_interval_s=RULES.interval_s)
        self.watchers[key] = Watcher(config, self.board, self.metrics, settings, dials=self.dials)
        self.tasks[key] = asyncio.create_task(self.watchers[key].run())

    async def remove(self, key: str) -> None:
        """Discovery no longer knows it."""
        watcher = self.watchers.pop(key)
        watcher.leave()
        self.gone.append(watcher.observer.state)
        await self._end(self.tasks.pop(key))

    async def _end(self, task: asyncio.Task[None]) -> None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def close(self) -> None:
        await asyncio.gather(*map(self._end, self.tasks.values()))

    def view(self, key: str) -> WorkerView:
        return self.board.snapshot.workers[key]

    async def ready(self, key: str, restarts: int = 0) -> None:
        """Until the worker is ready and nothing is left to be counted."""

        async def look() -> None:
            while True:
                state = self.view(key).state
                if state.ready and state.fault is None and state.restarts == restarts:
                    return
                await asyncio.sleep(0.02)

        await asyncio.wait_for(look(), 30)

    def faults(self) -> dict[str, int]:
        """All that were counted, by cause."""
        counted: Counter[str] = Counter()
        for state in [*(view.state for view in self.board.snapshot.workers.values()), *self.gone]:
            counted.update({cause.value: n for cause, n in state.faults.items() if n})
        return dict(counted)


@asynccontextmanager
async def _watching() -> AsyncIterator[_Watch]:
    async with FakeFleet(SIZE) as fleet:
        watch = _Watch(fleet)
        try:
            for number, target in enumerate(fleet.targets):
                watch.add(f"w{number}", target)
            await asyncio.gather(*(watch.ready(f"w{number}") for number in range(SIZE)))
            yield watch
        finally:
            await watch.close()


async def _upgrade(watch: _Watch, number: int) -> None:
    """One worker's turn: those with even numbers drain and come back, the others are taken away and replaced."""
    key, worker = f"w{number}", watch.fleet.worker(number)
    await asyncio.sleep(number * STEP_S)
    if number % 2 == 0:
        await asyncio.to_thread(worker.drain, DRAIN_S)
        await asyncio.sleep(DRAIN_S + 0.2)
        await asyncio.to_thread(worker.restart)
        await watch.ready(key, restarts=1)
        return
    await asyncio.to_thread(worker.stop)
    await asyncio.sleep(RULES.window_s / 5)
    await watch.remove(key)
    await asyncio.to_thread(worker.restart)
    watch.add(f"{key}-new", worker.target)
    await watch.ready(f"{key}-new")


async def _crash(watch: _Watch, number: int) -> None:
    """One of them falls over instead, and is started again."""
    worker = watch.fleet.worker(number)
    await asyncio.sleep(number * STEP_S)
    await asyncio.to_thread(worker.die, reported=True)
    await asyncio.sleep(1.0)
    await asyncio.to_thread(worker.restart)
    await watch.ready(f"w{number}", restarts=1)


@pytest.mark.parametrize("crashes", [pytest.param(0, marks=pytest.mark.slow), 1])
async def test_a_rolling_upgrade(crashes: int) -> None:
    """Fifty workers are upgraded one after the other: zero faults; one of them crashes meanwhile: one."""
    crashing = {17} if crashes else set()
    async with _watching() as watch:
        turns = [(_crash if number in crashing else _upgrade)(watch, number) for number in range(SIZE)]
        await asyncio.gather(*turns)
        assert watch.faults() == ({"engine_reported": 1} if crashes else {})
        assert [key for key in watch.watchers if any(watch.view(key).state.faults.values())] == [
            f"w{number}" for number in crashing
        ]
        assert all(view.state.ready for view in watch.board.snapshot.workers.values())
        assert len(watch.gone) == 25 - len(crashing)
        assert not any(state.fault for state in watch.gone)
