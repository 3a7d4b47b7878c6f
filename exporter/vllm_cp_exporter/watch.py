"""One watcher per worker: ask, observe, step, publish; one log line per transition."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Coroutine
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from vllm_cp import (
    AsyncControlClient,
    ClientClosed,
    ControlError,
    HealthStatus,
    OutOfTime,
    Retry,
    RpcRecord,
    WorkerUnreachable,
)
from vllm_cp.episodes import Memory, Transition, TransitionKind
from vllm_cp.models.episode import Episode
from vllm_cp.observer import Clock, Observer
from vllm_cp_exporter.config import ExporterConfig, WorkerConfig
from vllm_cp_exporter.dials import Dials
from vllm_cp_exporter.observe import read_facts
from vllm_cp_exporter.selfmetrics import SelfMetrics
from vllm_cp_exporter.snapshot import Board, Facts, WorkerView

__all__ = ["Watcher"]

log = logging.getLogger("vllm_cp_exporter.watch")

#: A question to a frozen engine queues there, so it is not given up and asked again.
_ROUND_TRIP_S = 600.0
#: After a stream broke, how long a new call may take before the worker counts as unreachable.
_CONFIRM_S = 1.0
#: Between two dials: in the first minute of an outage, and later.
_REDIAL_S = 1.0
_REDIAL_LATER_S = 10.0
_FIRST_MINUTE_S = 60.0
#: A worker that does not offer its event sources, or not to us, is asked again this rarely.
_SOURCES_AGAIN_S = 600.0
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
        memory: Memory | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.config = config
        #: Set once the first look succeeded or failed.
        self.attempted = asyncio.Event()
        #: Unix seconds of the watcher's last sign of life.
        self.last_tick = time.time()
        self._board = board
        self._metrics = metrics
        self._interval = settings.probe_interval_s
        self._info_interval = settings.info_interval_s
        self._dials = dials or Dials()
        self._facts = Facts()
        self._facts_due = asyncio.Event()
        self._probe_due = asyncio.Event()
        self._episodes: deque[Episode] = deque(maxlen=_EPISODES)
        self._observer = Observer(rules=config.rules, clock=clock, memory=memory, on_transitions=self._changed)
        self._client = self._new_client()
        self._publish()

    @property
    def observer(self) -> Observer:
        """The worker's state and proofs."""
        return self._observer

    async def run(self) -> None:
        """Watch until cancelled, then close the connection."""
        loops: list[Coroutine[Any, Any, None]] = [self._listen(), self._ask_engines(), self._ask_facts(), self._tick()]
        tasks = [asyncio.create_task(loop) for loop in loops]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._client.close()

    # -- the loops -------------------------------------------------------------------------

    async def _listen(self) -> None:
        """The health stream, and a Check before each attempt at it: what a broken stream means, a new call says."""
        down_since: float | None = None
        broke = False
        while True:
            answer = await self._dial(_CONFIRM_S if broke else None)
            self.attempted.set()
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
        async with self._dials:
            try:
                answer: HealthStatus | ControlError = await self._client.check(timeout_s=timeout_s)
            except ControlError as error:
                answer = error
        self._observer.health(answer, began=began)
        self._facts_after_contact(answer)
        return answer

    async def _stream(self) -> bool:
        """Follow the health stream; True when it is worth dialling again at once."""
        try:
            async for status in self._client.watch(check_every_s=self._interval):
                self._observer.health(status)
                self._facts_after_contact(status)
        except OutOfTime:
            # The peer vanished without a word: this connection may never notice, so a new one is made.
            await self._renew_client()
            return True
        except ControlError as error:
            log.debug("stream ended", extra={"worker": self.config.key, "error": str(error)})
            # Any other error is a server without a Watch for us: Checks go on at the pace of the dials.
            return isinstance(error, WorkerUnreachable)
        self._observer.stream_ended()
        return True

    def _facts_after_contact(self, answer: HealthStatus | ControlError) -> None:
        if isinstance(answer, HealthStatus):
            self._facts_due.set()
            self._probe_due.set()

    async def _ask_engines(self) -> None:
        """Round trips, one at a time: the next one is only asked when the last was answered."""
        while True:
            await _wait(self._probe_due, _jittered(self._interval))
            if not self._observer.wants_round_trip:
                continue
            began = self._observer.clock.monotonic()
            self._observer.asked()
            try:
                answer: bool | ControlError = await self._client.is_paused(timeout_s=_ROUND_TRIP_S)
            except ControlError as error:
                answer = error
            except ClientClosed:  # replaced under way; the question goes on being unanswered
                continue
            self._observer.round_trip(answer, began=began)
            self._publish()

    async def _ask_facts(self) -> None:
        """What the worker says it is: at each connection, and now and then."""
        sources_asked = 0.0
        instance: str | None = None
        while True:
            await _wait(self._facts_due, _jittered(self._info_interval))
            if self._observer.state.evidence.health is None:
                continue
            now = time.monotonic()
            denied = self._facts.sources is None and self._facts.sources_problem != ""
            ask = not denied or self._observer.state.instance_id != instance or now - sources_asked > _SOURCES_AGAIN_S
            instance = self._observer.state.instance_id
            try:
                answer, facts = await read_facts(self._client, self._facts, ask_sources=ask)
            except ClientClosed:  # replaced under way
                continue
            sources_asked = now if ask else sources_asked
            if self._observer.state.evidence.broken is None:
                self._facts = facts
            self._observer.server_info(answer)
            self._publish()

    def _new_client(self) -> AsyncControlClient:
        assert self.config.connection is not None
        # Each loop here asks again by itself, and a retry would only hide how long an answer took.
        connection = replace(self.config.connection, retry=Retry(attempts=1))
        return AsyncControlClient(connection, on_rpc=self._rpc)

    async def _renew_client(self) -> None:
        old, self._client = self._client, self._new_client()
        await old.close()

    def _rpc(self, record: RpcRecord) -> None:
        self._metrics.rpc(record)
        if record.method == "Health.Check" and record.code == "OK":
            self._observer.contact()

    async def _tick(self) -> None:
        pace = min(1.0, self._interval / 5)
        while True:
            await asyncio.sleep(pace)
            self.last_tick = time.time()
            self._observer.tick()

    # -- what comes of it --------------------------------------------------------------------

    def _changed(self, transitions: tuple[Transition, ...]) -> None:
        if self._observer.state.rungs.reachable.holds is False:
            self._facts = Facts()
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
        connection = self.config.connection
        self._board.publish(
            WorkerView(
                key=self.config.key,
                pool=self.config.pool,
                target=connection.address.name if connection else "",
                http_url=self.config.http_url or "",
                namespace=self.config.namespace,
                pod=self.config.pod,
                node=self.config.node,
                state=self._observer.state,
                facts=self._facts,
                proofs=MappingProxyType(dict(self._observer.proofs)),
                round_trip_s=self._observer.round_trip_s,
                episodes=tuple(self._episodes),
            )
        )


def _jittered(seconds: float) -> float:
    return seconds * random.uniform(0.8, 1.2)  # noqa: S311  (spreads load, guards nothing)


async def _wait(due: asyncio.Event, seconds: float) -> None:
    """Until the event is set, or the time is up; the event is taken back."""
    try:
        await asyncio.wait_for(due.wait(), seconds)
    except asyncio.TimeoutError:
        return
    due.clear()
