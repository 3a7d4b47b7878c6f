"""The ladder: how far a worker is proved to be able to serve."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

__all__ = ["Expect", "Reason", "Rung", "RungState", "Rungs"]


class Rung(str, Enum):
    """The rungs, lowest first. A rung cannot hold above one that does not."""

    #: The control port answers.
    REACHABLE = "reachable"
    #: The health service says SERVING. The server's word, no more.
    SERVING = "serving"
    #: Every engine made a round trip lately.
    ANSWERING = "answering"
    #: New requests are taken: not suspended, not draining, not unhealthy by fault tolerance.
    ADMITTING = "admitting"
    #: A real generation finished since this instance started.
    WARM = "warm"

    @property
    def height(self) -> int:
        """0 for the lowest."""
        return _ORDER.index(self)


_ORDER = list(Rung)
#: Each rung and those below it, highest first, with their names: asked at every look at every worker.
_DOWN_FROM = {rung: [(each, each.value) for each in reversed(_ORDER[: rung.height + 1])] for rung in Rung}


class Reason(str, Enum):
    """Why a worker is not ready: what is seen, not what is guessed."""

    STARTING = "starting"
    UNREACHABLE = "unreachable"
    NOT_SERVING = "not_serving"
    #: A round trip has been waiting for longer than ``answer_within``.
    ENGINE_SILENT = "engine_silent"
    ENGINE_ERROR = "engine_error"
    RANKS_DISAGREE = "ranks_disagree"
    #: Paused or asleep; the server does not tell the two apart.
    SUSPENDED = "suspended"
    #: A weight update or a sleep operation is in flight.
    MAINTENANCE = "maintenance"
    DRAINING = "draining"
    FT_UNHEALTHY = "ft_unhealthy"
    FT_DEAD = "ft_dead"
    NOT_WARM = "not_warm"
    #: Nothing this worker offers can prove the rung.
    UNPROVABLE = "unprovable"
    UNKNOWN = "unknown"


class Expect(str, Enum):
    """Which state a pool is meant to be in. Where that may be suspended, a suspended worker counts as ready."""

    SERVING = "serving"
    SUSPENDED = "suspended"
    ANY = "any"


@dataclass(frozen=True, slots=True, kw_only=True)
class RungState:
    """One rung of one worker."""

    #: True proved, False refuted, ``None`` neither: unprovable, not proved yet, or the proof is stale.
    holds: bool | None = None
    #: Whether this worker offers anything that could prove it.
    provable: bool = True
    #: Unix seconds since when ``holds`` has its value; ``None`` before the first observation.
    since: float | None = None
    #: Unix seconds of the newest proof; ``None`` when there never was one.
    proved_at: float | None = None
    #: What proved it last: ``health``, ``round trip``, ``tokens``, ``canary``, ``answer``.
    proof: str = ""
    #: Why it does not hold, or cannot be known.
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rungs:
    """The whole ladder of one worker at one moment."""

    reachable: RungState = RungState()
    serving: RungState = RungState()
    answering: RungState = RungState()
    admitting: RungState = RungState()
    warm: RungState = RungState()

    def __getitem__(self, rung: Rung) -> RungState:
        state: RungState = getattr(self, rung.value)
        return state

    def __iter__(self) -> Iterator[tuple[Rung, RungState]]:
        return ((rung, self[rung]) for rung in Rung)

    @property
    def highest(self) -> Rung | None:
        """The highest rung that is proved."""
        proved = [rung for rung, state in self if state.holds]
        return proved[-1] if proved else None

    def provable(self, wanted: Rung) -> Rung:
        """``wanted``, or the highest rung below it that this worker can prove at all."""
        for rung, name in _DOWN_FROM[wanted]:
            if getattr(self, name).provable:
                return rung
        return Rung.REACHABLE
