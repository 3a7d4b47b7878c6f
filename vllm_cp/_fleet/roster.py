"""Who is in a fleet, and the one client of each: all that the two fleets share besides their colour."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

from vllm_cp.config import Connection
from vllm_cp.discovery.base import DiscoveredTarget, TargetSet
from vllm_cp.discovery.static import static_target
from vllm_cp.errors import ClientClosed, ConfigError, ControlError, OutOfTime
from vllm_cp.models.outcome import Outcome

__all__ = ["EXPECTED", "Member", "Roster", "Targets", "blame", "check_bounds", "failed", "plain", "unfinished"]

C = TypeVar("C")
T = TypeVar("T")

#: What a fleet can be made of, besides a source.
Targets = Iterable[str | Connection | DiscoveredTarget]

#: Errors that are a worker's own and become its Outcome. Anything else is a defect of the function, and is raised.
EXPECTED = (ControlError, ConfigError, ClientClosed, OSError, asyncio.TimeoutError)


def plain(targets: Targets) -> tuple[TargetSet, dict[str, Connection]]:
    """A set from what people write, and the connections that came ready-made. Raises ConfigError."""
    if isinstance(targets, str | Connection | DiscoveredTarget):
        raise ConfigError(f"a fleet takes a list of targets: write [{targets!r}]")
    found, ready = [], {}
    for one in targets:
        if isinstance(one, DiscoveredTarget):
            found.append(one)
        elif isinstance(one, Connection):
            name = one.address.name
            found.append(DiscoveredTarget(key=name, target=name))
            ready[name] = one
        else:
            found.append(static_target(one))
    members, taken = TargetSet.of(found)
    if taken:
        raise ConfigError(f"{taken[0].key}: this worker is named twice")
    return members, ready


class Member(Generic[C]):
    """One worker, with the client that asks it."""

    def __init__(self, target: DiscoveredTarget, connect: Callable[[DiscoveredTarget], C]) -> None:
        self.target = target
        self._connect = connect
        self._client: C | None = None
        self._left = False
        self._lock = threading.Lock()

    def client(self) -> C:
        """Its client, made on first use. Raises ConfigError as long as the worker can't be reached for a reason of
        ours (a token file that isn't there yet), ClientClosed when the worker has left."""
        client = self._client
        if client is None:
            with self._lock:
                if self._left:
                    raise ClientClosed(f"{self.target.key}: this worker left the fleet, or moved")
                if self._client is None:
                    self._client = self._connect(self.target)
                client = self._client
        return client

    def leave(self) -> C | None:
        """Give up the client, for somebody to close."""
        with self._lock:
            client, self._client, self._left = self._client, None, True
            return client


class Roster(Generic[C]):
    """The members of a fleet, by key and in order. Not thread-safe to change."""

    def __init__(
        self,
        make: Callable[[Connection], C],
        defaults: Connection | None,
        ready: dict[str, Connection] | None = None,
    ) -> None:
        """``make`` makes a client; ``ready`` are connections that are known already, by key."""
        self._make = make
        self._defaults = defaults
        self._ready = ready or {}
        self._members: dict[str, Member[C]] = {}
        self.targets = TargetSet()

    @property
    def members(self) -> list[Member[C]]:
        """Everyone, in order."""
        return list(self._members.values())

    def member(self, key: str) -> Member[C]:
        """One of them. Raises KeyError."""
        return self._members[key]

    def holds(self, member: Member[C]) -> bool:
        """Whether this is a member still, at the same address."""
        return self._members.get(member.target.key) is member

    def replace(self, targets: TargetSet) -> list[C]:
        """Another set. A client stays as long as its worker is reached in the same way; the others are returned, to
        be closed."""
        before, self.targets = self._members, targets
        self._members = {}
        for target in targets.targets:
            member = before.get(target.key)
            if member is None or not member.target.reached_as(target):
                member = Member(target, self.connect)
            else:
                del before[target.key]
                member.target = target
            self._members[target.key] = member
        return [client for member in before.values() if (client := member.leave()) is not None]

    def connect(self, target: DiscoveredTarget) -> C:
        """A new client for a worker, to be closed by the caller. Raises ConfigError."""
        return self._make(self._ready.get(target.key) or target.connection(self._defaults))


def check_bounds(deadline_s: float | None, at_once: int) -> None:
    """Refuse bounds that bound nothing. Raises ValueError."""
    if deadline_s is not None and not deadline_s > 0:
        raise ValueError(f"deadline_s must be a positive number of seconds, not {deadline_s}")
    if at_once < 1:
        raise ValueError(f"at_once must be 1 or more, not {at_once}")


def failed(member: Member[Any], error: Exception) -> Outcome[Any]:
    """The outcome of a worker that did not answer."""
    if isinstance(error, ClientClosed):
        error = ClientClosed(f"{member.target.key}: left the fleet, or moved, while it was asked")
    return Outcome(key=member.target.key, target=member.target.target, error=error)


def unfinished(member: Member[Any], deadline_s: float | None, started: bool) -> Outcome[Any]:
    """The outcome of a worker whose answer the deadline did not wait for."""
    detail, hint = f"not finished within {deadline_s:g} s, the time given for all workers", ""
    if not started:
        detail = f"not asked within {deadline_s:g} s, the time given for all workers"
        hint = "earlier workers took it all: give more time, or ask more at once"
    error = OutOfTime(member.target.target or member.target.key, "Fleet.map", "DEADLINE_EXCEEDED", detail, hint)
    return Outcome(key=member.target.key, target=member.target.target, error=error)


def blame(error: BaseException, member: Member[Any]) -> None:
    """Note on a defect which worker brought it up."""
    add_note = getattr(error, "add_note", None)  # since Python 3.11
    if add_note is not None:
        add_note(f"in the function given to map, for worker {member.target.key}")
