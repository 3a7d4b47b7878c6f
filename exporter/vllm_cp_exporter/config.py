"""The daemon's settings, frozen. Built from flags and file; every mistake is a ConfigError with its own message."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any

from vllm_cp import ConfigError, Connection, Tls
from vllm_cp.episodes import Rules
from vllm_cp.faults import HttpConnection
from vllm_cp.models.ladder import Expect, Rung
from vllm_cp_exporter.logs import LogFormat
from vllm_cp_exporter.sources import WINDOW_S, Source

__all__ = [
    "Canary",
    "ExporterConfig",
    "Listen",
    "PoolSettings",
    "ProbeModule",
    "WorkerConfig",
    "http_connection",
    "parse_listen",
    "parse_worker",
]

_HTTP_URL = re.compile(r"https?://[^\s,]+")


#: Shorter pauses would only keep workers and this daemon busy with each other.
SHORTEST_S = 0.05


class Canary(str, Enum):
    """How often an idle worker is asked for one token, as proof that it generates. It needs the worker's HTTP URL."""

    OFF = "off"
    #: Once per instance.
    ONCE = "once"
    #: At each look while the worker is idle: the only standing proof on vLLM 0.27, which has no round trip.
    ALWAYS = "always"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """One worker to watch."""

    #: The ``worker`` label.
    key: str
    pool: str = "default"
    #: ``None`` for a worker that is reached over HTTP only.
    connection: Connection | None
    #: Its HTTP server, where known: its /metrics corroborate, and fault tolerance lives there.
    http: HttpConnection | None = None
    canary: Canary = Canary.OFF
    #: Follow its KV-cache events.
    kv_events: bool = False
    rules: Rules = field(default_factory=Rules)
    namespace: str = ""
    pod: str = ""
    node: str = ""
    #: Where it was found: ``flags``, ``config``, or the name of a source.
    source: str = "flags"
    #: The source says that it is going away.
    deleted: bool = False
    #: Why it cannot be asked at all: it is shown all the same.
    problem: str = ""

    def reached_as(self, other: WorkerConfig) -> bool:
        """Whether the connections to one serve for the other."""
        ours, theirs = (self.connection, self.http), (other.connection, other.http)
        return ours == theirs and self.problem == other.problem

    @property
    def addresses(self) -> tuple[str, str]:
        """Where it is asked over gRPC and HTTP; "" where it is not."""
        return self.connection.address.name if self.connection else "", self.http.base if self.http else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    """How the workers of a pool are judged."""

    ready_rung: Rung = Rules().ready_rung
    expect: Expect = Rules().expect
    answer_within_s: float = Rules().answer_within_s
    canary: Canary = Canary.OFF
    kv_events: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeModule:
    """How ``/probe?module=…`` asks."""

    tls: Tls | None = None
    token_file: Path | None = None
    #: Send the token over plaintext too.
    insecure_token: bool = False
    #: Name to expect in the worker's certificate, where it is not the one dialled.
    server_name: str | None = None
    #: The rung that makes the probe a success.
    rung: Rung = Rung.ADMITTING
    #: Seconds for the whole probe, where the scraper allows as much.
    timeout_s: float = 10.0

    def __post_init__(self) -> None:
        # The same checks as for every other connection; the target is not known yet.
        Connection(
            tls=self.tls,
            token_file=self.token_file,
            insecure_token=self.insecure_token,
            server_name=self.server_name,
            timeout_s=self.timeout_s,
        )


