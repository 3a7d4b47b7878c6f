"""Flags over environment over file: what was said, put together into the settings.

Every flag has its twin in the file, and wins over it; a pool or a target that says otherwise for itself still does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from vllm_cp import ConfigError, Connection, Tls
from vllm_cp.discovery import DEFAULT_POOL, DiscoveredTarget
from vllm_cp_exporter.config import (
    Canary,
    ExporterConfig,
    PoolSettings,
    WorkerConfig,
    http_connection,
    parse_worker,
)
from vllm_cp_exporter.configfile import FileTarget, PoolSaid, Said
from vllm_cp_exporter.lined import Wrong
from vllm_cp_exporter.wanted import shared_settings, worker_of

__all__ = ["Flags", "assemble"]

_NO_PAGE = "a canary is only sent to a worker that is idle by its own /metrics; give its URL"


@dataclass(frozen=True, slots=True)
class Flags:
    """The command line and the environment."""

    #: By name, defaults included, as ``PoolSettings`` and so on want them.
    values: Mapping[str, Any]
    #: Those that somebody wrote.
    given: frozenset[str]

    def over(self, name: str, said: Any) -> Any:
        """The flag where it is given, else what the file says, else the flag's default."""
        return self.values[name] if name in self.given or said is None else said


def assemble(flags: Flags, said: Said | None) -> ExporterConfig:
    """The settings. Raises ConfigError: the one mistake in the flags, or Mistakes in the file."""
    settings = _all_but_workers(flags, said)
    workers = _flag_workers(flags, settings)
    if said is not None:
        taken = {worker.key for worker in workers}
        workers += [worker for worker in _file_workers(said, settings) if worker.key not in taken]
        said.document.check()
    elif not workers:
        raise ConfigError("no worker to watch: give --target [NAME=]HOST:PORT")
    _check_kv_events(settings, workers)
    return replace(settings, workers=tuple(workers))


def _check_kv_events(settings: ExporterConfig, workers: Iterable[WorkerConfig]) -> None:
    """Raises ConfigError where they are wanted and what they need is not installed."""
    pools = (settings.pool_defaults, *settings.pools.values())
    if any(pool.kv_events for pool in pools) or any(worker.kv_events for worker in workers):
        import vllm_cp.kv  # noqa: F401  (says what to install)


def _all_but_workers(flags: Flags, said: Said | None) -> ExporterConfig:
    pools = said.pools if said else {}
    wanted = {name: pool.min_ready for name, pool in pools.items() if pool.min_ready is not None}
    if flags.values["min_ready"] is not None:
        wanted[flags.values["pool"]] = flags.values["min_ready"]
    defaults = _pool_defaults(flags, said)

    def over(name: str, what: str | None = None) -> Any:
        return flags.over(name, getattr(said, what or name) if said else None)

    return ExporterConfig(
        sources=said.sources if said else (),
        connection=_connection(flags, said),
        pools=MappingProxyType({name: _pool(pool, defaults) for name, pool in pools.items()}),
        pool_defaults=defaults,
        listen=over("listen"),
        min_ready=MappingProxyType(wanted),
        probe_interval_s=over("probe_interval", "probe_interval_s"),
        info_interval_s=over("info_interval", "info_interval_s"),
        engine_recovery_timeout_s=over("engine_recovery_timeout", "engine_recovery_timeout_s"),
        state_file=over("state_file"),
        modules=said.modules if said else MappingProxyType({}),
        probe_allow=said.probe_allow if said else (),
        log_format=over("log_format"),
        log_level=over("log_level"),
    )


def _pool_defaults(flags: Flags, said: Said | None) -> PoolSettings:
    of_file = said.defaults.pool if said else PoolSaid()
    return PoolSettings(
        ready_rung=flags.over("ready_rung", of_file.ready_rung),
        expect=flags.over("expect", of_file.expect),
        answer_within_s=flags.over("answer_within", of_file.answer_within_s),
        canary=flags.over("canary", of_file.canary),
        kv_events=flags.over("kv_events", of_file.kv_events),
    )


def _pool(said: PoolSaid, defaults: PoolSettings) -> PoolSettings:
    own = {
        name: getattr(said, name)
        for name in ("ready_rung", "expect", "answer_within_s", "canary", "kv_events")
        if getattr(said, name) is not None
    }
    return replace(defaults, **own)


# -- connections -----------------------------------------------------------------------------


