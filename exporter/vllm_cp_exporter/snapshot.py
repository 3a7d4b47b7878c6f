"""What is known of all workers at one moment: immutable, one writer, many readers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from vllm_cp.episodes import WorkerState
from vllm_cp.models.episode import Episode
from vllm_cp.models.kv_source import KvEventSource
from vllm_cp.models.ladder import Reason
from vllm_cp.models.model import ModelInfo
from vllm_cp.models.probe import EngineMetrics
from vllm_cp.models.server import ServerInfo
from vllm_cp_exporter.kvview import KvView

__all__ = ["POOL_STATES", "Board", "Facts", "Snapshot", "WorkerView"]

#: The states of ``pool_workers``, a closed set.
POOL_STATES = ("starting", "ready", "suspended", "draining", "faulted", "unknown")


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a worker says it is. All ``None`` while it cannot be asked."""

    server: ServerInfo | None = None
    model: ModelInfo | None = None
    #: Empty: events are off. ``None``: not known, see ``sources_problem``.
    sources: tuple[KvEventSource, ...] | None = None
    #: Why the sources are not known: not supported, credentials rejected, ….
    sources_problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """One worker at one moment."""

    #: The ``worker`` label: the discovery key.
    key: str
    pool: str
    #: Where it is asked over gRPC, canonical; "" for an HTTP-only worker.
    target: str
    #: Base URL of its HTTP server; "" when not given.
    http_url: str = ""
    #: Kubernetes namespace, pod and node; "" elsewhere.
    namespace: str = ""
    pod: str = ""
    node: str = ""
    state: WorkerState
    facts: Facts = field(default_factory=Facts)
    #: Unix seconds of the last time each thing was really known, by check.
    proofs: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    #: Seconds of the last completed engine round trip.
    round_trip_s: float | None = None
    #: The worker's own /metrics, where read.
    metrics: EngineMetrics | None = None
    #: Unix seconds at which each unhealthy engine dies unless it is told to retry.
    gives_up_at: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    #: The last episodes, oldest first; the open one last.
    episodes: tuple[Episode, ...] = ()
    #: Its KV-cache events, where they are followed.
    kv: KvView = field(default_factory=KvView)

    @property
    def pool_state(self) -> str:
        """Its one state in ``pool_workers``."""
        if self.state.ready:
            return "ready"
        if self.state.evidence.stopping:
            return "draining"
        if self.state.open_fault is not None:
            return "faulted"
        if self.state.reason in (Reason.SUSPENDED, Reason.MAINTENANCE):
            return "suspended"
        return "starting" if self.state.first_ready is None else "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All workers at one moment."""

    workers: Mapping[str, WorkerView] = field(default_factory=lambda: MappingProxyType({}))
    #: Workers wanted ready, by pool, where configured.
    min_ready: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))

    def pools(self) -> dict[str, list[WorkerView]]:
        """The workers by pool; configured pools without a worker are there too."""
        pools: dict[str, list[WorkerView]] = {name: [] for name in self.min_ready}
        for view in self.workers.values():
            pools.setdefault(view.pool, []).append(view)
        return pools


class Board:
    """Where the watchers write and everybody reads.

    Written on the event loop only. A reader gets a snapshot that nobody changes any more, so it may take it to another
    thread; the copy behind it is made at most once per change, and only when somebody reads.
    """

    def __init__(self, min_ready: Mapping[str, int] | None = None) -> None:
        self._views: dict[str, WorkerView] = {}
        self._min_ready = MappingProxyType(dict(min_ready or {}))
        self._snapshot: Snapshot | None = Snapshot(min_ready=self._min_ready)

    def want(self, min_ready: Mapping[str, int]) -> None:
        """How many workers are wanted ready, by pool, from now on."""
        self._min_ready = MappingProxyType(dict(min_ready))
        self._snapshot = None

    def publish(self, view: WorkerView) -> None:
        """Put in or replace one worker."""
        self._views[view.key] = view
        self._snapshot = None

    def remove(self, keys: Iterable[str]) -> None:
        """Take workers out."""
        for key in keys:
            self._views.pop(key, None)
        self._snapshot = None

    @property
    def snapshot(self) -> Snapshot:
        """All workers as they are now."""
        if self._snapshot is None:
            self._snapshot = Snapshot(workers=MappingProxyType(dict(self._views)), min_ready=self._min_ready)
        return self._snapshot
