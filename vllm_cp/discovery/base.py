"""What discovery gives: whole sets of targets, and word of how it goes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Protocol, runtime_checkable

from vllm_cp.config import Connection, Tls
from vllm_cp.errors import ConfigError

__all__ = [
    "DEFAULT_POOL",
    "DiscoveredTarget",
    "Discoverer",
    "DiscoveryFailed",
    "DiscoveryStatus",
    "Overrides",
    "SyncDiscoverer",
    "TargetSet",
]

DEFAULT_POOL = "default"


class DiscoveryFailed(RuntimeError):
    """Discovery brought no set of targets in the time given. Which is not an empty set: nothing is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overrides:
    """What one target, or all targets of one source, have different from the fleet's own ``Connection``."""

    #: ``None``: as the fleet.
    tls: Tls | None = None
    #: No TLS even where the fleet has it.
    plaintext: bool = False
    #: File with a bearer token; ``None``: as the fleet.
    token_file: Path | None = None
    #: Name to expect in the worker's certificate; ``None``: as the fleet. Needs TLS, here or there.
    server_name: str | None = None
    #: Whether generations may be sent as a proof; ``None``: as the pool.
    canary: bool | None = None

    def __post_init__(self) -> None:
        if self.plaintext and self.tls is not None:
            raise ConfigError("tls and plaintext exclude each other: give one of the two")
        if self.plaintext and self.server_name is not None:
            raise ConfigError("server_name is the name in a TLS certificate: it makes no sense with plaintext")


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscoveredTarget:
    """One worker as discovery knows it."""

    #: The identity: Kubernetes ``namespace/pod``, else the target as written, in canonical spelling. It stays the same
    #: when the worker's address changes.
    key: str
    #: gRPC target in any form that ``Connection`` takes; ``None`` when none is known, see ``problem``.
    target: str | None
    #: Why there is no usable ``target``: such a worker is shown and not asked.
    problem: str = ""
    #: Base URL of the worker's HTTP server, ``http://host:port``; ``None`` when it isn't known.
    http_url: str | None = None
    #: The failure domain: one task, one model, one release switch.
    pool: str = DEFAULT_POOL
    #: Further labels as the source gave them.
    labels: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}), hash=False)
    #: Kubernetes namespace, pod and node; "" elsewhere.
    namespace: str = ""
    pod: str = ""
    node: str = ""
    #: The source says that this worker is going away (a Kubernetes ``deletionTimestamp``).
    deleted: bool = False
    #: The DNS name that ``target`` was resolved from, where we resolved it: what a certificate is checked against.
    dns_name: str | None = None
    overrides: Overrides = Overrides()

    def __post_init__(self) -> None:
        if (self.target is None) != bool(self.problem):
            raise ValueError(f"{self.key}: a target without an address has a problem, one with an address has none")

    def reached_as(self, other: DiscoveredTarget) -> bool:
        """Whether both are reached in the same way, so that one client serves for either."""
        ours, theirs = (self.target, self.dns_name), (other.target, other.dns_name)
        return ours == theirs and self.overrides == other.overrides

    def connection(self, defaults: Connection | None = None) -> Connection:
        """How to reach this worker: ``defaults`` with the target and the overrides put in.

        Raises ConfigError, for a target without a usable address too."""
        if self.target is None:
            raise ConfigError(f"{self.key}: {self.problem}")
        base, own = defaults or Connection(), self.overrides
        tls = None if own.plaintext else own.tls or base.tls
        server_name = own.server_name
        if server_name is None and tls is not None:
            # gRPC dials an address here, and certificates carry names.
            server_name = base.server_name or self.dns_name
        return replace(
            base,
            target=self.target,
            tls=tls,
            token_file=own.token_file or base.token_file,
            server_name=server_name,
        )


@dataclass(frozen=True, slots=True)
class TargetSet:
    """All targets of a source at one moment. Order is the source's; keys are unique."""

    targets: tuple[DiscoveredTarget, ...] = ()

    def __post_init__(self) -> None:
        if len({target.key for target in self.targets}) != len(self.targets):
            raise ValueError("two targets of one set have the same key")

    @classmethod
    def of(cls, targets: Iterable[DiscoveredTarget]) -> tuple[TargetSet, tuple[DiscoveredTarget, ...]]:
        """A set of the first target of each key, and the others, whose key was taken."""
        first: dict[str, DiscoveredTarget] = {}
        taken = []
        for target in targets:
            if first.setdefault(target.key, target) is not target:
                taken.append(target)
        return cls(tuple(first.values())), tuple(taken)

    @property
    def by_key(self) -> dict[str, DiscoveredTarget]:
        """The targets by their key, in order."""
        return {target.key: target for target in self.targets}


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscoveryStatus:
    """How a source fares."""

    #: Unix seconds when the source was last read without an error; ``None`` before the first time.
    last_success: float | None = None
    #: What is wrong now, and what to do about it; ``None`` when nothing is. The last good set goes on meanwhile.
    error: str | None = None


class Discoverer(Protocol):
    """A source of targets."""

    @property
    def name(self) -> str:
        """What to call it in logs and metrics, ``file_sd``; unique among the sources of one fleet."""
        ...

    @property
    def status(self) -> DiscoveryStatus:
        """How it fares. Moves only while a stream of it is being read."""
        ...

    def stream(self) -> AsyncIterator[TargetSet]:
        """Whole sets: the first as soon as there is one, then one after each change. It does not end by itself.

        Trouble with the source is no exception but ``status.error``; what is raised is a defect. One reader at a time.
        """
        ...


@runtime_checkable
class SyncDiscoverer(Protocol):
    """A source that can also be read without an event loop: static, files, and ``InThread`` around any other."""

    @property
    def status(self) -> DiscoveryStatus:
        """How it fares."""
        ...

    def look(self) -> TargetSet:
        """The set as of now. Quick, so it may be called before every use. Raises DiscoveryFailed before the first
        good read."""
        ...
