"""A small Kubernetes API server for pods: real list and watch over HTTP, as far as discovery uses it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import TracebackType
from typing import Any

from aiohttp import web

TOKEN = "let-me-in"


def pod(
    name: str,
    *,
    namespace: str = "ml",
    ip: str | None = "127.0.0.2",
    port: int | None = 9000,
    node: str = "gpu-1",
    phase: str = "Running",
    labels: dict[str, str] | None = None,
    annotations: dict[str, str] | None = None,
    ports: list[dict[str, Any]] | None = None,
    **spec: Any,
) -> dict[str, Any]:
    """A pod as the API gives it; ``port`` is the one named grpc-control."""
    named = [{"name": "grpc-control", "containerPort": port, "protocol": "TCP"}] if port is not None else []
    return {
        "metadata": {
            "name": name,
            "namespace": namespace,
            "labels": {"app": "vllm", **(labels or {})},
            "annotations": annotations or {},
        },
        "spec": {"nodeName": node, "containers": [{"name": "vllm", "ports": ports or named}], **spec},
        "status": {"phase": phase, **({"podIP": ip} if ip else {})},
    }


class ApiServer:
    """``async with ApiServer() as api``: pods are put, changed and deleted; trouble is scripted."""

    def __init__(self) -> None:
        self.requests: list[dict[str, str]] = []
        #: Answer these verbs with this status instead.
        self.refuse: dict[str, int] = {}
        self.token = TOKEN
        self.page = 500
        self.port = 0
        self._version = 100
        self._oldest = 0
        self._pods: dict[tuple[str, str], dict[str, Any]] = {}
        self._history: list[tuple[int, str, dict[str, Any]]] = []
        self._waiting: list[asyncio.Event] = []
        self._watches: list[web.Request] = []
        self._runner: web.AppRunner | None = None

    def put(self, *pods: dict[str, Any]) -> None:
        """Create or change."""
        for one in pods:
            key = (one["metadata"]["namespace"], one["metadata"]["name"])
            self._record("MODIFIED" if key in self._pods else "ADDED", one)
            self._pods[key] = one

    def mark_deleted(self, name: str, namespace: str = "ml") -> None:
        """Begin a graceful deletion: the pod gets a deletionTimestamp and stays."""
        old = self._pods[namespace, name]
        self.put({**old, "metadata": {**old["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"}})

    def delete(self, name: str, namespace: str = "ml") -> None:
        """The pod is gone."""
        self._record("DELETED", self._pods.pop((namespace, name)))

    def bookmark(self) -> None:
        """Tell every watch how far things are."""
        self._record("BOOKMARK", {"kind": "Pod", "metadata": {}})

    def say(self, kind: str, content: dict[str, Any]) -> None:
        """Any event."""
        self._record(kind, content)

    def compact(self) -> None:
        """Forget the history, so that older versions have expired."""
        self._oldest = self._version
        self._history.clear()

    def cut(self) -> int:
        """Break the connection of every watch; how many there were."""
        watches = list(self._watches)
        for request in watches:
            if request.transport is not None:
                request.transport.abort()
        return len(watches)

    def verbs(self) -> list[str]:
        """What was asked, in order."""
        return ["watch" if "watch" in query else "list" for query in self.requests]

    @property
    def watching(self) -> int:
        """Watches that are open now."""
        return len(self._watches)

    def kubeconfig(self, path: Path, token: str = TOKEN) -> Path:
        """A kubeconfig for this server."""
        path.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "test",
                    "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
                    "clusters": [{"name": "test", "cluster": {"server": f"http://127.0.0.1:{self.port}"}}],
                    "users": [{"name": "test", "user": {"token": token}}],
                }
            )
        )
        return path

    def _record(self, kind: str, one: dict[str, Any]) -> None:
        if kind != "BOOKMARK":
            self._version += 1
        one = {**one, "metadata": {**one.get("metadata", {}), "resourceVersion": str(self._version)}}
        if kind in ("ADDED", "MODIFIED"):
            self._pods[one["metadata"]["namespace"], one["metadata"]["name"]] = one
        self._history.append((self._version, kind, one))
        for watch in self._waiting:
            watch.set()

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        query = dict(request.query)
        self.requests.append(query)
        verb = "watch" if "watch" in query else "list"
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            return _status(401, "Unauthorized")
        if verb in self.refuse:
            return _status(self.refuse[verb], f"scripted {self.refuse[verb]}")
        namespace = request.match_info.get("namespace")
        if verb == "watch":
            return await self._watch(request, query, namespace)
        return self._list(query, namespace)

    def _list(self, query: dict[str, str], namespace: str | None) -> web.StreamResponse:
        version, _, start = query.get("continue", f"{self._version}:0").partition(":")
        if int(version) < self._oldest:
            return _status(410, "The provided continue parameter is too old")
        found = [one for one in self._pods.values() if _matches(one, query, namespace)]
        end = int(start) + min(self.page, int(query.get("limit", "500")))
        meta = {"resourceVersion": version}
        if end < len(found):
            meta["continue"] = f"{version}:{end}"
        return web.json_response({"kind": "PodList", "metadata": meta, "items": found[int(start) : end]})

    async def _watch(self, request: web.Request, query: dict[str, str], namespace: str | None) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        since = int(query["resourceVersion"])
        if since < self._oldest:
            await response.write(_line("ERROR", {"kind": "Status", "code": 410, "reason": "Expired"}))
            return response
        ends = asyncio.get_running_loop().time() + float(query.get("timeoutSeconds", "1800"))
        # Bookmarks and errors are for whoever is connected when they come.
        news = [item for item in self._history if item[0] > since and item[1] not in ("BOOKMARK", "ERROR")]
        mark = len(self._history)
        self._watches.append(request)
        try:
            while True:
                for _, kind, one in news:
                    if kind in ("BOOKMARK", "ERROR") or _matches(one, query, namespace):
                        await response.write(_line(kind, one))
                try:
                    await asyncio.wait_for(self._more(mark), ends - asyncio.get_running_loop().time())
                except asyncio.TimeoutError:
                    return response
                news, mark = self._history[mark:], len(self._history)
        finally:
            self._watches = [one for one in self._watches if one is not request]

    async def _more(self, mark: int) -> None:
        moved = asyncio.Event()
        self._waiting.append(moved)
        try:
            while len(self._history) <= mark:
                moved.clear()
                await moved.wait()
        finally:
            self._waiting.remove(moved)

    async def __aenter__(self) -> ApiServer:
        app = web.Application()
        app.router.add_get("/api/v1/pods", self._serve)
        app.router.add_get("/api/v1/namespaces/{namespace}/pods", self._serve)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await self._listen()
        return self

    async def stop(self) -> None:
        """Go away: connections break, the port refuses."""
        assert self._runner is not None
        self.cut()
        for site in tuple(self._runner.sites):
            await site.stop()

    async def _listen(self) -> None:
        assert self._runner is not None
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        assert site._server is not None
        self.port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]

    async def back(self) -> None:
        """Come back on the same port."""
        await self._listen()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._runner is not None
        self.cut()
        await self._runner.cleanup()


def _line(kind: str, content: dict[str, Any]) -> bytes:
    return json.dumps({"type": kind, "object": content}).encode() + b"\n"


def _status(code: int, message: str) -> web.Response:
    return web.json_response({"kind": "Status", "status": "Failure", "message": message, "code": code}, status=code)


def _matches(one: dict[str, Any], query: dict[str, str], namespace: str | None) -> bool:
    meta = one["metadata"]
    if namespace is not None and meta.get("namespace") != namespace:
        return False
    labels = meta.get("labels", {})
    for term in filter(None, query.get("labelSelector", "").split(",")):
        name, _, value = term.partition("=")
        if labels.get(name) != value:
            return False
    for term in filter(None, query.get("fieldSelector", "").split(",")):
        name, _, value = term.partition("=")
        if name != "spec.nodeName" or one["spec"]["nodeName"] != value:
            return False
    return True
