"""Changes in a fleet, and the colour-free half of watching for them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from vllm_cp.discovery.base import DiscoveredTarget, TargetSet
from vllm_cp.discovery.merge import diff
from vllm_cp.errors import ConfigError, CredentialsRejected, NotSupported, TlsFailed
from vllm_cp.models.health import HealthStatus

__all__ = [
    "FleetChange",
    "HealthChanged",
    "InstanceChanged",
    "Pace",
    "WorkerAdded",
    "WorkerChanged",
    "WorkerRemoved",
    "WorkerWatch",
    "set_changes",
]

#: Watches that are being opened at once, and how many are begun in a second: a fleet's start is no storm.
DIALS_AT_ONCE = 64
DIALS_PER_S = 100
#: Longest wait for a turn: peers that swallow connections must not hold up the others.
TURN_S = 2.0
_EAGER_S, _PAUSE_S, _LONG_PAUSE_S, _HOPELESS_S = 60.0, 1.5, 10.0, 60.0
#: Errors that time does not heal.
_HOPELESS = (TlsFailed, CredentialsRejected, NotSupported, ConfigError)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetChange:
    """Something changed with one worker."""

    #: Unix seconds when it was noticed.
    at: float
    #: The worker as it is now; as it last was when it has left.
    target: DiscoveredTarget

    @property
    def key(self) -> str:
        """The worker's identity."""
        return self.target.key


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerAdded(FleetChange):
    """A worker joined. The first changes of a watch are one of these for each worker that is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRemoved(FleetChange):
    """A worker left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerChanged(FleetChange):
    """Discovery says something else of a worker: another address, pool or label, or that it is being deleted."""

    was: DiscoveredTarget


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthChanged(FleetChange):
    """Another word of a worker's health service, or none. The first one of each worker comes when it is known."""

    #: ``None``: it did not answer, or nothing was known yet.
    was: HealthStatus | None
    #: ``None``: it does not answer.
    now: HealthStatus | None
    #: Why it does not answer; ``None`` when it ended the stream itself, as a server does that shuts down.
    error: Exception | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceChanged(FleetChange):
    """Another instance answers: the engine was replaced."""

    was: str
    now: str


def set_changes(old: TargetSet, new: TargetSet, at: float) -> Iterator[FleetChange]:
    """What discovery changed."""
    changes = diff(old, new)
    for target in changes.removed:
        yield WorkerRemoved(at=at, target=target)
    for was, target in changes.changed:
        yield WorkerChanged(at=at, target=target, was=was)
    for target in changes.added:
        yield WorkerAdded(at=at, target=target)


class WorkerWatch:
    """What a watch knows of one worker. Whoever reads the stream says what came; changes come out."""

    def __init__(
        self,
        target: DiscoveredTarget,
        *,
        wall: Callable[[], float] = time.time,
        now: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self.target = target
        self._wall, self._now, self._jitter = wall, now, jitter
        self._known = False
        self._health: HealthStatus | None = None
        self._error: Exception | None = None
        self._instance: str | None = None
        self._down_since: float | None = None

    def moved(self, target: DiscoveredTarget) -> WorkerWatch:
        """The same worker at another address: what it said stays until it says something else."""
        self.target = target
        self._down_since = None
        return self

    def said(self, status: HealthStatus) -> HealthChanged | None:
        """The health service spoke."""
        self._down_since = None
        if self._known and status is self._health:
            return None
        return self._change(status, None)

    def instance(self, instance_id: str | None) -> InstanceChanged | None:
        """Which instance it is."""
        was = self._instance
        if instance_id is None or instance_id == was:
            return None
        self._instance = instance_id
        if was is None:
            return None
        return InstanceChanged(at=self._wall(), target=self.target, was=was, now=instance_id)

    def lost(self, error: Exception | None) -> HealthChanged | None:
        """The stream ended (``None``), or broke, or could not be opened."""
        if self._down_since is None:
            self._down_since = self._now()
        if self._known and self._health is None and type(error) is type(self._error):
            return None
        return self._change(None, error)

    def pause_s(self) -> float:
        """How long to wait before the next try, seconds."""
        if isinstance(self._error, _HOPELESS):
            pause = _HOPELESS_S
        elif self._down_since is None or self._now() - self._down_since < _EAGER_S:
            pause = _PAUSE_S
        else:
            pause = _LONG_PAUSE_S
        return pause * (0.8 + 0.4 * self._jitter())

    def _change(self, now: HealthStatus | None, error: Exception | None) -> HealthChanged:
        change = HealthChanged(at=self._wall(), target=self.target, was=self._health, now=now, error=error)
        self._known, self._health, self._error = True, now, error
        return change


class Pace:
    """When the next watch may be opened. Not thread-safe."""

    def __init__(self, per_s: float = DIALS_PER_S, now: Callable[[], float] = time.monotonic) -> None:
        self._gap, self._now, self._next = 1.0 / per_s, now, 0.0

    def turn_s(self) -> float:
        """Seconds to wait for one's turn, which is taken by asking."""
        now = self._now()
        turn = max(now, self._next)
        self._next = turn + self._gap
        return turn - now
