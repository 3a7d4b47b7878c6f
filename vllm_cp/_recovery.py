"""Recovering the ranks of one group, as a function of what is seen: no clock, no network, no colour.

Whoever runs it asks ``to_look()`` and ``to_tell()`` whom to ask now, hands every answer to ``looked`` and ``told``, and
goes on until ``done``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_cp.errors import (
    ControlError,
    EngineFailed,
    InvalidArgument,
    NotAdmitting,
    NotSupported,
    OutOfTime,
    Refused,
    WorkerUnreachable,
)
from vllm_cp.models.fault_status import FaultStatus
from vllm_cp.models.probe import EngineHealth, EngineState
from vllm_cp.models.recovery import RankRecovery, RecoveryOutcome

__all__ = ["Recovery"]

#: What may pass: asked again while there is time. Anything else about a server is settled when it is seen.
_PASSING = (WorkerUnreachable, OutOfTime, NotAdmitting)


@dataclass(slots=True)
class _Engine:
    """What is known of one engine."""

    health: EngineHealth
    #: Seconds, on the runner's clock, when it was first seen healthy after it was told.
    healthy_at: float | None = None
    #: The answer to our instruction.
    refusal: str | None = None
    #: It was unhealthy when its server was told.
    needed: bool = False


class _Server:
    """One rank's server."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.engines: dict[int, _Engine] = {}
        #: Seconds, on the runner's clock, when it was told.
        self.told_at: float | None = None
        self.request_id: str | None = None
        #: Why telling it failed.
        self.tell_error: ControlError | None = None
        #: Why the last look failed; ``None`` when it did not.
        self.look_error: ControlError | None = None
        #: It can't be asked, or has declined: nothing more to do.
        self.settled = False

    def has(self, *states: EngineState) -> bool:
        return any(engine.health.state in states for engine in self.engines.values())

    @property
    def due(self) -> bool:
        """Unhealthy and not told yet."""
        return not self.settled and self.look_error is None and self.told_at is None and self.has(EngineState.UNHEALTHY)

    @property
    def pending(self) -> bool:
        """Whether to wait for it: for an engine that was told, or whose state is on its way to another."""
        if self.settled:
            return False
        if self.told_at is None:
            return self.due or (self.look_error is None and self.has(EngineState.UNKNOWN))
        return any(
            engine.refusal is None and engine.health.state in (EngineState.UNHEALTHY, EngineState.UNKNOWN)
            for engine in self.engines.values()
        )


class Recovery:
    """The recovery of one group of ranks."""

    def __init__(self, targets: Sequence[str]) -> None:
        """``targets``: base URLs of the ranks' servers; the methods name a server by its place in there."""
        self._servers = [_Server(target) for target in targets]

    def to_look(self) -> list[int]:
        """Whose status to ask for now: everybody's who is not settled, since a healthy rank may fall ill late."""
        return [n for n, server in enumerate(self._servers) if not server.settled]

    def looked(self, number: int, seen: FaultStatus | ControlError, now: float) -> None:
        """A status, or why there is none. ``now``: seconds on any clock that only goes forward."""
        server = self._servers[number]
        if isinstance(seen, ControlError):
            server.look_error = seen
            server.settled = not isinstance(seen, _PASSING) and server.told_at is None
            return
        server.look_error = None
        for health in seen.engines:
            engine = server.engines.setdefault(health.engine, _Engine(health))
            engine.health = health
            if server.told_at is None:
                continue
            if health.state is EngineState.HEALTHY:
                engine.healthy_at = engine.healthy_at if engine.healthy_at is not None else now
            ours = server.request_id is not None and health.last_request_id == server.request_id
            if health.error is not None and ours:
                engine.refusal = health.error

    def to_tell(self) -> list[int]:
        """Whom to give the instruction now: every server with an unhealthy engine, once."""
        return [n for n, server in enumerate(self._servers) if server.due]

    def told(self, number: int, answer: str | ControlError | None, now: float) -> None:
        """The server's id of the instruction (``None`` if it gave none), or why it could not be given."""
        server = self._servers[number]
        server.tell_error = answer if isinstance(answer, ControlError) else None
        if isinstance(answer, NotAdmitting):
            return  # nothing was done: it is due again at the next look
        server.told_at = now
        for engine in server.engines.values():
            engine.needed = engine.health.state is EngineState.UNHEALTHY
        if isinstance(answer, ControlError):
            # A call that broke off may have arrived all the same; the status will tell.
            server.settled = not isinstance(answer, (*_PASSING, EngineFailed))
        else:
            server.request_id = answer

    @property
    def done(self) -> bool:
        """Whether nothing is left to wait for."""
        return not any(server.pending for server in self._servers)

    def report(self) -> tuple[RankRecovery, ...]:
        """What became of every rank, in the order given."""
        return tuple(rank for server in self._servers for rank in _report(server))


def _report(server: _Server) -> list[RankRecovery]:
    if not server.engines:
        error = server.look_error
        outcome = RecoveryOutcome.OUT_OF_TIME if error is None else _outcome(error)
        said = "its server lists no engine" if error is None else str(error)
        return [RankRecovery(target=server.target, engine=None, outcome=outcome, error=said)]
    return [_rank(server, number, engine) for number, engine in sorted(server.engines.items())]


def _rank(server: _Server, number: int, engine: _Engine) -> RankRecovery:
    outcome, error = _ended(server, engine)
    recovered = outcome is RecoveryOutcome.RECOVERED and engine.healthy_at is not None and server.told_at is not None
    return RankRecovery(
        target=server.target,
        engine=number,
        outcome=outcome,
        state=engine.health.state,
        request_id=server.request_id if engine.needed else None,
        error=error,
        seconds=(engine.healthy_at or 0.0) - (server.told_at or 0.0) if recovered else None,
    )


def _ended(server: _Server, engine: _Engine) -> tuple[RecoveryOutcome, str | None]:
    state = engine.health.state
    if state is EngineState.DEAD:
        return RecoveryOutcome.DEAD, engine.refusal or engine.health.info or engine.health.error
    if server.look_error is not None:
        return _outcome(server.look_error), str(server.look_error)
    if state is EngineState.HEALTHY:
        # Healthy all the same: an instruction that came too late is refused, and was not needed any more.
        late = engine.refusal is not None or not engine.needed
        return (RecoveryOutcome.NOT_NEEDED if late else RecoveryOutcome.RECOVERED), engine.refusal
    if engine.refusal is not None:
        return RecoveryOutcome.REFUSED, engine.refusal
    if server.tell_error is not None:
        return _outcome(server.tell_error), str(server.tell_error)
    return RecoveryOutcome.OUT_OF_TIME, engine.health.info


def _outcome(error: ControlError) -> RecoveryOutcome:
    if isinstance(error, OutOfTime | NotAdmitting):
        return RecoveryOutcome.OUT_OF_TIME
    if isinstance(error, WorkerUnreachable):
        return RecoveryOutcome.UNREACHABLE
    if isinstance(error, NotSupported):
        return RecoveryOutcome.NOT_SUPPORTED
    if isinstance(error, Refused | InvalidArgument):
        return RecoveryOutcome.REFUSED
    return RecoveryOutcome.FAILED
