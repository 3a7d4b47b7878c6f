"""What a look at a worker can bring: the answers that observations are made of."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["Answer", "EngineHealth", "EngineMetrics", "EngineState", "RoundTrip"]


class Answer(str, Enum):
    """How a round trip to the engines ended."""

    #: Every engine answered.
    ANSWERED = "answered"
    #: Every engine answered, differently.
    DISAGREE = "disagree"
    #: An engine failed to answer and the frontend said so.
    ENGINE_ERROR = "engine_error"
    #: This worker has no such RPC.
    UNSUPPORTED = "unsupported"
    #: The question was lost: the connection broke or the time given was up.
    LOST = "lost"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundTrip:
    """The end of one round trip."""

    answer: Answer
    #: Whether generation is paused; ``None`` unless every engine said the same.
    paused: bool | None = None
    #: Seconds from question to answer.
    seconds: float | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMetrics:
    """What the worker's own /metrics page says, summed over its engines. ``None`` is not on the page."""

    #: Counter of generated tokens.
    generation_tokens: float | None = None
    #: The same counter of each engine, in the order of the page.
    tokens_by_engine: tuple[float, ...] = ()
    #: Requests now running.
    running: float | None = None
    #: Requests now waiting.
    waiting: float | None = None
    #: Weight updates and sleep operations now in flight.
    maintenance: float = 0.0
    #: KV-cache usage from 0 to 1, the highest of the engines.
    kv_cache_usage_ratio: float | None = None
    #: Unix seconds when the server's process started.
    process_start: float | None = None


class EngineState(str, Enum):
    """What fault tolerance says of one engine."""

    HEALTHY = "healthy"
    #: Waits for an outside controller to tell it to retry, and dies when none comes in time.
    UNHEALTHY = "unhealthy"
    DEAD = "dead"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHealth:
    """One engine's fault-tolerance status. Source: GET /fault_tolerance/status of the Python server."""

    engine: int
    state: EngineState
    #: What went wrong, as the engine says.
    info: str | None = None
    #: The last instruction it was given.
    last_request_id: str | None = None
    #: Why the last instruction failed.
    error: str | None = None