def _connection(flags: Flags, said: Said | None) -> Connection:
    """What all connections share."""
    of_file = said.defaults if said else None
    tls = _flag_tls(flags) or (of_file.tls if of_file and isinstance(of_file.tls, Tls) else None)
    server_name = flags.over("server_name", of_file and of_file.server_name)
    token_file = flags.over("token_file", of_file and of_file.token_file)
    insecure = flags.over("insecure_token", of_file and of_file.insecure_token)
    timeout_s = flags.over("timeout", of_file and of_file.timeout_s)
    by_flag = said is None or bool({"server_name", "token_file"} & flags.given)
    try:
        _check_tls(server_name, token_file if not insecure else None, tls, by_flag)
        return Connection(
            tls=tls,
            server_name=server_name,
            token_file=token_file,
            insecure_token=bool(insecure),
            timeout_s=timeout_s,
        )
    except ConfigError as error:
        if by_flag or said is None or of_file is None:
            raise
        said.document.mistake(of_file.line, str(error))
        return Connection()


def _check_tls(server_name: str | None, token_file: Path | None, tls: Tls | None, by_flag: bool) -> None:
    if server_name is not None and tls is None:
        raise ConfigError(
            "--server-name is a name in a TLS certificate: give --tls or --tls-ca with it"
            if by_flag
            else "defaults: server_name is a name in a TLS certificate: give tls with it"
        )
    if token_file is not None and tls is None:
        raise ConfigError(
            "the token would cross the network in plaintext: give --tls or --tls-ca,"
            " or --insecure-token if you accept that"
            if by_flag
            else "defaults: the token would cross the network in plaintext: give tls,"
            " or insecure_token: true if you accept that"
        )


def _flag_tls(flags: Flags) -> Tls | None:
    ca, cert, key = (flags.values[f"tls_{what}"] for what in ("ca", "cert", "key"))
    if (cert is None) != (key is None):
        raise ConfigError("--tls-cert and --tls-key belong together: give both or neither")
    return Tls(ca_file=ca, cert_file=cert, key_file=key) if flags.values["tls"] or ca or cert else None


# -- workers ---------------------------------------------------------------------------------


def _flag_workers(flags: Flags, settings: ExporterConfig) -> list[WorkerConfig]:
    pool = flags.values["pool"]
    workers = [
        parse_worker(
            text,
            settings=shared_settings(settings.connection),
            pool=pool,
            canary=settings.canary(pool),
            rules=settings.rules(pool),
            kv_events=settings.kv_events(pool),
        )
        for text in flags.values["targets"]
    ]
    for worker in workers:
        if worker.connection is not None and worker.canary is not Canary.OFF and worker.http is None:
            raise ConfigError(f"{worker.key}: {_NO_PAGE}: NAME=HOST:PORT,http://HOST:PORT")
    # Two of one name are found here, before one of them could hide one of the file's.
    ExporterConfig(workers=tuple(workers))
    return workers


def _file_workers(said: Said, settings: ExporterConfig) -> list[WorkerConfig]:
    workers: dict[str, WorkerConfig] = {}
    for target in said.targets:
        try:
            worker = target.value.attempt(lambda target=target: _file_worker(target, settings))  # type: ignore[misc]
        except Wrong as wrong:
            said.document.mistake(target.value.line, str(wrong))
            continue
        if worker.key in workers:
            said.document.mistake(target.value.line, f"{target.value.name}: two targets are called {worker.key!r}")
        workers[worker.key] = worker
    return list(workers.values())


def _file_worker(target: FileTarget, settings: ExporterConfig) -> WorkerConfig:
    pool = target.pool or DEFAULT_POOL
    if target.text:
        worker = parse_worker(
            target.text,
            settings=shared_settings(settings.connection),
            pool=pool,
            canary=settings.canary(pool),
            rules=settings.rules(pool),
            kv_events=settings.kv_events(pool),
        )
        worker = replace(worker, source="config")
    else:
        worker = _written_out(target, pool, settings)
        if target.kv_events and worker.connection is None:
            raise ConfigError("a worker's KV-cache events are found over gRPC: give grpc, or leave out kv_events")
        if target.kv_events is not None:
            worker = replace(worker, kv_events=target.kv_events)
    if worker.connection is not None and worker.canary is not Canary.OFF and worker.http is None:
        raise ConfigError(f"{_NO_PAGE} as http, or say canary: off")
    return worker


def _written_out(target: FileTarget, pool: str, settings: ExporterConfig) -> WorkerConfig:
    found = DiscoveredTarget(
        key=target.name or Connection.parse(target.grpc).address.name,
        target=target.grpc or None,
        problem="" if target.grpc else "reached over HTTP only",
        http_url=target.http or None,
        pool=pool,
        overrides=target.overrides,
    )
    if target.grpc:
        worker = worker_of(found, settings, source="config", strict=True)
    else:
        own = target.overrides
        shared = shared_settings(settings.connection)
        shared["tls"] = own.tls or shared["tls"]
        shared["server_name"] = own.server_name or shared["server_name"]
        http = http_connection(target.http, shared)
        worker = WorkerConfig(
            key=found.key, pool=pool, connection=None, http=http, rules=settings.rules(pool), source="config"
        )
    return worker
