"""Where targets come from, as configured: frozen, comparable, and able to build the discoverer that reads it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from vllm_cp.discovery import (
    DEFAULT_POOL,
    Discoverer,
    DnsDiscoverer,
    DnsName,
    FileDiscoverer,
    KubernetesDiscoverer,
    Overrides,
)

__all__ = ["KUBERNETES_WINDOW_S", "WINDOW_S", "DnsSource", "FileSource", "KubernetesSource", "Source"]

#: A fault's cause is counted after this long.
WINDOW_S = 5.0
#: A pod's end shows on its port before the API server tells of it, and a rolling upgrade is no fault.
KUBERNETES_WINDOW_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSource:
    """Files in Prometheus' file_sd format."""

    name: str = "file_sd"
    #: Names and patterns.
    files: tuple[str, ...]
    #: Seconds between two looks.
    poll_s: float = 5.0
    pool: str = DEFAULT_POOL
    overrides: Overrides = field(default_factory=Overrides)

    @property
    def window_s(self) -> float:
        """How long a fault waits to be counted, seconds."""
        return WINDOW_S

    def build(self) -> Discoverer:
        """Raises ConfigError, ImportError."""
        return FileDiscoverer(self.files, poll_s=self.poll_s, pool=self.pool, overrides=self.overrides, name=self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class DnsSource:
    """One DNS name."""

    name: str
    dns: DnsName
    pool: str = DEFAULT_POOL
    overrides: Overrides = field(default_factory=Overrides)

    @property
    def window_s(self) -> float:
        """How long a fault waits to be counted, seconds."""
        return WINDOW_S

    def build(self) -> Discoverer:
        """Raises ConfigError, ImportError."""
        return DnsDiscoverer([self.dns], pool=self.pool, overrides=self.overrides, name=self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesSource:
    """Pods."""

    name: str = "kubernetes"
    #: ``None`` is all.
    namespace: str | None
    label_selector: str | None = None
    node: str | None = None
    pool_label: str | None = None
    pool: str = DEFAULT_POOL
    http_scheme: str = "http"
    kubeconfig: Path | None = None
    context: str | None = None
    overrides: Overrides = field(default_factory=Overrides)

    @property
    def window_s(self) -> float:
        """How long a fault waits to be counted, seconds."""
        return KUBERNETES_WINDOW_S

    def build(self) -> Discoverer:
        """Raises ConfigError, ImportError."""
        return KubernetesDiscoverer(
            namespace=self.namespace,
            label_selector=self.label_selector,
            node=self.node,
            pool_label=self.pool_label,
            pool=self.pool,
            http_scheme=self.http_scheme,
            overrides=self.overrides,
            kubeconfig=self.kubeconfig,
            context=self.context,
            name=self.name,
        )


Source = FileSource | DnsSource | KubernetesSource
