"""The life of one worker as a value. Replaced, never changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType

from vllm_cp._judge import Evidence, Rules
from vllm_cp.models.episode import Cause, EndKind, Episode
from vllm_cp.models.ladder import Reason, Rungs
from vllm_cp.models.startup import Startup

__all__ = ["Fault", "Memory", "Transition", "TransitionKind", "WorkerState"]


class TransitionKind(str, Enum):
    """What a transition is about."""

    HEALTH = "health"
    RUNG = "rung"
    READY = "ready"
    INSTANCE = "instance"
    #: Instances take turns: behind this name are several workers, and nothing it says of restarts can be trusted.
    SHARED_NAME = "shared_name"
    FAULT_OPENED = "fault_opened"
    #: The worker recovered; the end is not counted yet.
    FAULT_CLOSED = "fault_closed"
    #: A relapse within the window: the same fault goes on.
    FAULT_REOPENED = "fault_reopened"
    FAULT_COUNTED = "fault_counted"
    #: The end is counted; ``episode`` is final.
    FAULT_ENDED = "fault_ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """One change, for a log line, a counter or a watcher."""

    kind: TransitionKind
    #: Unix seconds.
    wall: float
    was: str = ""
    now: str = ""
    detail: str = ""
    #: With the fault kinds.
    episode: Episode | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """The fault that is open, or recovered and not yet settled."""

    episode: Episode
    #: Monotonic seconds of the start.
    started: float
    #: Watched seconds when it was opened, for the window.
    opened: float
    counted: bool = False
    #: Watched and monotonic seconds of the recovery, once there is one.
    closed: float | None = None
    #: Monotonic seconds when the worker was first up again, while its instance is still unknown.
    up_since: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerState:
    """All that is known about the life of one worker. Replaced, never changed."""

    rules: Rules = field(default_factory=Rules)
    #: Monotonic seconds of the last observation.
    at: float
    #: Watched seconds so far.
    watched: float = 0.0
    #: Unix seconds when the worker was discovered.
    discovered: float
    evidence: Evidence = field(default_factory=Evidence)
    rungs: Rungs = field(default_factory=Rungs)
    #: ``None`` when ready.
    reason: Reason | None = Reason.STARTING
    instance_id: str | None = None
    #: The instance was read since the connection last broke.
    instance_fresh: bool = False
    #: The instances before this one, oldest first, as many as are worth remembering.
    instances_before: tuple[str, ...] = ()
    #: One of them came back, which no restart can do: several workers answer behind this name, in turns.
    shared_name: bool = False
    #: The address was changed, and who answers there was not read yet.
    moved: bool = False
    #: The worker was once proved able to take requests, so losing that is a fault.
    was_admitting: bool = False
    #: Unix seconds.
    first_ready: float | None = None
    #: The clocks of this instance's start.
    startup: Startup = field(default_factory=Startup)
    #: The clocks of whoever came up behind a port that was closed, until its instance is known.
    arriving: Startup | None = None
    fault: Fault | None = None
    #: The last finished fault; shown at once, counted after the window.
    last_recovery_s: float | None = None
    faults: Mapping[Cause, int] = field(default_factory=lambda: MappingProxyType(dict.fromkeys(Cause, 0)))
    ends: Mapping[EndKind, int] = field(default_factory=lambda: MappingProxyType(dict.fromkeys(EndKind, 0)))
    restarts: int = 0

    @property
    def ready(self) -> bool:
        """Whether the wanted rung, or the highest provable one below it, holds."""
        return self.reason is None

    @property
    def open_fault(self) -> Fault | None:
        """The fault that is open now; ``None`` also while a recovered one still settles."""
        return self.fault if self.fault is not None and self.fault.closed is None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What is worth keeping of a worker while nobody watches it. Counters are not: a restored one invents increases."""

    instance_id: str | None = None
    #: Unix seconds.
    first_ready: float | None = None
    was_admitting: bool = False
    #: The fault that was open, and whether it had been counted.
    open_fault: Episode | None = None
    counted: bool = False
