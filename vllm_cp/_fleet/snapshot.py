"""What a whole fleet says of itself at one moment."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from vllm_cp._fleet.roster import Member
from vllm_cp.discovery.base import DiscoveredTarget
from vllm_cp.errors import OutOfTime, WorkerUnreachable
from vllm_cp.models.health import HealthStatus
from vllm_cp.models.kv_source import KvEventSource
from vllm_cp.models.model import ModelInfo
from vllm_cp.models.outcome import Outcome
from vllm_cp.models.server import ServerInfo

__all__ = ["FACTS", "FleetSnapshot", "Look", "WorkerSnapshot"]

#: Each fact and the client's method that brings it, the one that proves least and costs least first.
FACTS = (("health", "check"), ("server", "server_info"), ("model", "model_info"), ("sources", "kv_event_sources"))


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSnapshot:
    """One worker. ``None`` is unknown; ``errors`` says why."""

    target: DiscoveredTarget
    #: The word of the health service, see ``HealthStatus`` for what it is worth.
    health: HealthStatus | None = None
    server: ServerInfo | None = None
    model: ModelInfo | None = None
    #: Where its KV-cache events come from; empty when events are off.
    sources: tuple[KvEventSource, ...] | None = None
    #: Why a fact is unknown, by its name: ``health``, ``server``, ``model``, ``sources``.
    errors: Mapping[str, Exception] = field(default_factory=lambda: MappingProxyType({}), hash=False)

    @property
    def key(self) -> str:
        """The worker's identity."""
        return self.target.key

    @property
    def pool(self) -> str:
        """The worker's pool."""
        return self.target.pool


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSnapshot:
    """All workers, in the fleet's order."""

    #: Unix seconds when the questions began.
    as_of: float
    workers: tuple[WorkerSnapshot, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether every fact of every worker is known: a sum over fewer is a lower bound."""
        return not any(worker.errors for worker in self.workers)

    def __iter__(self) -> Iterator[WorkerSnapshot]:
        return iter(self.workers)

    def __len__(self) -> int:
        return len(self.workers)


class Look:
    """The facts of one worker while they come in, so that a deadline does not lose those that came."""

    def __init__(self) -> None:
        self._facts: dict[str, Any] = {}
        self._errors: dict[str, Exception] = {}

    def came(self, fact: str, value: object) -> None:
        """An answer."""
        self._facts[fact] = value

    def failed(self, fact: str, error: Exception) -> bool:
        """No answer. True: don't ask this worker for more, it would only cost time."""
        self._errors[fact] = error
        return isinstance(error, WorkerUnreachable | OutOfTime)

    def end(self, outcome: Outcome[None], member: Member[Any]) -> WorkerSnapshot:
        """What is known now. What isn't fails as the whole did, or as the last question did."""
        facts, errors = dict(self._facts), dict(self._errors)
        rest = outcome.error or next(reversed(errors.values()), None)
        for fact, _ in FACTS:
            if fact not in facts and fact not in errors and rest is not None:
                errors[fact] = rest
        server, model = facts.get("server"), facts.get("model")
        if server is not None and model is not None:
            facts["model"] = model.seen_on(server.engine_version)
        return WorkerSnapshot(target=member.target, errors=MappingProxyType(errors), **facts)


def together(
    as_of: float, members: Iterable[Member[Any]], looks: Iterable[Look], outcomes: Iterable[Outcome[None]]
) -> FleetSnapshot:
    """The snapshot of all."""
    workers = (look.end(outcome, member) for look, outcome, member in zip(looks, outcomes, members, strict=True))
    return FleetSnapshot(as_of=as_of, workers=tuple(workers))
