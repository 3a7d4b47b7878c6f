"""How an attempt to recover engines ended, rank by rank."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from vllm_cp.models.probe import EngineState

__all__ = ["RankRecovery", "RecoveryOutcome"]


class RecoveryOutcome(str, Enum):
    """What became of one rank."""

    #: It was unhealthy, was told, and is healthy again.
    RECOVERED = "recovered"
    #: It is healthy, and was never unhealthy while we looked (or recovered before it could be told).
    NOT_NEEDED = "not_needed"
    #: Its engine is dead; only a new process helps.
    DEAD = "dead"
    #: The server or the engine declined or failed the instruction; ``error`` says why.
    REFUSED = "refused"
    #: Still not healthy when the time was up.
    OUT_OF_TIME = "out_of_time"
    #: Its server did not answer at the last look.
    UNREACHABLE = "unreachable"
    #: Its server has no fault tolerance.
    NOT_SUPPORTED = "not_supported"
    #: Its server could not be asked for another reason (credentials, a broken answer); ``error`` says why.
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecovery:
    """The end of one rank's recovery."""

    #: Base URL of the rank's server.
    target: str
    #: Number of the engine; ``None`` when its server never said.
    engine: int | None
    outcome: RecoveryOutcome
    #: The engine's state at the last look; UNKNOWN when there was none.
    state: EngineState = EngineState.UNKNOWN
    #: The server's id of our instruction; ``None`` when none was sent or none was given.
    request_id: str | None = None
    #: Why it did not recover, in the server's own words where it has any.
    error: str | None = None
    #: Seconds from telling it to seeing it healthy; ``None`` unless it recovered.
    seconds: float | None = None

    @property
    def ok(self) -> bool:
        """Whether the rank is healthy now."""
        return self.outcome in (RecoveryOutcome.RECOVERED, RecoveryOutcome.NOT_NEEDED)
