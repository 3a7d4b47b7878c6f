"""One worker's life told in seconds, step by step, as a watcher that looks every second would see it."""

from __future__ import annotations

from typing import Any

from vllm_cp.episodes import Memory, Observation, Rules, Transition, TransitionKind, WorkerState, begin, step
from vllm_cp.models.episode import Episode
from vllm_cp.models.health import HealthStatus
from vllm_cp.models.ladder import Rung
from vllm_cp.models.probe import Answer, EngineHealth, EngineMetrics, EngineState, RoundTrip

SERVING = HealthStatus.SERVING
NOT_SERVING = HealthStatus.NOT_SERVING
SERVICE_UNKNOWN = HealthStatus.SERVICE_UNKNOWN

#: Where the story's second zero lies on the two clocks.
MONOTONIC = 5000.0
WALL = 1_800_000_000.0

YES = RoundTrip(answer=Answer.ANSWERED, paused=False, seconds=0.001)
PAUSED = RoundTrip(answer=Answer.ANSWERED, paused=True, seconds=0.001)
DISAGREE = RoundTrip(answer=Answer.DISAGREE, detail="inconsistent results across engines: [false, true]")
ERROR = RoundTrip(answer=Answer.ENGINE_ERROR, detail="is_paused failed: transport error")
UNSUPPORTED = RoundTrip(answer=Answer.UNSUPPORTED)
LOST = RoundTrip(answer=Answer.LOST)


def engines(*states: EngineState) -> tuple[EngineHealth, ...]:
    """Fault-tolerance status, engine by engine."""
    return tuple(EngineHealth(engine=number, state=state) for number, state in enumerate(states))


def page(tokens: float | None = None, *, maintenance: float = 0.0) -> EngineMetrics:
    """The worker's own /metrics."""
    return EngineMetrics(generation_tokens=tokens, maintenance=maintenance)


class Story:
    """Tells what is seen at which second; remembers what changed."""

    def __init__(self, rules: Rules | None = None, *, memory: Memory | None = None, wall: float = WALL) -> None:
        self.rules = rules or Rules()
        self.now = 0.0
        self.wall = wall
        self.state: WorkerState = begin(at=MONOTONIC, wall=wall, rules=self.rules, memory=memory)
        self.transitions: list[Transition] = []
        self.history: list[WorkerState] = [self.state]

    def at(self, second: float, **seen: Any) -> Story:
        """What is seen at that second; the seconds before it are looked at and nothing new is seen."""
        while self.now + 1.0 < second:
            self._step(self.now + 1.0)
        self._step(second, **seen)
        return self

    def jump(self, second: float, **seen: Any) -> Story:
        """The same, but nobody was looking meanwhile: the watcher was stopped."""
        self._step(second, **seen)
        return self

    def up(self, second: float, instance: str | None = "one", **seen: Any) -> Story:
        """The worker answers everything: contact, health, instance, round trip."""
        return self.at(second, **{"contact": True, "health": SERVING, "instance_id": instance, **_answered(), **seen})

    def lives(self, until: float, *, every: float = 5.0, **seen: Any) -> Story:
        """From now to that second the worker answers one round trip per interval."""
        while self.now + every <= until:
            self.at(self.now + every, **{"contact": True, **_answered(), **seen})
        return self.at(until, contact=True)

    def talks(self, until: float) -> Story:
        """From now to that second its port answers, and no round trip comes back."""
        while self.now + 1.0 <= until:
            self.at(self.now + 1.0, contact=True)
        return self.at(until, contact=True)

    def down(self, second: float) -> Story:
        """The port refuses from now to that second."""
        while self.now + 1.0 <= second:
            self.at(self.now + 1.0, contact=False, detail="Connection refused")
        return self.at(second, contact=False, detail="Connection refused")

    @property
    def ready(self) -> bool:
        return self.state.ready

    @property
    def faults(self) -> dict[str, int]:
        """Counted faults by cause, without the zeros."""
        return {cause.value: n for cause, n in self.state.faults.items() if n}

    @property
    def ends(self) -> dict[str, int]:
        """Counted ends by kind, without the zeros."""
        return {kind.value: n for kind, n in self.state.ends.items() if n}

    @property
    def ended(self) -> list[Episode]:
        """The episodes that are over and settled."""
        return [t.episode for t in self.transitions if t.kind is TransitionKind.FAULT_ENDED and t.episode is not None]

    def kinds(self, *wanted: TransitionKind) -> list[TransitionKind]:
        """The kinds of the transitions so far, in order; all, or those wanted."""
        return [t.kind for t in self.transitions if not wanted or t.kind in wanted]

    def holds(self) -> dict[str, bool | None]:
        """The ladder, rung by rung."""
        return {rung.value: self.state.rungs[rung].holds for rung in Rung}

    def _step(self, second: float, **seen: Any) -> None:
        self.now = second
        observation = Observation(at=MONOTONIC + second, wall=self.wall + second, **seen)
        self.state, changed = step(self.state, observation)
        self.transitions += changed
        self.history.append(self.state)


def _answered() -> dict[str, Any]:
    return {"asked": True, "round_trip": YES}
