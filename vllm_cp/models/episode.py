"""Faults and how they ended."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["Cause", "EndKind", "Episode"]


class Cause(str, Enum):
    """What the first sign of a fault was."""

    #: The health service said NOT_SERVING.
    ENGINE_REPORTED = "engine_reported"
    #: Health said SERVING, and round trips were not answered.
    ENGINE_SILENT = "engine_silent"
    #: A round trip was answered with an engine's error.
    ENGINE_ERROR = "engine_error"
    #: The control port refused, or the connection broke or fell silent.
    UNREACHABLE = "unreachable"
    #: Another instance answers, and the change was never seen.
    REPLACED_UNSEEN = "replaced_unseen"
    FT_UNHEALTHY = "ft_unhealthy"
    FT_DEAD = "ft_dead"
    UNKNOWN = "unknown"


class EndKind(str, Enum):
    """How a fault ended."""

    #: The same instance answers again.
    RESUMED = "resumed"
    #: A new instance answers.
    REPLACED = "replaced"
    #: Fault tolerance brought the engines back.
    RETRIED = "retried"
    #: The target was removed while the fault was open.
    GONE = "gone"
    #: It was no fault: a drain, a deletion, or a removal.
    PLANNED = "planned"


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """One fault of one worker, open or over. Times are Unix seconds."""

    cause: Cause
    #: When the first sign was: for a silent engine, when the question was asked that it did not answer.
    start: float
    #: When the worker was proved to answer again; ``None`` while open.
    end: float | None = None
    kind: EndKind | None = None
    #: Measured on the monotonic clock, never negative; ``None`` while open, and where the start was not seen.
    duration_s: float | None = None
    #: The instance that failed.
    instance_id: str | None = None
    #: What was said at the first sign.
    detail: str = ""
