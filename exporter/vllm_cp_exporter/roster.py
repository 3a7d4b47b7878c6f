"""The watchers: one per worker that is wanted, each in a task of its own. A change to one disturbs no other."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence

from vllm_cp.episodes import remember
from vllm_cp_exporter.config import ExporterConfig, WorkerConfig
from vllm_cp_exporter.dials import Dials
from vllm_cp_exporter.selfmetrics import SelfMetrics
from vllm_cp_exporter.snapshot import Board
from vllm_cp_exporter.statefile import Remembered
from vllm_cp_exporter.watch import Watcher

__all__ = ["Roster"]

log = logging.getLogger("vllm_cp_exporter.daemon")

#: More workers than this are not all asked in the same instant.
_SPREAD_ABOVE = 20
#: How many workers a line names.
_NAMED = 5


class Roster:
    """Who is watched. ``apply`` makes it so."""

    def __init__(
        self,
        board: Board,
        metrics: SelfMetrics,
        settings: ExporterConfig,
        *,
        remembered: Callable[[str], Remembered | None] = lambda _: None,
    ) -> None:
        """``remembered`` gives what outlived the last daemon of a worker, once."""
        self._board = board
        self._metrics = metrics
        self._settings = settings
        self._remembered = remembered
        self._dials = Dials()
        self._kv_turn = asyncio.Lock()
        self._watchers: dict[str, Watcher] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Task[None]] = set()

    @property
    def watchers(self) -> Mapping[str, Watcher]:
        """By key."""
        return self._watchers

    @property
    def configs(self) -> dict[str, WorkerConfig]:
        """How each is reached, by key."""
        return {key: watcher.config for key, watcher in self._watchers.items()}

    def apply(self, wanted: Mapping[str, WorkerConfig], settings: ExporterConfig) -> None:
        """Watch these, and only these, from now on."""
        everyone = settings is not self._settings
        self._settings = settings
        gone = [key for key in self._watchers if key not in wanted]
        for key in gone:
            self._remove(key)
        new = [worker for key, worker in wanted.items() if key not in self._watchers]
        changed = [
            worker.key
            for worker in wanted.values()
            if (watcher := self._watchers.get(worker.key)) is not None
            and (everyone or (watcher.config is not worker and watcher.config != worker))
            and self._change(watcher, worker)
        ]
        self._add(new)
        if gone or changed or new:
            self._tell(added=[worker.key for worker in new], removed=gone, changed=changed)

    def _tell(self, **changes: list[str]) -> None:
        """One line, however many there are."""
        fields: dict[str, object] = {"watched": len(self._watchers)}
        for what, keys in changes.items():
            if keys:
                fields[what] = len(keys)
                fields[f"{what}_names"] = ",".join(keys[:_NAMED]) + (",…" if len(keys) > _NAMED else "")
        log.info("targets", extra={"fields": fields})

    def close(self) -> set[asyncio.Task[None]]:
        """Stop watching. Returns the tasks that are about to end."""
        for task in self._tasks.values():
            task.cancel()
        return {*self._tasks.values(), *self._ending}

    def _add(self, workers: Sequence[WorkerConfig]) -> None:
        gap = self._settings.probe_interval_s / len(workers) if len(workers) > _SPREAD_ABOVE else 0.0
        for place, worker in enumerate(workers):
            self._watchers[worker.key] = self._watcher(worker, self._remembered(worker.key))
            self._tasks[worker.key] = asyncio.create_task(self._keep(worker.key, place * gap))

    def _remove(self, key: str) -> None:
        watcher, task = self._watchers.pop(key), self._tasks.pop(key)
        watcher.leave()
        self._cancel(task)

    def _change(self, watcher: Watcher, worker: WorkerConfig) -> bool:
        """Whether anything about the worker is different now."""
        different = watcher.config != worker
        if not watcher.change(worker, self._settings):
            old = self._tasks[worker.key]
            self._cancel(old)
            self._tasks[worker.key] = asyncio.create_task(self._keep(worker.key, after=old))
        return different

    def _cancel(self, task: asyncio.Task[None]) -> None:
        task.cancel()
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    def _watcher(self, worker: WorkerConfig, remembered: Remembered | None) -> Watcher:
        return Watcher(
            worker,
            self._board,
            self._metrics,
            self._settings,
            dials=self._dials,
            kv_turn=self._kv_turn,
            remembered=remembered,
        )

    async def _keep(self, key: str, after_s: float = 0.0, *, after: asyncio.Task[None] | None = None) -> None:
        """Run one watcher for good. Should it fail, that costs this worker a moment and its counters, nobody else."""
        if after is not None:
            await asyncio.wait([after])
            after = None  # else each move would hold on to all before it, and they to their connections
            self._watchers[key].reconnect()
        await asyncio.sleep(after_s)
        while True:
            watcher = self._watchers[key]
            try:
                await watcher.run()
            except Exception:
                log.exception("watcher_failed", extra={"fields": {"worker": key}})
            await asyncio.sleep(self._settings.probe_interval_s)
            kept = Remembered(memory=remember(watcher.observer.state), episodes=watcher.episodes)
            self._watchers[key] = self._watcher(watcher.config, kept)
