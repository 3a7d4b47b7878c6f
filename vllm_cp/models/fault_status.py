"""What a worker's fault tolerance says of its engines."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_cp.models.probe import EngineHealth, EngineState

__all__ = ["FaultStatus"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultStatus:
    """The engines behind one HTTP server. Source: GET /fault_tolerance/status of the Python server."""

    #: As the server lists them; with an external load balancer that is one, under the number of its rank.
    engines: tuple[EngineHealth, ...]
    #: Engines of this server as it counts them itself; ``None`` when it does not say.
    total_engines: int | None = None
    #: Version of the answer's format; ``None`` when it does not say.
    schema_version: int | None = None

    def of(self, state: EngineState) -> tuple[EngineHealth, ...]:
        """The engines in that state."""
        return tuple(engine for engine in self.engines if engine.state is state)
