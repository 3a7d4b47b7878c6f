"""What a daemon tells of a fleet, as the types of a direct fleet: the colour-free half of ``Fleet.from_daemon``."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from types import MappingProxyType
from typing import Any, TypeVar

from vllm_cp import errors
from vllm_cp._fleet.changes import (
    FleetChange,
    HealthChanged,
    InstanceChanged,
    WorkerAdded,
    WorkerChanged,
    WorkerRemoved,
)
from vllm_cp._fleet.snapshot import FleetSnapshot, WorkerSnapshot
from vllm_cp._http_call import Answer, Call, UnreadableError
from vllm_cp.discovery.base import DEFAULT_POOL, DiscoveredTarget, DiscoveryStatus
from vllm_cp.errors import ConfigError, ControlError
from vllm_cp.models.health import HealthStatus
from vllm_cp.models.kv_source import Address, KvEventSource
from vllm_cp.models.model import ModelInfo
from vllm_cp.models.server import Parallelism, RlCapabilities, ServerInfo

__all__ = ["POLL_S", "Follower", "changes_since", "refuse_map", "snapshot_call"]

T = TypeVar("T")

#: The format that is read here.
SCHEMA = 1
#: How long one question for changes waits at the daemon, seconds.
POLL_S = 20.0
#: Between two questions to a daemon that does not answer, seconds.
PAUSE_S = 1.5
_HINT = "is this the base URL of a vllm-cp-exporter?"
_ERRORS: Mapping[str, type[ControlError]] = {
    name: kind
    for name in errors.__all__
    if isinstance(kind := getattr(errors, name), type) and issubclass(kind, ControlError)
} | {"ControlError": ControlError}


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What a daemon says has changed."""

    as_of: float
    revision: int
    changed: tuple[WorkerSnapshot, ...]
    removed: tuple[str, ...]


def refuse_map() -> ConfigError:
    """Why a fleet that a daemon tells of asks no worker."""
    return ConfigError(
        "a fleet from a daemon asks no worker itself: snapshot() and watch() give what the daemon knows;"
        " for map() make a fleet of the targets"
    )


def snapshot_call() -> Call[tuple[FleetSnapshot, int]]:
    """All workers, and the revision at which they were like that."""
    return Call(verb="GET", path="/api/v1/workers", parse=_snapshot, safe=True, missing=_HINT)


def changes_since(revision: int, wait_s: float = POLL_S) -> Call[Delta | None]:
    """What changed since then, as soon as something has; ``None``: read all workers again."""
    return Call(
        verb="GET",
        path=f"/api/v1/watch?since={revision}&wait={wait_s:g}",
        parse=_delta,
        safe=True,
        also=frozenset({410}),
        missing=_HINT,
    )


class Follower:
    """Turns what the daemon says into changes. Give it whole snapshots, and deltas after them."""

    def __init__(self, wall: Callable[[], float] = time.time) -> None:
        self._wall = wall
        self._known: dict[str, WorkerSnapshot] = {}
        self._instances: dict[str, str] = {}
        self.revision: int | None = None
        self.status = DiscoveryStatus()

    @property
    def targets(self) -> tuple[DiscoveredTarget, ...]:
        """Who was there last."""
        return tuple(worker.target for worker in self._known.values())

    def all(self, snapshot: FleetSnapshot, revision: int) -> Iterator[FleetChange]:
        """Everything, the first time and after a gap."""
        self.revision, self.status = revision, DiscoveryStatus(last_success=self._wall())
        there = {worker.key for worker in snapshot}
        yield from self._changes(snapshot.as_of, snapshot.workers, [key for key in self._known if key not in there])

    def some(self, delta: Delta) -> Iterator[FleetChange]:
        """What changed."""
        self.revision, self.status = delta.revision, DiscoveryStatus(last_success=self._wall())
        yield from self._changes(delta.as_of, delta.changed, delta.removed)

    def lost(self, error: Exception) -> None:
        """The daemon does not answer: nothing is known of the workers, which is no change of theirs."""
        self.status = DiscoveryStatus(last_success=self.status.last_success, error=str(error))

    def _changes(self, at: float, now: Iterable[WorkerSnapshot], gone: Iterable[str]) -> Iterator[FleetChange]:
        for key in gone:
            was = self._known.pop(key, None)
            self._instances.pop(key, None)
            if was is not None:
                yield WorkerRemoved(at=at, target=was.target)
        for worker in now:
            old = self._known.get(worker.key)
            self._known[worker.key] = worker
            if old is None:
                yield WorkerAdded(at=at, target=worker.target)
            elif old.target != worker.target:
                yield WorkerChanged(at=at, target=worker.target, was=old.target)
            if old is None or old.health is not worker.health:
                before = old.health if old else None
                error = worker.errors.get("health")
                yield HealthChanged(at=at, target=worker.target, was=before, now=worker.health, error=error)
            instance = worker.server.instance_id if worker.server else None
            if instance is not None:
                last = self._instances.get(worker.key)
                self._instances[worker.key] = instance
                if last not in (None, instance):
                    assert last is not None
                    yield InstanceChanged(at=at, target=worker.target, was=last, now=instance)


