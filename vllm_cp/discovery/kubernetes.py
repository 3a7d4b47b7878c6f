"""Targets from Kubernetes: the pods that a selector matches, in a namespace, in all, or on one node.

- The identity is ``namespace/pod``. Ready and not-ready pods are there alike, pods that are over are not; a pod that is
  being deleted has ``deleted`` set until it is gone.
- The gRPC port is that of the annotation ``vllm-cp.io/grpc-port``, else of the container port named ``grpc-control``. A
  pod without either is there with a ``problem``: a port is never assumed.
- The HTTP port is that of the annotation ``vllm-cp.io/http-port``, else of the port named ``http`` beside
  ``grpc-control`` in one container. ``vllm-cp.io/canary``: ``on`` or ``off``.
- Of a LeaderWorkerSet's group only the leader (``leaderworkerset.sigs.k8s.io/worker-index`` = 0) is a worker.

It needs the verbs ``list`` and ``watch`` on ``pods``: in the namespace by a Role, for all namespaces by a ClusterRole.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, cast

from vllm_cp.discovery._kube_api import ApiTrouble, Event, Expired, PodApi
from vllm_cp.discovery._pods import PodReader, pod_key
from vllm_cp.discovery._status import StatusKeeper
from vllm_cp.discovery.base import DEFAULT_POOL, DiscoveredTarget, DiscoveryStatus, Overrides, TargetSet

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

__all__ = ["KubernetesDiscoverer"]


class KubernetesDiscoverer:
    """Pods by list and watch. While the API server is away or refuses, the last set goes on and ``status`` says why."""

    def __init__(
        self,
        *,
        namespace: str | None,
        label_selector: str | None = None,
        node: str | None = None,
        pool_label: str | None = None,
        pool: str = DEFAULT_POOL,
        http_scheme: str = "http",
        overrides: Overrides | None = None,
        kubeconfig: Path | None = None,
        context: str | None = None,
        name: str = "kubernetes",
        watch_s: float = 240.0,
        retry_s: tuple[float, float] = (1.0, 30.0),
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        jitter: Callable[[], float] = random.random,
        now: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """
        Args:
            namespace: where to look; ``None`` is all namespaces, which takes a ClusterRole.
            label_selector: as kubectl's ``-l``.
            node: only pods on this node, for a DaemonSet that looks after its own.
            pool_label: pod label whose value is the pool; pods without it are in ``pool``.
            http_scheme: of the workers' HTTP servers.
            overrides: for every pod.
            kubeconfig, context: by default the pod's service account, outside of a cluster kubectl's own choice.
            name: what to call this source.
            watch_s: length of one watch, seconds; the next goes on where it ended.
            retry_s: first and longest pause after a failure, seconds; doubled each time, with jitter.
            sleep, jitter, now, wall: where time and chance come from.

        Raises ImportError when kubernetes_asyncio is missing.
        """
        self._api = PodApi(
            namespace=namespace,
            label_selector=label_selector,
            field_selector=f"spec.nodeName={node}" if node is not None else None,
            kubeconfig=kubeconfig,
            context=context,
        )
        self._reader = PodReader(
            pool_label=pool_label, pool=pool, http_scheme=http_scheme, overrides=overrides or Overrides()
        )
        self._name = name
        self._keeper = StatusKeeper(name, wall)
        self._watch_s = watch_s
        self._retry_s = retry_s
        self._sleep, self._jitter, self._now = sleep, jitter, now

    @property
    def name(self) -> str:
        """What to call it."""
        return self._name

    @property
    def status(self) -> DiscoveryStatus:
        """How it fares. The last success is the last word of the API server, which comes once a minute at least."""
        return self._keeper.status

    async def stream(self) -> AsyncIterator[TargetSet]:
        """The set after each change of a pod that matters here."""
        pods: dict[str, DiscoveredTarget] = {}
        version: str | None = None
        last: TargetSet | None = None
        fruitless = 0
        try:
            while True:
                try:
                    if version is None:
                        pods, version = await self._list()
                        self._keeper.good()
                        targets = TargetSet(tuple(pods.values()))
                        if targets != last:
                            last = targets
                            yield targets
                    began = self._now()
                    batches = cast("AsyncGenerator[list[Event], None]", self._api.watch(version, seconds=self._watch_s))
                    async with aclosing(batches):
                        async for events in batches:
                            self._keeper.good()
                            for event in events:
                                fruitless = 0
                                version = event.version or version
                                self._apply(pods, event)
                            targets = TargetSet(tuple(pods.values()))
                            if targets != last:
                                last = targets
                                yield targets
                    # Watches end, and the next goes on at once; unless somebody cuts them short.
                    fruitless = 0 if self._now() - began >= self._watch_s / 2 else fruitless + 1
                except Expired:
                    version = None
                    fruitless += 1
                    if fruitless == 1:
                        continue
                except ApiTrouble as trouble:
                    self._keeper.bad(str(trouble))
                    fruitless += 1
                    if trouble.stale_login:
                        await self._api.close()
                await self._pause(fruitless)
        finally:
            await self._api.close()

    async def _list(self) -> tuple[dict[str, DiscoveredTarget], str]:
        pods, version = await self._api.every()
        read = ((pod_key(pod), self._reader.target(pod)) for pod in pods)
        return {key: target for key, target in read if target is not None}, version

    def _apply(self, pods: dict[str, DiscoveredTarget], event: Event) -> None:
        if event.kind == "BOOKMARK":
            return
        key = pod_key(event.pod)
        target = None if event.kind == "DELETED" else self._reader.target(event.pod)
        if target is None:
            pods.pop(key, None)
        else:
            pods[key] = target

    async def _pause(self, times: int) -> None:
        if times:
            first, longest = self._retry_s
            await self._sleep(min(longest, first * 2.0 ** min(times - 1, 30)) * (0.5 + self._jitter() / 2))
