"""From answers to observations: the colour-free half of watching a worker.

Whoever asks a worker, in whatever way, hands each answer or error here; the observer stamps it, steps the state and
passes the transitions on. The ladders, the command line and the daemon share it, so a refused connection means the
same thing to all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm_cp.episodes import Memory, Observation, Rules, Transition, WorkerState, begin, step
from vllm_cp.errors import (
    ControlError,
    EngineFailed,
    NotSupported,
    OutOfTime,
    RanksDisagree,
    TlsFailed,
    WorkerUnreachable,
)
from vllm_cp.models.generated import FinishReason, Generated
from vllm_cp.models.health import HealthStatus
from vllm_cp.models.ladder import Rung
from vllm_cp.models.probe import Answer, EngineHealth, EngineMetrics, RoundTrip
from vllm_cp.models.server import ServerInfo

__all__ = ["CANARY", "MUTE", "ROUND_TRIP_S", "Clock", "Observer"]

#: A question to a frozen engine queues there, so it is not given up and asked again. Seconds.
ROUND_TRIP_S = 600.0
#: One token id: shorter than any block, so that a canary leaves nothing in the prefix cache.
CANARY = (1,)

#: What is seen of a port that is open while nobody answers behind it.
MUTE = "the port accepts calls and answers none"
# What gRPC says of it when it has waited for long enough.
_NO_WORD = "timed out before receiving SETTINGS"


@dataclass(frozen=True, slots=True)
class Clock:
    """Where time comes from; tests bring their own."""

    #: Seconds that only go forward.
    monotonic: Callable[[], float] = time.monotonic
    #: Unix seconds.
    wall: Callable[[], float] = time.time


class Observer:
    """The state of one worker, fed with answers.

    Not thread-safe: feed it from one thread or one event loop.
    """

    def __init__(
        self,
        *,
        rules: Rules | None = None,
        clock: Clock | None = None,
        memory: Memory | None = None,
        on_transitions: Callable[[tuple[Transition, ...]], None] | None = None,
    ) -> None:
        """``on_transitions`` is called after each observation that changed something."""
        self.clock = clock or Clock()
        self.state: WorkerState = begin(at=self.clock.monotonic(), wall=self.clock.wall(), rules=rules, memory=memory)
        #: Unix seconds of the last time each thing was really known, by check.
        self.proofs: dict[str, float] = {}
        #: Seconds of the last completed round trip.
        self.round_trip_s: float | None = None
        self._on_transitions = on_transitions
        self._last_contact: float | None = None
        #: The instance that was found to have no round trips.
        self._without_round_trips: str | None = None
        #: The instance that the last canary was sent to.
        self._canaried: tuple[str | None] | None = None

    def feed(self, **seen: Any) -> tuple[Transition, ...]:
        """One observation, stamped now; fields as in ``Observation``. Without any: time passes."""
        at = self.clock.monotonic()
        if seen.get("contact"):
            self._last_contact = at
        self.state, transitions = step(self.state, Observation(at=at, wall=self.clock.wall(), **seen))
        if transitions and self._on_transitions is not None:
            self._on_transitions(transitions)
        return transitions

    @property
    def wants_instance(self) -> bool:
        """The port answers, and which instance does was not read since the connection last broke."""
        return self.state.evidence.health is not None and not self.state.instance_fresh

    @property
    def wants_round_trip(self) -> bool:
        """There are engines to ask: the server serves, does not stop, and has the RPC. In a drain calls hang.

        That the RPC is missing is asked of each instance once: another one may be of another version.
        """
        seen = self.state.evidence
        missing = seen.round_trips_unsupported and self._without_round_trips == self.state.instance_id
        return seen.health is HealthStatus.SERVING and not seen.stopping and not missing

    @property
    def wants_canary(self) -> bool:
        """None was sent to this instance, no generation was seen to finish on it, and nothing speaks against one."""
        sent = self._canaried == (self.state.instance_id,)
        return self.state.evidence.generated is None and not sent and self.admits_canary

    @property
    def admits_canary(self) -> bool:
        """The worker takes requests, as far as it can be known, and does not stop."""
        seen, rungs = self.state.evidence, self.state.rungs
        held = rungs[rungs.provable(Rung.SERVING if seen.round_trips_unsupported else Rung.ADMITTING)].holds
        return bool(held) and not seen.stopping

    def tick(self) -> tuple[Transition, ...]:
        """Time passes."""
        return self.feed()

    def contact(self) -> tuple[Transition, ...]:
        """The port answered something."""
        self._prove("health")
        return self.feed(contact=True)

    def health(self, answer: HealthStatus | ControlError, *, began: float | None = None) -> tuple[Transition, ...]:
        """The answer to a Check, or a message of a Watch. ``began``: monotonic seconds when it was asked."""
        if isinstance(answer, HealthStatus):
            self._prove("health")
            return self.feed(contact=True, health=answer, began=began)
        if isinstance(answer, OutOfTime) or (isinstance(answer, WorkerUnreachable) and _NO_WORD in answer.detail):
            # A draining server accepts calls and answers none: that is no outage.
            if self.state.evidence.ended is not None or self.state.evidence.stopping:
                return self.feed()
            return self.feed(
                contact=False, began=self._last_contact if self._last_contact is not None else began, detail=MUTE
            )
        if isinstance(answer, WorkerUnreachable):
            # TLS libraries speak in riddles; what they mean is in the hint.
            riddle = isinstance(answer, TlsFailed) and answer.hint
            detail = f"{answer.meaning}: {answer.hint}" if riddle else answer.detail or answer.meaning
            return self.feed(contact=False, began=began, detail=detail)
        return self._turned_away(answer)

    def stream_ended(self) -> tuple[Transition, ...]:
        """The health stream ended with status OK."""
        return self.feed(stream_ended=True)

    def asked(self) -> tuple[Transition, ...]:
        """A round trip to the engines was sent."""
        return self.feed(asked=True)

    def round_trip(self, answer: bool | ControlError, *, began: float) -> tuple[Transition, ...]:
        """The end of a round trip: whether generation is paused, or the error."""
        seconds = max(0.0, self.clock.monotonic() - began)
        if isinstance(answer, bool):
            self.round_trip_s = seconds
            trip = RoundTrip(answer=Answer.ANSWERED, paused=answer, seconds=seconds)
        elif isinstance(answer, RanksDisagree):
            self.round_trip_s = seconds
            trip = RoundTrip(answer=Answer.DISAGREE, seconds=seconds, detail=answer.detail)
        elif isinstance(answer, EngineFailed):
            trip = RoundTrip(answer=Answer.ENGINE_ERROR, seconds=seconds, detail=answer.detail)
        elif isinstance(answer, NotSupported):
            trip = RoundTrip(answer=Answer.UNSUPPORTED)
            self._without_round_trips = self.state.instance_id
        elif not answer.sent:
            return self._turned_away(answer)
        elif not isinstance(answer, OutOfTime | WorkerUnreachable):
            # Not for us to ask: nothing here proves the engines, and nothing accuses them. It is asked again.
            trip = RoundTrip(answer=Answer.UNSUPPORTED, detail=answer.detail)
        else:
            # Out of time or unreachable: whether the *port* is gone is for a Check to say, not for a question that
            # may have waited for a frozen engine.
            return self.feed(round_trip=RoundTrip(answer=Answer.LOST, detail=str(answer)))
        if trip.answer in (Answer.ANSWERED, Answer.DISAGREE):
            self._prove("round_trip")
        return self.feed(contact=True, round_trip=trip)

    def server_info(self, answer: ServerInfo | ControlError) -> tuple[Transition, ...]:
        """The answer to GetServerInfo: which instance this is."""
        if isinstance(answer, ServerInfo):
            self._prove("facts")
            return self.feed(contact=True, instance_id=answer.instance_id)
        if isinstance(answer, WorkerUnreachable | OutOfTime):
            return self.feed()
        return self.feed(contact=True) if answer.sent else self.feed()

    def canary(self, answer: Generated | ControlError) -> tuple[Transition, ...]:
        """The end of a generation of ours. Only one that finished proves anything."""
        self._canaried = (self.state.instance_id,)
        if isinstance(answer, Generated) and answer.finish_reason in (FinishReason.LENGTH, FinishReason.STOP):
            self._prove("canary")
            return self.feed(contact=True, canary=True)
        return self.feed()

    def metrics(self, page: EngineMetrics) -> tuple[Transition, ...]:
        """The worker's own /metrics page."""
        self._prove("engine_metrics")
        return self.feed(metrics=page)

    def fault_tolerance(self, engines: tuple[EngineHealth, ...]) -> tuple[Transition, ...]:
        """The worker's fault-tolerance status."""
        self._prove("fault_tolerance")
        return self.feed(engines=engines)

    def _turned_away(self, answer: ControlError) -> tuple[Transition, ...]:
        return self.feed(contact=True if answer.sent else None, turned_away=True, detail=str(answer))

    def _prove(self, check: str) -> None:
        self.proofs[check] = self.clock.wall()
