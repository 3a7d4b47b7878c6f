"""Discovery: where the workers are, as a stream of whole sets of targets.

::

    sources = Merged([FileDiscoverer(["/etc/vllm-cp/targets.d/*.json"]), KubernetesDiscoverer(namespace="ml")])
    async with AsyncFleet(sources) as fleet:
        ...

A source never loses workers because it has trouble itself: its last good set goes on, ``status`` says what is wrong,
and the logger ``vllm_cp.discovery`` does too, once. DNS and YAML need ``vllm-cp[discovery]``, Kubernetes needs
``vllm-cp[kubernetes]``.
"""

from __future__ import annotations

from vllm_cp.discovery.base import (
    DEFAULT_POOL,
    DiscoveredTarget,
    Discoverer,
    DiscoveryFailed,
    DiscoveryStatus,
    Overrides,
    SyncDiscoverer,
    TargetSet,
)
from vllm_cp.discovery.dns import DnsDiscoverer, DnsKind, DnsName
from vllm_cp.discovery.file_sd import FileDiscoverer
from vllm_cp.discovery.in_thread import InThread
from vllm_cp.discovery.kubernetes import KubernetesDiscoverer
from vllm_cp.discovery.merge import Changes, Merged, diff
from vllm_cp.discovery.static import StaticDiscoverer, static_target

__all__ = [
    "DEFAULT_POOL",
    "Changes",
    "DiscoveredTarget",
    "Discoverer",
    "DiscoveryFailed",
    "DiscoveryStatus",
    "DnsDiscoverer",
    "DnsKind",
    "DnsName",
    "FileDiscoverer",
    "InThread",
    "KubernetesDiscoverer",
    "Merged",
    "Overrides",
    "StaticDiscoverer",
    "SyncDiscoverer",
    "TargetSet",
    "diff",
    "static_target",
]
