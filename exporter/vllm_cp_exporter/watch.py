"""One watcher per worker: its two sides ask, the observer steps, the watcher publishes; one log line per transition."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from types import MappingProxyType

from vllm_cp.episodes import Transition, TransitionKind
from vllm_cp.models.episode import Episode
from vllm_cp.models.probe import EngineMetrics
from vllm_cp.observer import Clock, Observer
from vllm_cp_exporter.canary import Canaries
from vllm_cp_exporter.config import Canary, ExporterConfig, WorkerConfig
from vllm_cp_exporter.dials import Dials
from vllm_cp_exporter.grpc_side import GrpcSide
from vllm_cp_exporter.http_side import HttpSide
from vllm_cp_exporter.selfmetrics import SelfMetrics
from vllm_cp_exporter.snapshot import Board, Facts, WorkerView
from vllm_cp_exporter.statefile import Remembered

__all__ = ["Watcher"]

log = logging.getLogger("vllm_cp_exporter.watch")

_EPISODES = 20
#: Transitions that only matter to somebody who looks closely.
_QUIET = {TransitionKind.RUNG, TransitionKind.FAULT_COUNTED}


class Watcher:
    """Watches one worker until it is cancelled."""

    def __init__(
        self,
        config: WorkerConfig,
        board: Board,
        metrics: SelfMetrics,
        settings: ExporterConfig,
        *,
        dials: Dials | None = None,
        remembered: Remembered | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.config = config
        #: Set once the first look succeeded or failed.
        self.attempted = asyncio.Event()
        #: Unix seconds of the watcher's last sign of life.
        self.last_tick = time.time()
        known = remembered or Remembered()
        self._board = board
        self._metrics = metrics
        self._pace = min(1.0, settings.probe_interval_s / 5)
        self._episodes: deque[Episode] = deque(known.episodes, maxlen=_EPISODES)
        self._grpc: GrpcSide | None = None
        self._http: HttpSide | None = None
        self._observer = Observer(rules=config.rules, clock=clock, memory=known.memory, on_transitions=self._changed)
        self._observer.feed(canaries=config.canary is not Canary.OFF and config.http is not None)
        if config.http is not None:
            self._http = HttpSide(
                config.http,
                self._observer,
                interval_s=settings.probe_interval_s,
                has_grpc=config.connection is not None,
                gives_up_after_s=settings.engine_recovery_timeout_s,
                attempted=self.attempted,
                publish=self._publish,
            )
        if config.connection is not None:
            self._grpc = GrpcSide(
                config.connection,
                self._observer,
                metrics,
                interval_s=settings.probe_interval_s,
                info_interval_s=settings.info_interval_s,
                dials=dials or Dials(),
                canaries=Canaries(config.canary, self._observer, self._page, config.rules.answer_within_s),
                attempted=self.attempted,
                publish=self._publish,
            )
        self._publish()

    @property
    def observer(self) -> Observer:
        """The worker's state and proofs."""
        return self._observer

    @property
    def episodes(self) -> tuple[Episode, ...]:
        """The last episodes, oldest first."""
        return tuple(self._episodes)

    async def run(self) -> None:
        """Watch until cancelled, then close the connections."""
        sides = [side for side in (self._grpc, self._http) if side is not None]
        loops = [self._tick(), *(loop for side in sides for loop in side.loops())]
        tasks = [asyncio.create_task(loop) for loop in loops]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for side in sides:
                await side.close()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._pace)
            self.last_tick = time.time()
            self._observer.tick()

    def _page(self) -> EngineMetrics | None:
        return self._http.page if self._http is not None else None

    def _changed(self, transitions: tuple[Transition, ...]) -> None:
        if self._grpc is not None and self._observer.state.rungs.reachable.holds is False:
            self._grpc.facts = Facts()
        for transition in transitions:
            self._log(transition)
            self._keep(transition)
        self._publish()

    def _keep(self, transition: Transition) -> None:
        episode = transition.episode
        if episode is None:
            return
        if transition.kind in (TransitionKind.FAULT_CLOSED, TransitionKind.FAULT_REOPENED, TransitionKind.FAULT_ENDED):
            while self._episodes and self._episodes[-1].start == episode.start:
                self._episodes.pop()
        if transition.kind is not TransitionKind.FAULT_COUNTED:
            self._episodes.append(episode)
        if transition.kind is TransitionKind.FAULT_ENDED and episode.kind and episode.duration_s is not None:
            self._metrics.recovered(self.config.pool, episode.kind, episode.duration_s)

    def _log(self, transition: Transition) -> None:
        level = logging.DEBUG if transition.kind in _QUIET else logging.INFO
        episode = transition.episode
        fields = {
            "worker": self.config.key,
            "pool": self.config.pool,
            "was": transition.was,
            "now": transition.now,
            "detail": transition.detail or (episode.detail if episode else ""),
        }
        if episode is not None and episode.duration_s is not None:
            fields["duration_s"] = f"{episode.duration_s:.3f}"
        log.log(level, transition.kind.value, extra={"fields": {k: v for k, v in fields.items() if v}})

    def _publish(self) -> None:
        config = self.config
        self._board.publish(
            WorkerView(
                key=config.key,
                pool=config.pool,
                target=config.connection.address.name if config.connection else "",
                http_url=config.http.base if config.http else "",
                namespace=config.namespace,
                pod=config.pod,
                node=config.node,
                state=self._observer.state,
                facts=self._grpc.facts if self._grpc else Facts(),
                proofs=MappingProxyType(dict(self._observer.proofs)),
                round_trip_s=self._observer.round_trip_s,
                metrics=self._page(),
                gives_up_at=MappingProxyType(self._http.gives_up_at if self._http else {}),
                episodes=tuple(self._episodes),
            )
        )
