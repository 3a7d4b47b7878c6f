"""One worker under the daemon's own watcher, and all that was published about it, with the time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

from tests.recovery.pace import FAST, PATIENCE_S, Pace
from vllm_cp import Connection
from vllm_cp.episodes import Rules
from vllm_cp.faults import HttpConnection
from vllm_cp.models.episode import Episode
from vllm_cp.models.ladder import Reason, Rung
from vllm_cp_exporter.config import Canary, ExporterConfig, WorkerConfig
from vllm_cp_exporter.dials import Dials
from vllm_cp_exporter.selfmetrics import SelfMetrics
from vllm_cp_exporter.snapshot import Board, WorkerView
from vllm_cp_exporter.statefile import Remembered
from vllm_cp_exporter.watch import Watcher

Check = Callable[[WorkerView], object]


@dataclass(frozen=True)
class Seen:
    """A worker at one moment, by this process's clocks."""

    monotonic: float
    wall: float
    view: WorkerView


class _Recorder(Board):
    """Keeps everything that is published."""

    def __init__(self) -> None:
        super().__init__()
        self.history: list[Seen] = []
        self.changed = asyncio.Event()

    def publish(self, view: WorkerView) -> None:
        self.history.append(Seen(time.monotonic(), time.time(), view))
        self.changed.set()
        super().publish(view)


class Watched:
    """``async with Watched(target, pace) as w:`` watches until the block ends."""

    def __init__(
        self,
        target: str | Connection | None,
        pace: Pace = FAST,
        *,
        http: str = "",
        canary: Canary = Canary.OFF,
        rules: Rules | None = None,
        remembered: Remembered | None = None,
        dials: Dials | None = None,
        gives_up_after_s: float = 120.0,
        kv_events: bool = False,
    ) -> None:
        self.pace = pace
        connection = Connection.parse(target) if isinstance(target, str) else target
        config = WorkerConfig(
            key="w",
            connection=connection,
            http=HttpConnection.parse(http) if http else None,
            canary=canary,
            kv_events=kv_events,
            rules=rules or pace.rules,
        )
        settings = ExporterConfig(
            workers=(config,),
            probe_interval_s=pace.rules.interval_s,
            info_interval_s=10 * pace.rules.interval_s,
            engine_recovery_timeout_s=gives_up_after_s,
        )
        self._board = _Recorder()
        self.metrics = SelfMetrics()
        self.watcher = Watcher(config, self._board, self.metrics, settings, dials=dials, remembered=remembered)
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Watched:
        self._task = asyncio.create_task(self.watcher.run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._task is not None
        failed = self._task.done()
        self._task.cancel()
        ended = (await asyncio.gather(self._task, return_exceptions=True))[0]
        if failed and isinstance(ended, BaseException):
            raise ended

    @property
    def view(self) -> WorkerView:
        """What is published now."""
        return self._board.history[-1].view

    @property
    def faults(self) -> dict[str, int]:
        """Counted faults by cause, without the zeros."""
        return {cause.value: n for cause, n in self.view.state.faults.items() if n}

    @property
    def ends(self) -> dict[str, int]:
        """Counted ends by kind, without the zeros."""
        return {kind.value: n for kind, n in self.view.state.ends.items() if n}

    @property
    def episode(self) -> Episode:
        """The one episode there was; fails when there was another number of them."""
        (episode,) = self.view.episodes
        return episode

    def rungs(self) -> dict[str, bool]:
        """The rungs as they are on the page: absent where neither proved nor refuted."""
        return {rung.value: held.holds for rung, held in self.view.state.rungs if held.holds is not None}

    def since(self, monotonic: float, check: Check) -> Seen | None:
        """The first thing published after that moment for which the check is true."""
        return next((seen for seen in self._board.history if seen.monotonic >= monotonic and check(seen.view)), None)

    async def until(self, check: Check, within_s: float = PATIENCE_S, *, since: float | None = None) -> Seen:
        """The first thing published from now (or from that monotonic second) on for which the check is true."""
        begin = self._board.history[-1].monotonic if since is None else since
        deadline = time.monotonic() + within_s
        while True:
            self._board.changed.clear()
            seen = self.since(begin, check)
            if seen is not None:
                return seen
            try:
                await asyncio.wait_for(self._board.changed.wait(), max(0.0, deadline - time.monotonic()))
            except asyncio.TimeoutError:
                raise TimeoutError(f"waited {within_s:.2f} s; {self._said()}") from None

    async def stays(self, check: Check, for_s: float) -> None:
        """The check is true of all that is published during that time; fails as soon as it is not."""
        try:
            seen = await self.until(lambda view: not check(view), for_s)
        except TimeoutError:
            return
        raise AssertionError(f"it did not stay so: {seen.view.state.reason}, {self._said()}")

    async def ready(self, within_s: float = PATIENCE_S, *, since: float | None = None) -> Seen:
        """Until the worker is ready."""
        return await self.until(lambda view: view.state.ready, within_s, since=since)

    async def ready_and_idle(self) -> None:
        """Until the worker is ready, and what there is to know of it is known."""
        await self.until(lambda view: view.state.ready and view.state.instance_fresh)

    async def listening(self) -> None:
        """Until the health stream is there: whoever stops before that is not heard to say so."""
        first = self.view.proofs["health"]
        await self.until(lambda view: view.proofs["health"] > first)

    async def falls(self, *reasons: Reason | str, within_s: float = PATIENCE_S, since: float | None = None) -> Seen:
        """Until the worker is not ready, for one of these reasons if any are given."""
        wanted = {Reason(reason) for reason in reasons}

        def fallen(view: WorkerView) -> bool:
            return not view.state.ready and (not wanted or view.state.reason in wanted)

        return await self.until(fallen, within_s, since=since)

    async def settled(self) -> Episode:
        """Until the one fault there was is over and counted; the episode."""
        await self.until(lambda view: view.state.fault is None and sum(view.state.ends.values()))
        return self.episode

    async def next_round_trip(self) -> None:
        """Until another round trip was answered."""
        last = self.view.proofs.get("round_trip", 0.0)
        await self.until(lambda view: view.proofs.get("round_trip", 0.0) > last)

    def holds(self, rung: Rung) -> bool | None:
        """One rung, now."""
        return self.view.state.rungs[rung].holds

    def _said(self) -> str:
        state = self.view.state
        return (
            f"now ready={state.ready} reason={state.reason} rungs={self.rungs()} fault={state.fault}"
            f" faults={self.faults} ends={self.ends} episodes={self.view.episodes}"
        )
