"""What ``vllm-cp top`` knows: one record per worker, made anew whenever somebody looks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from vllm_cp.cli._context import name_of
from vllm_cp.cli._ladder import RUNGS, why_of
from vllm_cp.cli._times import iso
from vllm_cp.cli._watching import Pace, Watcher
from vllm_cp.config import Connection
from vllm_cp.engine_page import read_page_async
from vllm_cp.errors import ControlError
from vllm_cp.faults import AsyncFaultTolerance, HttpConnection
from vllm_cp.models.probe import EngineMetrics

__all__ = ["Board"]

#: Between two reads of a worker's /metrics, seconds. A page takes the worker a few milliseconds to write.
_PAGE_S = 2.0
#: A page that is older says nothing of now, seconds.
_STALE_S = 15.0


class Board:
    """Every worker, watched; with its /metrics where the URL is known. Belongs to one event loop."""

    def __init__(self, connections: Sequence[Connection], urls: Mapping[str, HttpConnection], every_s: float) -> None:
        pace = Pace("", every_s, None)
        self._workers = [_Worker(connection, urls.get(name_of(connection)), pace) for connection in connections]

    async def run(self) -> None:
        """Watch until cancelled."""
        tasks = [asyncio.create_task(work) for worker in self._workers for work in worker.work()]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def records(self) -> list[dict[str, Any]]:
        """The workers as they are now, in the order given."""
        return [worker.record() for worker in self._workers]

    @property
    def settled(self) -> bool:
        """Whether every worker has been heard of, so that a look is worth while."""
        return all(worker.settled for worker in self._workers)


class _Worker:
    def __init__(self, connection: Connection, url: HttpConnection | None, pace: Pace) -> None:
        self._watcher = Watcher(connection, lambda *_: None, pace, None)
        self._problem: str = getattr(connection, "problem", "")
        self._url = url
        self._page: EngineMetrics | None = None
        self._page_at = 0.0
        self._page_tried = url is None

    def work(self) -> list[Any]:
        """What to run."""
        watching = [] if self._problem else [self._watcher.run()]
        return watching if self._url is None else [*watching, self._read(self._url)]

    @property
    def settled(self) -> bool:
        """Whether it answered everything once, or will not."""
        state = self._watcher.state
        reached = state.rungs.reachable.holds
        known = self._watcher.info is not None and (state.ready or state.rungs.answering.holds is not None)
        return bool(self._problem) or (self._page_tried and (reached is False or (reached is True and known)))

    def record(self) -> dict[str, Any]:
        """The worker as it is now."""
        state, info = self._watcher.state, self._watcher.info
        page = self._page if time.monotonic() - self._page_at < _STALE_S else None
        fault = state.open_fault
        return {
            "target": self._watcher.name,
            "ready": state.ready,
            "state": "ready" if state.ready else state.reason.value if state.reason else "unknown",
            "rungs": {name: state.rungs[rung].holds for rung, name in zip(_rungs(), RUNGS, strict=True)},
            "why": self._problem or ("" if state.ready else why_of(state)),
            "kv_blocks": info.total_kv_blocks if info else None,
            "running": _whole(page.running) if page else None,
            "waiting": _whole(page.waiting) if page else None,
            "kv_used_ratio": page.kv_cache_usage_ratio if page else None,
            # Those that are over, and the one that goes on; neither is there before its cause is certain.
            "faults": sum(state.faults.values()),
            "fault_since": iso(fault.episode.start) if fault else None,
            "last_recovery_s": None if state.last_recovery_s is None else round(state.last_recovery_s, 1),
            "restarts": state.restarts,
            "engine_version": (info.engine_version or None) if info else None,
            "instance_id": state.instance_id,
        }

    async def _read(self, url: HttpConnection) -> None:
        async with AsyncFaultTolerance(url) as client:
            while True:
                with suppress(ControlError):
                    page = await read_page_async(client)
                    self._page, self._page_at = page, time.monotonic()
                    self._watcher.metrics(page)
                self._page_tried = True
                await asyncio.sleep(_PAGE_S)


def _rungs() -> Sequence[Any]:
    from vllm_cp.models.ladder import Rung

    return list(Rung)


def _whole(number: float | None) -> float | None:
    """Counts without a decimal point."""
    return int(number) if number is not None and number.is_integer() else number
