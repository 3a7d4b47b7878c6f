"""Both fleets behind one face, so that one test says a thing of both."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

from tests.discovery.following import until
from vllm_cp.fleet import AsyncFleet, Fleet, FleetChange, FleetSnapshot, Outcome


class BothFleet:
    """A fleet of either colour. ``map(lambda worker: worker.server_info())`` is good for both."""

    def __init__(self, colour: str, targets: Any, **options: Any) -> None:
        self.colour = colour
        self.fleet: Any = (Fleet if colour == "sync" else AsyncFleet)(targets, **options)

    async def _run(self, name: str, *args: Any, **kwargs: Any) -> Any:
        method = getattr(self.fleet, name)
        if self.colour == "sync":
            return await asyncio.to_thread(method, *args, **kwargs)
        return await method(*args, **kwargs)

    async def map(self, fn: Callable[[Any], Any], **options: Any) -> list[Outcome[Any]]:
        made: list[Outcome[Any]] = await self._run("map", fn, **options)
        return made

    async def snapshot(self, **options: Any) -> FleetSnapshot:
        made: FleetSnapshot = await self._run("snapshot", **options)
        return made

    async def close(self) -> None:
        await self._run("close")

    def watching(self, **options: Any) -> Watching:
        return Watching(self, **options)

    async def __aenter__(self) -> BothFleet:
        await self._run("start")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()


class Watching:
    """``async with fleet.watching() as changes``: collects what watch brings."""

    def __init__(self, fleet: BothFleet, **options: Any) -> None:
        self._fleet = fleet
        self._options = options
        self._stop = threading.Event()
        self._task: asyncio.Future[None] | None = None
        self.seen: list[FleetChange] = []

    def of(self, kind: type[Any], key: str | None = None) -> list[Any]:
        """The changes of one kind so far, of one worker or of all."""
        return [change for change in self.seen if isinstance(change, kind) and key in (None, change.key)]

    async def until(self, ready: Callable[[], bool], what: str = "the expected change") -> None:
        """Wait until the changes so far are as they should be."""
        assert self._task is not None
        task = self._task
        await until(lambda: task.done() or ready(), f"{what} in {self.seen}")
        if not ready():
            task.result()
        assert ready(), self.seen

    @property
    def ended(self) -> bool:
        """Whether the iterator has come to its end."""
        return self._task is not None and self._task.done()

    def _iterate(self) -> None:
        changes = self._fleet.fleet.watch(**self._options)
        for change in changes:
            self.seen.append(change)
            if self._stop.is_set():
                break
        changes.close()

    async def _read(self) -> None:
        async for change in self._fleet.fleet.watch(**self._options):
            self.seen.append(change)

    async def __aenter__(self) -> Watching:
        if self._fleet.colour == "sync":
            self._task = asyncio.ensure_future(asyncio.to_thread(self._iterate))
        else:
            self._task = asyncio.ensure_future(self._read())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._task is not None
        self._stop.set()
        await self._fleet.close()  # which ends a watch in either colour
        await asyncio.wait((self._task,), timeout=10.0)
        assert self._task.done(), "the watch did not end with its fleet"
        if error is None:
            self._task.result()