def _snapshot(answer: Answer) -> tuple[FleetSnapshot, int]:
    with _Reading():
        document = _document(answer)
        workers = tuple(_worker(record) for record in document["workers"])
        return FleetSnapshot(as_of=_moment(document["as_of"]), workers=workers), int(document["revision"])


def _delta(answer: Answer) -> Delta | None:
    if answer.status == 410:
        return None
    with _Reading():
        document = _document(answer)
        return Delta(
            as_of=_moment(document["as_of"]),
            revision=int(document["revision"]),
            changed=tuple(_worker(record) for record in document["changed"]),
            removed=tuple(str(key) for key in document["removed"]),
        )


class _Reading:
    """Whatever is not as it should be makes the answer unreadable."""

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, KeyError | TypeError | ValueError | AttributeError) and not isinstance(
            error, UnreadableError
        ):
            raise UnreadableError(f"not the daemon's format: {type(error).__name__}: {error}", _HINT) from None


def _document(answer: Answer) -> Mapping[str, Any]:
    document = json.loads(answer.body)
    if not isinstance(document, dict) or "schema" not in document:
        raise UnreadableError("no answer of a daemon", _HINT)
    if document["schema"] != SCHEMA:
        raise UnreadableError(f"format {document['schema']!r}, and {SCHEMA} is read here", "update vllm-cp")
    return document


def _worker(record: Mapping[str, Any]) -> WorkerSnapshot:
    target = record["target"] or None
    found = DiscoveredTarget(
        key=record["worker"],
        target=target,
        problem="" if target else "no control port: the daemon watches it over HTTP only",
        http_url=record["http_url"],
        pool=record["pool"] or DEFAULT_POOL,
        namespace=record["namespace"] or "",
        pod=record["pod"] or "",
        node=record["node"] or "",
    )
    return WorkerSnapshot(
        target=found,
        health=HealthStatus(record["health"]) if record["health"] else None,
        server=_made(ServerInfo, record["server"], parallelism=Parallelism, rl_capabilities=RlCapabilities),
        model=_made(ModelInfo, record["model"]),
        sources=_sources(record["sources"]),
        errors=MappingProxyType({name: _error(found, each) for name, each in record["errors"].items()}),
    )


def _sources(records: Any) -> tuple[KvEventSource, ...] | None:
    if records is None:
        return None
    made = [_made(KvEventSource, record, live=Address, replay=Address) for record in records]
    return tuple(source for source in made if source is not None)


def _made(kind: type[T], record: Any, **parts: type[Any]) -> T | None:
    """A model from its record. Fields that this version does not know are left out."""
    if record is None:
        return None
    values = {}
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]  # only dataclasses come here
        if field.name in record:
            value = record[field.name]
            if field.name in parts:
                value = _made(parts[field.name], value)
            values[field.name] = tuple(value) if isinstance(value, list) else value
    return kind(**values)


def _error(target: DiscoveredTarget, record: Mapping[str, str]) -> Exception:
    """The error that a direct fleet would have; of a kind unknown here, a ControlError."""
    kind = _ERRORS.get(record["kind"], ControlError)
    return kind(target.target or target.key, "", record["code"], record["detail"], "as the daemon saw it")


def _moment(text: str) -> float:
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