@dataclass(frozen=True, slots=True)
class Listen:
    """Where the daemon serves HTTP."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExporterConfig:
    """Everything the daemon is told."""

    #: Those that are written down, in flags and file.
    workers: tuple[WorkerConfig, ...] = ()
    #: Those that are discovered come from here.
    sources: tuple[Source, ...] = ()
    #: How the discovered ones are reached, unless they say otherwise; its target means nothing.
    connection: Connection = field(default_factory=Connection)
    pools: Mapping[str, PoolSettings] = field(default_factory=lambda: MappingProxyType({}))
    #: Of every pool that is not named.
    pool_defaults: PoolSettings = PoolSettings()
    listen: Listen = Listen("127.0.0.1", 9645)
    #: Workers wanted ready, by pool.
    min_ready: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    #: Seconds between two questions to one worker.
    probe_interval_s: float = 5.0
    #: Seconds between two readings of a worker's facts while nothing changes.
    info_interval_s: float = 60.0
    #: How long an unhealthy engine waits for an instruction before it gives up, as vLLM is configured.
    engine_recovery_timeout_s: float = 120.0
    state_file: Path | None = None
    #: How ``/probe`` may be told to ask, by name.
    modules: Mapping[str, ProbeModule] = field(default_factory=lambda: MappingProxyType({}))
    #: Which further targets ``/probe`` may ask: patterns of names, CIDRs of addresses. Discovered ones it always may.
    probe_allow: tuple[str, ...] = ()
    #: Who may read the daemon's pages: TLS, passwords, headers.
    web_config_file: Path | None = None
    #: Whether ``POST /-/reload`` does anything.
    enable_reload: bool = False
    log_format: LogFormat = "logfmt"
    log_level: str = "info"

    def __post_init__(self) -> None:
        for name in ("probe_interval_s", "info_interval_s", "engine_recovery_timeout_s"):
            if not getattr(self, name) >= SHORTEST_S:
                raise ConfigError(f"{name} must be {SHORTEST_S} seconds or more, not {getattr(self, name)}")
        seen: set[str] = set()
        for worker in self.workers:
            if worker.key in seen:
                raise ConfigError(f"two workers are called {worker.key!r}; give one another name: --target NAME=…")
            seen.add(worker.key)

    def rules(self, pool: str, *, window_s: float = WINDOW_S) -> Rules:
        """How a worker of that pool is judged."""
        chosen = self.pools.get(pool, self.pool_defaults)
        return Rules(
            answer_within_s=chosen.answer_within_s,
            window_s=window_s,
            interval_s=self.probe_interval_s,
            ready_rung=chosen.ready_rung,
            expect=chosen.expect,
        )

    def canary(self, pool: str, wanted: bool | None = None) -> Canary:
        """Whether canaries are sent to a worker of that pool which itself says so, says no, or says nothing."""
        mode = self.pools.get(pool, self.pool_defaults).canary
        if wanted is None:
            return mode
        if not wanted:
            return Canary.OFF
        return Canary.ONCE if mode is Canary.OFF else mode

    def kv_events(self, pool: str) -> bool:
        """Whether the KV-cache events of that pool's workers are followed."""
        return self.pools.get(pool, self.pool_defaults).kv_events


def parse_worker(
    text: str, *, settings: Mapping[str, Any], pool: str, canary: Canary, rules: Rules, kv_events: bool = False
) -> WorkerConfig:
    """A worker from ``[NAME=]HOST:PORT[,HTTP_URL]`` or ``NAME=HTTP_URL``.

    ``settings`` are fields of Connection. Its TLS files serve the HTTP side too, where the URL is ``https``; the token
    is for the control port alone.
    """
    # A name has no slash, so the = of a URL's query is never taken for one.
    name, equals, rest = text.partition("=")
    if not equals or "/" in name:
        name, rest = "", text
    if equals and not name and not rest.startswith("http"):
        raise ConfigError(f"target {text!r} has an empty name; write NAME=HOST:PORT")
    address, comma, url = rest.partition(",")
    if _HTTP_URL.fullmatch(address):
        if comma or not name:
            raise ConfigError(f"target {text!r}: write NAME=HTTP_URL without gRPC, NAME=HOST:PORT,HTTP_URL with both")
        return WorkerConfig(key=name, pool=pool, connection=None, http=http_connection(address, settings), rules=rules)
    if comma and not _HTTP_URL.fullmatch(url):
        raise ConfigError(f"target {text!r}: {url!r} is no HTTP URL; write NAME=HOST:PORT,http://HOST:PORT")
    return WorkerConfig(
        key=name or address,
        pool=pool,
        connection=Connection.parse(address, **settings),
        http=http_connection(url, settings) if url else None,
        canary=canary,
        kv_events=kv_events,
        rules=rules,
    )


def http_connection(url: str, settings: Mapping[str, Any]) -> HttpConnection:
    """How to reach the HTTP side of a worker whose Connection has these ``settings``. Raises ConfigError."""
    shared = {"timeout_s": settings["timeout_s"]} if "timeout_s" in settings else {}
    if url.startswith("https:"):
        shared |= {name: settings[name] for name in ("tls", "server_name") if settings.get(name) is not None}
    return HttpConnection.parse(url, **shared)


def parse_listen(text: str) -> Listen:
    """An address to listen on: ``HOST:PORT``, ``[IPV6]:PORT`` or ``:PORT`` for all addresses."""
    host, colon, port = text.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or not 0 <= int(port) <= 65535:
        raise ConfigError(f"listen address {text!r} has no port from 0 to 65535; write HOST:PORT, [::]:PORT or :PORT")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ConfigError(f"listen address {text!r} is IPv6 without brackets; write [{host}]:{port}")
    return Listen(host or "::", int(port))
