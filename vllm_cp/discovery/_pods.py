"""Kubernetes pods to targets: pure, one pod at a time, as the API's JSON has it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from vllm_cp.discovery.base import DEFAULT_POOL, DiscoveredTarget, Overrides

__all__ = ["PodReader", "pod_key"]

GRPC_PORT = "vllm-cp.io/grpc-port"
HTTP_PORT = "vllm-cp.io/http-port"
CANARY = "vllm-cp.io/canary"
GRPC_PORT_NAME = "grpc-control"
HTTP_PORT_NAME = "http"
WORKER_INDEX = "leaderworkerset.sigs.k8s.io/worker-index"
_OVER = ("Succeeded", "Failed")

Pod = Mapping[str, Any]


class _BadPort(Exception):
    """Why no port can be told."""


def pod_key(pod: Pod) -> str:
    """``namespace/pod``."""
    meta = pod["metadata"]
    return f"{meta.get('namespace', '')}/{meta['name']}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PodReader:
    """How pods are read."""

    #: The pod label whose value is the pool.
    pool_label: str | None = None
    pool: str = DEFAULT_POOL
    http_scheme: str = "http"
    overrides: Overrides = field(default_factory=Overrides)

    def target(self, pod: Pod) -> DiscoveredTarget | None:
        """The worker in a pod, ready or not; ``None`` for a pod that is none of ours.

        None of ours are pods that are over, and those of a LeaderWorkerSet that do not lead: they have no frontend.
        """
        meta, status = pod["metadata"], pod.get("status") or {}
        labels: Mapping[str, str] = meta.get("labels") or {}
        notes: Mapping[str, str] = meta.get("annotations") or {}
        if labels.get(WORKER_INDEX, "0") != "0" or status.get("phase") in _OVER:
            return None
        address, port, http_port, problem = status.get("podIP") or "", None, None, ""
        try:
            port, http_port = _ports(pod, notes)
        except _BadPort as bad:
            problem = str(bad)
        if not problem and not address:
            problem = f"the pod has no address yet (phase {status.get('phase') or 'unknown'})"
        host = f"[{address}]" if ":" in address else address
        return DiscoveredTarget(
            key=pod_key(pod),
            target=None if problem else f"{host}:{port}",
            problem=problem,
            http_url=f"{self.http_scheme}://{host}:{http_port}" if http_port and address else None,
            pool=(labels.get(self.pool_label) if self.pool_label else None) or self.pool,
            labels=MappingProxyType(dict(labels)),
            namespace=meta.get("namespace", ""),
            pod=meta["name"],
            node=(pod.get("spec") or {}).get("nodeName") or "",
            deleted=bool(meta.get("deletionTimestamp")),
            overrides=self._overrides(notes),
        )

    def _overrides(self, notes: Mapping[str, str]) -> Overrides:
        # Nothing else can be overridden from a pod: whoever may annotate one must not choose our files and tokens.
        said = {"on": True, "true": True, "off": False, "false": False}.get(notes.get(CANARY, "").lower())
        return self.overrides if said is None else replace(self.overrides, canary=said)


def _ports(pod: Pod, notes: Mapping[str, str]) -> tuple[int, int | None]:
    """The gRPC port, never a guess, and the HTTP port if one is told."""
    grpc = _annotated(notes, GRPC_PORT)
    named = [(ports[GRPC_PORT_NAME], ports) for ports in _named(pod) if GRPC_PORT_NAME in ports]
    if grpc is None:
        numbers = sorted({number for number, _ in named})
        if not numbers:
            raise _BadPort(
                f"the pod has no annotation {GRPC_PORT} and no container port named {GRPC_PORT_NAME}: give it one"
            )
        if len(numbers) > 1:
            raise _BadPort(
                f"ports {', '.join(map(str, numbers))} are all named {GRPC_PORT_NAME}: choose by annotation {GRPC_PORT}"
            )
        grpc = numbers[0]
    http = _annotated(notes, HTTP_PORT)
    if http is None:
        # A port called http may be anybody's, but not in the container that has the control port.
        http = next((ports[HTTP_PORT_NAME] for _, ports in named if HTTP_PORT_NAME in ports), None)
    return grpc, http


def _annotated(notes: Mapping[str, str], name: str) -> int | None:
    text = notes.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit()) or not 1 <= int(text) <= 65535:
        raise _BadPort(f"annotation {name} is {text!r}: a port is a number from 1 to 65535")
    return int(text)


def _named(pod: Pod) -> Iterator[dict[str, int]]:
    """The named ports of each container that goes on running."""
    spec = pod.get("spec") or {}
    sidecars = [one for one in spec.get("initContainers") or () if one.get("restartPolicy") == "Always"]
    for container in (*(spec.get("containers") or ()), *sidecars):
        ports = container.get("ports") or ()
        yield {port["name"]: port["containerPort"] for port in ports if port.get("name") and "containerPort" in port}
