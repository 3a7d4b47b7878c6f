"""The engines behind fake HTTP servers, and the fault tolerance that they share."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["FakeEngine", "FakeGroup"]


@dataclass(slots=True, kw_only=True)
class FakeEngine:
    """One engine of one server."""

    number: int
    #: ``healthy``, ``unhealthy``, ``dead``, or whatever a test wants the status to say.
    status: str = "healthy"
    info: str | None = None
    last_request_id: str | None = None
    error: str | None = None
    #: The instruction it holds and can't carry out before its peers were told.
    told: str | None = None
    #: How often it fell ill: the clock of an earlier illness does not kill it.
    illness: int = 0
    generation_tokens: float = 0.0
    running: float = 0.0
    waiting: float = 0.0
    kv_cache_usage: float = 0.0

    def says(self) -> dict[str, object]:
        """Its entry in the status; what is not there is left out."""
        said: dict[str, object] = {"id": self.number, "status": self.status}
        for name, value in (
            ("fault_info", self.info),
            ("last_ft_request_id", self.last_request_id),
            ("ft_error", self.error),
        ):
            if value is not None:
                said[name] = value
        return said


class FakeGroup:
    """Data-parallel ranks that carry out an instruction together, as the real ones do.

    ::

        group = FakeGroup()
        with FakeHttp(engines=[0], group=group) as a, FakeHttp(engines=[1], group=group) as b:
            a.fall_ill(), b.fall_ill()

    Nobody gets well before the server of every rank was told; with a dead rank among them nobody does, and all die when
    their time is up. A server without a group carries out what it is told at once.
    """

    def __init__(self) -> None:
        # The servers of a group have a thread each.
        self.lock = threading.RLock()
        self._engines: list[FakeEngine] = []

    def join(self, engines: Sequence[FakeEngine]) -> None:
        """Add the engines of one server."""
        with self.lock:
            self._engines.extend(engines)

    def leave(self, engines: Sequence[FakeEngine]) -> None:
        """Forget the engines of one server."""
        with self.lock:
            self._engines = [engine for engine in self._engines if all(engine is not gone for gone in engines)]

    def tell(self, engines: Sequence[FakeEngine], instruction: str, request_id: str) -> None:
        """Give the engines of one server an instruction; carry it out if that was the last server to be told."""
        with self.lock:
            for engine in engines:
                if engine.status == "unhealthy":
                    engine.told = request_id
                elif engine.status != "dead":
                    engine.last_request_id = request_id
                    engine.error = f"{instruction} refused: engine {engine.number} is {engine.status}, not unhealthy"
            if all(engine.told is not None for engine in self._engines):
                for engine in self._engines:
                    self.heal(engine)

    def heal(self, engine: FakeEngine) -> None:
        """The instruction that the engine holds has worked."""
        with self.lock:
            engine.status, engine.info, engine.error = "healthy", None, None
            engine.last_request_id, engine.told = engine.told, None
