"""From discovered targets to workers to watch: pure, one set at a time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm_cp import ConfigError, Connection
from vllm_cp.discovery import DiscoveredTarget
from vllm_cp.faults import HttpConnection
from vllm_cp_exporter.config import ExporterConfig, WorkerConfig, http_connection
from vllm_cp_exporter.sources import WINDOW_S, Source

__all__ = ["Wanted", "shared_settings", "worker_of"]


class Wanted:
    """The workers that should be watched. Remembers what it made of each target while the settings stay the same."""

    def __init__(self) -> None:
        self._settings: ExporterConfig | None = None
        self._made: dict[str, tuple[DiscoveredTarget, str, WorkerConfig]] = {}
        #: Keys that more than one source gave; the first had them.
        self.clashes: tuple[str, ...] = ()

    def workers(
        self, settings: ExporterConfig, found: Iterable[tuple[Source, Iterable[DiscoveredTarget]]]
    ) -> dict[str, WorkerConfig]:
        """By key. What is written down comes first, then the sources in their order."""
        if settings is not self._settings:
            self._settings, self._made = settings, {}
        made, old = {}, self._made
        workers = {worker.key: worker for worker in settings.workers}
        clashes = []
        for source, targets in found:
            for target in targets:
                if target.key in workers:
                    clashes.append(target.key)
                    continue
                known = old.get(target.key)
                if known is None or (known[0] is not target and known[0] != target) or known[1] != source.name:
                    worker = worker_of(target, settings, source=source.name, window_s=source.window_s)
                    known = (target, source.name, worker)
                made[target.key] = known
                workers[target.key] = known[2]
        self._made = made
        self.clashes = tuple(clashes)
        return workers


def worker_of(
    target: DiscoveredTarget,
    settings: ExporterConfig,
    *,
    source: str,
    window_s: float = WINDOW_S,
    strict: bool = False,
) -> WorkerConfig:
    """A worker from a target. One that cannot be asked has a ``problem``; with ``strict`` it raises ConfigError."""
    connection: Connection | None = None
    http: HttpConnection | None = None
    problem = ""
    try:
        connection = target.connection(settings.connection)
        if target.http_url is not None:
            http = http_connection(target.http_url, shared_settings(connection))
    except ConfigError as error:
        if strict:
            raise
        connection, problem = None, target.problem or str(error)
    return WorkerConfig(
        key=target.key,
        pool=target.pool,
        connection=connection,
        http=http,
        canary=settings.canary(target.pool, target.overrides.canary),
        kv_events=settings.kv_events(target.pool),
        rules=settings.rules(target.pool, window_s=window_s),
        namespace=target.namespace,
        pod=target.pod,
        node=target.node,
        source=source,
        deleted=target.deleted,
        problem=problem,
    )


def shared_settings(connection: Connection) -> dict[str, Any]:
    """The fields of a connection that do not belong to one target."""
    return {
        "tls": connection.tls,
        "server_name": connection.server_name,
        "token_file": connection.token_file,
        "insecure_token": connection.insecure_token,
        "timeout_s": connection.timeout_s,
    }
