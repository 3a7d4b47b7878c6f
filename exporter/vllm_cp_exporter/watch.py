"""One watcher per worker: its two sides ask, the observer steps, the watcher publishes; one log line per transition."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from dataclasses import replace
from types import MappingProxyType

from vllm_cp import ConfigError
from vllm_cp.episodes import Transition, TransitionKind, quiet_until
from vllm_cp.models.episode import Episode
from vllm_cp.models.probe import EngineMetrics
from vllm_cp.observer import Clock, Observer
from vllm_cp_exporter.canary import Canaries
from vllm_cp_exporter.config import Canary, ExporterConfig, WorkerConfig
from vllm_cp_exporter.dials import Dials
from vllm_cp_exporter.grpc_side import GrpcSide
from vllm_cp_exporter.http_side import HttpSide
from vllm_cp_exporter.kvwatch import KvWatch
from vllm_cp_exporter.pace import rest
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
        kv_turn: asyncio.Lock | None = None,
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
        self._settings = settings
        self._dials = dials or Dials()
        self._gone = False
        self._moved = False
        self._problem = ""
        going_on = known.memory.open_fault
        over = [episode for episode in known.episodes if going_on is None or episode.start != going_on.start]
        self._episodes: deque[Episode] = deque([*over, *([going_on] if going_on else [])], maxlen=_EPISODES)
        self._grpc: GrpcSide | None = None
        self._http: HttpSide | None = None
        self._observer = Observer(rules=config.rules, clock=clock, memory=known.memory, on_transitions=self._changed)
        self._kv = KvWatch(config.key, wanted=self._follows_kv, turn=kv_turn, publish=self._publish)
        self._connect()
        self._publish()

    def _connect(self) -> None:
        config, settings = self.config, self._settings
        self._observer.feed(canaries=self._sends_canaries, deleted=config.deleted)
        self._grpc = self._http = None
        if config.problem:
            self._unasked(config.problem)
            return
        try:
            if config.http is not None:
                self._http = HttpSide(
                    config.http,
                    self._observer,
                    interval_s=settings.probe_interval_s,
                    has_grpc=config.connection is not None,
                    gives_up_after_s=settings.engine_recovery_timeout_s,
                    dials=self._dials,
                    attempted=self.attempted,
                    publish=self._publish,
                )
            if config.connection is not None:
                self._grpc = GrpcSide(
                    config.connection,
                    self._observer,
                    self._metrics,
                    interval_s=settings.probe_interval_s,
                    info_interval_s=settings.info_interval_s,
                    dials=self._dials,
                    canaries=Canaries(config.canary, self._observer, self._page, config.rules.answer_within_s),
                    attempted=self.attempted,
                    publish=self._publish,
                )
        except ConfigError as error:  # a file of this one worker
            self._grpc = self._http = None
            self._unasked(str(error))
        else:
            self._problem = ""

    @property
    def _sends_canaries(self) -> bool:
        return self.config.canary is not Canary.OFF and self.config.http is not None

    @property
    def _follows_kv(self) -> bool:
        return self.config.kv_events and self.config.connection is not None

    def _unasked(self, problem: str) -> None:
        """There is no way to ask: that is what is seen of the worker."""
        if problem != self._problem:
            fields = {"worker": self.config.key, "pool": self.config.pool, "problem": problem}
            log.info("not_asked", extra={"fields": fields})
        self._problem = problem
        self._observer.feed(contact=False, detail=problem)
        self.attempted.set()

    @property
    def asks(self) -> bool:
        """Whether there is a way to ask the worker."""
        return not self._problem

    def change(self, config: WorkerConfig, settings: ExporterConfig) -> bool:
        """Go on in another way. Whether that is done; else it takes ``reconnect``, while ``run`` does not run."""
        old, self.config, self._settings = self.config, config, settings
        self._observer.state = replace(self._observer.state, rules=config.rules)
        self._moved |= config.addresses != old.addresses
        self._kv.want(self._follows_kv)
        same = config.reached_as(old) and self.asks
        if same:
            self._observer.feed(canaries=self._sends_canaries, deleted=config.deleted)
            if self._grpc is not None:
                self._grpc.change(
                    interval_s=settings.probe_interval_s,
                    info_interval_s=settings.info_interval_s,
                    canaries=Canaries(config.canary, self._observer, self._page, config.rules.answer_within_s),
                )
            if self._http is not None:
                self._http.change(
                    interval_s=settings.probe_interval_s, gives_up_after_s=settings.engine_recovery_timeout_s
                )
        self._publish()
        return same

    def reconnect(self) -> None:
        """Ask as ``config`` says from the next ``run`` on. What is known of the worker stays."""
        facts = self._grpc.facts if self._grpc is not None else Facts()
        if self._moved:
            self._observer.feed(moved=True)
            facts = Facts()
        self._moved = False
        self._connect()
        if self._grpc is not None:
            self._grpc.facts = facts
        self._publish()

    def leave(self) -> None:
        """The worker is no longer discovered: its fault ends here, and it is off the page from now on."""
        self._observer.feed(removed=True)
        self._gone = True
        self._board.remove([self.config.key])

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
        loops = [self._tick(), self._kv.run(), *(loop for side in sides for loop in side.loops())]
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
            pace = min(1.0, self._settings.probe_interval_s / 5)
            await rest(pace)
            self.last_tick = time.time()
            # Most of the time answers come more often than ticks are needed; the next tick may be late, too.
            if self._observer.clock.monotonic() + 2 * pace > quiet_until(self._observer.state):
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
        if transition.kind is TransitionKind.SHARED_NAME:
            level = logging.WARNING
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
        if self._gone:  # what is still under way has nowhere to go
            return
        config, facts = self.config, self._grpc.facts if self._grpc else Facts()
        self._kv.told(facts, self._observer.state.instance_id)
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
                facts=facts,
                proofs=MappingProxyType(dict(self._observer.proofs)),
                round_trip_s=self._observer.round_trip_s,
                metrics=self._page(),
                gives_up_at=MappingProxyType(self._http.gives_up_at if self._http else {}),
                episodes=tuple(self._episodes),
                kv=self._kv.view,
            )
        )
