"""Reading a source in a test: a task that collects the sets, and a clock that only moves when told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType

from vllm_cp.discovery import DiscoveredTarget, Discoverer, TargetSet
from vllm_cp.discovery.merge import reading

PATIENCE_S = 10.0


class Following:
    """``async with Following(source) as seen``: reads the stream of ``source`` until the end of the block."""

    def __init__(self, source: Discoverer) -> None:
        self._source = source
        self._news = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None
        self.sets: list[TargetSet] = []

    @property
    def keys(self) -> list[str]:
        """The keys of the newest set."""
        return [target.key for target in self.sets[-1].targets]

    @property
    def targets(self) -> dict[str, DiscoveredTarget]:
        """The newest set by key."""
        return self.sets[-1].by_key

    async def count(self, sets: int) -> TargetSet:
        """Wait until that many sets have come; the newest."""
        return await self._until(lambda: len(self.sets) >= sets, f"{sets} sets")

    async def until(self, good: Callable[[TargetSet], bool], what: str = "the expected set") -> TargetSet:
        """Wait until the newest set is as it should be; that set."""
        return await self._until(lambda: bool(self.sets) and good(self.sets[-1]), what)

    async def until_error(self, words: str) -> str:
        """Wait until the status has an error with these words in it; that error."""
        await until(lambda: words in (self._source.status.error or ""), words)
        return self._source.status.error or ""

    async def _until(self, ready: Callable[[], bool], what: str) -> TargetSet:
        assert self._task is not None
        waiting = asyncio.ensure_future(self._wait(ready))
        done, _ = await asyncio.wait({waiting, self._task}, timeout=PATIENCE_S, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if self._task in done:
            self._task.result()
        assert waiting in done, f"{what} did not come; the newest is {self.sets[-1:]}, {self._source.status}"
        return self.sets[-1]

    async def _wait(self, ready: Callable[[], bool]) -> None:
        async with self._news:
            await self._news.wait_for(ready)

    async def _read(self) -> None:
        async with reading(self._source) as sets:
            async for targets in sets:
                async with self._news:
                    self.sets.append(targets)
                    self._news.notify_all()

    async def __aenter__(self) -> Following:
        self._task = asyncio.ensure_future(self._read())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._task is not None
        self._task.cancel()
        (ended,) = await asyncio.gather(self._task, return_exceptions=True)
        if error is None and isinstance(ended, Exception):
            raise ended


async def until(ready: Callable[[], bool], what: str = "it") -> bool:
    """Poll until something holds that nobody announces."""
    deadline = asyncio.get_running_loop().time() + PATIENCE_S
    while not ready():
        assert asyncio.get_running_loop().time() < deadline, f"{what} did not happen"
        await asyncio.sleep(0.005)
    return True


class FakeClock:
    """Time for one sleeper. Pass ``now`` and ``sleep`` to a source; ``advance`` moves it on."""

    def __init__(self) -> None:
        self.time = 1_000.0
        self.naps: list[float] = []
        self._due: float | None = None
        self._wake = asyncio.Event()
        self._asleep = asyncio.Event()

    def now(self) -> float:
        """Seconds."""
        return self.time

    async def sleep(self, seconds: float) -> None:
        """Sleep until the clock has been moved on that far."""
        self.naps.append(seconds)
        self._due = self.time + seconds
        self._wake.clear()
        self._asleep.set()
        await self._wake.wait()

    async def asleep(self) -> float:
        """Wait until the source sleeps; for how many seconds it means to."""
        await asyncio.wait_for(self._asleep.wait(), PATIENCE_S)
        assert self._due is not None
        return self._due - self.time

    async def advance(self, seconds: float) -> None:
        """Let time pass, nap by nap, until the source sleeps beyond it."""
        end = self.time + seconds
        await self.asleep()
        while self._due is not None and self._due <= end:
            self.time = max(self.time, self._due)
            self._asleep.clear()
            self._wake.set()
            await self.asleep()
        self.time = end
