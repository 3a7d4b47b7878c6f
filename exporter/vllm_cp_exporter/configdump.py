"""The settings in force, in the form of the configuration file, for ``/config``. Files are named, never opened."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from vllm_cp import Connection, Tls
from vllm_cp.discovery import DEFAULT_POOL, Overrides
from vllm_cp_exporter.config import Canary, ExporterConfig, PoolSettings, ProbeModule, WorkerConfig
from vllm_cp_exporter.sources import DnsSource, FileSource, KubernetesSource, Source

__all__ = ["redacted"]


def redacted(settings: ExporterConfig) -> dict[str, Any]:
    """Plain values for YAML or JSON. A daemon that reads them has the same settings."""
    return _without_nothing(
        {
            "listen": str(settings.listen),
            "probe_interval": settings.probe_interval_s,
            "info_interval": settings.info_interval_s,
            "engine_recovery_timeout": settings.engine_recovery_timeout_s,
            "state_file": _path(settings.state_file),
            "log": {"format": settings.log_format, "level": settings.log_level},
            "defaults": _reached(settings.connection) | _judged(settings.pool_defaults),
            "pools": {name: _pool(name, settings) for name in sorted({*settings.pools, *settings.min_ready})},
            "targets": [_worker(worker, settings) for worker in settings.workers],
            "discovery": _discovery(settings.sources),
            "modules": {name: _module(module) for name, module in settings.modules.items()},
            "probe_allow": list(settings.probe_allow),
        }
    )


def _without_nothing(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value not in (None, {}, [])}


def _path(path: Path | None) -> str | None:
    return None if path is None else os.fspath(path.absolute())


def _tls(tls: Tls | None) -> Any:
    if tls is None:
        return None
    files = {"ca_file": tls.ca_file, "cert_file": tls.cert_file, "key_file": tls.key_file}
    return _without_nothing({name: _path(path) for name, path in files.items()}) or True


def _reached(connection: Connection | ProbeModule) -> dict[str, Any]:
    return _without_nothing(
        {
            "tls": _tls(connection.tls),
            "server_name": connection.server_name,
            "token_file": _path(connection.token_file),
            "insecure_token": connection.insecure_token or None,
            "timeout": connection.timeout_s,
        }
    )


def _judged(pool: PoolSettings) -> dict[str, Any]:
    return {
        "ready_rung": pool.ready_rung.value,
        "expect": pool.expect.value,
        "answer_within": pool.answer_within_s,
        "canary": pool.canary.value,
        "kv_events": pool.kv_events,
    }


def _pool(name: str, settings: ExporterConfig) -> dict[str, Any]:
    least = settings.min_ready.get(name)
    judged = _judged(settings.pools[name]) if name in settings.pools else {}
    return judged if least is None else {"min_ready": least} | judged


def _module(module: ProbeModule) -> dict[str, Any]:
    return _reached(module) | {"rung": module.rung.value}


def _worker(worker: WorkerConfig, settings: ExporterConfig) -> dict[str, Any]:
    """One that is written down, with what it has different from the defaults."""
    shared = settings.connection
    connection = worker.connection or worker.http
    assert connection is not None
    own: dict[str, Any] = {
        "server_name": connection.server_name if connection.server_name != shared.server_name else None,
        "token_file": _path(connection.token_file) if connection.token_file != shared.token_file else None,
    }
    if connection.tls != shared.tls and worker.connection is not None:
        own["tls"] = False if connection.tls is None else _tls(connection.tls)
    usual = settings.canary(worker.pool)
    if worker.connection is not None and worker.canary is not usual:
        own["canary"] = worker.canary is not Canary.OFF
    if worker.connection is not None and worker.kv_events is not settings.kv_events(worker.pool):
        own["kv_events"] = worker.kv_events
    if worker.kv_events != settings.kv_events(worker.pool) and worker.connection is not None:
        own["kv_events"] = worker.kv_events
    return _without_nothing(
        {
            "name": worker.key,
            "grpc": worker.connection.target if worker.connection else None,
            "http": worker.http.url if worker.http else None,
            "pool": worker.pool if worker.pool != DEFAULT_POOL else None,
        }
    ) | {key: value for key, value in own.items() if value is not None}


# -- discovery -------------------------------------------------------------------------------


def _discovery(sources: tuple[Source, ...]) -> dict[str, Any]:
    return _without_nothing(
        {
            "file_sd": [_files(source) for source in sources if isinstance(source, FileSource)],
            "dns": [_dns(source) for source in sources if isinstance(source, DnsSource)],
            "kubernetes": [_pods(source) for source in sources if isinstance(source, KubernetesSource)],
        }
    )


def _files(source: FileSource) -> dict[str, Any]:
    return {"name": source.name, "files": list(source.files), "poll_interval": source.poll_s} | _every(source)


def _dns(source: DnsSource) -> dict[str, Any]:
    dns = source.dns
    ports = _without_nothing({"port": dns.port, "http_port": dns.http_port})
    return {"name": dns.name, "kind": dns.kind.value, "family": dns.family} | ports | _every(source)


def _pods(source: KubernetesSource) -> dict[str, Any]:
    return _without_nothing(
        {
            "name": source.name,
            "namespace": source.namespace or "*",
            "selector": source.label_selector,
            "node": source.node,
            "pool_label": source.pool_label,
            "http_scheme": source.http_scheme,
            "kubeconfig": _path(source.kubeconfig),
            "context": source.context,
        }
    ) | _every(source)


def _every(source: Source) -> dict[str, Any]:
    """What all kinds of sources have."""
    return {"pool": source.pool} | _overrides(source.overrides)


def _overrides(own: Overrides) -> dict[str, Any]:
    said = {
        "tls": False if own.plaintext else _tls(own.tls),
        "server_name": own.server_name,
        "token_file": _path(own.token_file),
        "canary": own.canary,
    }
    return {key: value for key, value in said.items() if value is not None}
