"""What it means to wait for a worker: goals, progress, and when to give up. Colour-free."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vllm_cp.episodes import WorkerState
from vllm_cp.errors import NotSupported, OutOfTime
from vllm_cp.models.ladder import Reason, Rung, Rungs
from vllm_cp.observer import MUTE, Clock

__all__ = ["GOALS", "Goal", "Progress"]

#: What can be waited for.
GOALS = (*(rung.value for rung in Rung), "gone", "drained")


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """One look on the way to a goal."""

    #: Seconds since the waiting began.
    elapsed_s: float
    rungs: Rungs
    #: Why the worker is not ready; ``None`` when it is.
    reason: Reason | None

    @property
    def why(self) -> str:
        """The first thing that is missing, in words; empty when nothing is."""
        return next((state.why for _, state in self.rungs if not state.holds and state.why), "")


class Goal:
    """One waiting: for what, since when, until when."""

    def __init__(self, goal: Rung | str, target: str, deadline_s: float, clock: Clock) -> None:
        self._name = goal.value if isinstance(goal, Rung) else goal
        if self._name not in GOALS:
            raise ValueError(f"cannot wait for {self._name!r}; wait for one of {', '.join(GOALS)}")
        if not deadline_s > 0:
            raise ValueError(f"deadline_s must be a positive number of seconds, not {deadline_s}")
        self._target = target
        self._clock = clock
        self._began = clock.monotonic()
        self._deadline_s = deadline_s

    def reached(self, state: WorkerState, on_progress: Callable[[Progress], None] | None) -> bool:
        """Whether the goal is reached now. Raises OutOfTime, or NotSupported for a rung that stays unprovable."""
        elapsed = self._clock.monotonic() - self._began
        progress = Progress(elapsed_s=elapsed, rungs=state.rungs, reason=state.reason)
        if on_progress is not None:
            on_progress(progress)
        if self._holds(state):
            return True
        if self._name in {rung.value for rung in Rung}:
            rung = state.rungs[Rung(self._name)]
            if not rung.provable and state.rungs.serving.holds:
                since = "" if self._name == Rung.WARM.value else "0.28"
                raise NotSupported(self._target, f"wait for {self._name}", "UNPROVABLE", rung.why, since=since)
        if elapsed >= self._deadline_s:
            raise OutOfTime(
                self._target,
                f"wait for {self._name}",
                "DEADLINE_EXCEEDED",
                progress.why or (state.reason.value if state.reason else ""),
                f"waited {elapsed:.1f} s",
            )
        return False

    def pause(self, every_s: float) -> float:
        """Seconds until the next look, inside the deadline."""
        left = self._deadline_s - (self._clock.monotonic() - self._began)
        return max(0.0, min(every_s, left))

    def _holds(self, state: WorkerState) -> bool:
        if self._name == "gone":
            # Who drains keeps the port open and answers no call: that is on its way out, and not gone.
            return state.evidence.broken is not None and state.evidence.broken_detail != MUTE
        if self._name == "drained":
            return state.rungs.reachable.holds is False or state.evidence.stopping
        return bool(state.rungs[Rung(self._name)].holds)
