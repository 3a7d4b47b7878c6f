"""The daemon's settings, frozen. Built from flags by ``app``; every mistake is a ConfigError with its own message."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any

from vllm_cp import ConfigError, Connection
from vllm_cp.episodes import Rules
from vllm_cp.faults import HttpConnection

__all__ = ["Canary", "ExporterConfig", "Listen", "WorkerConfig", "parse_listen", "parse_worker"]

_HTTP_URL = re.compile(r"https?://[^\s,]+")


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
    rules: Rules = field(default_factory=Rules)
    namespace: str = ""
    pod: str = ""
    node: str = ""


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

    workers: tuple[WorkerConfig, ...] = ()
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

    def __post_init__(self) -> None:
        for name in ("probe_interval_s", "info_interval_s", "engine_recovery_timeout_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be a positive number of seconds, not {getattr(self, name)}")
        seen: set[str] = set()
        for worker in self.workers:
            if worker.key in seen:
                raise ConfigError(f"two workers are called {worker.key!r}; give one another name: --target NAME=…")
            seen.add(worker.key)


def parse_worker(text: str, *, settings: Mapping[str, Any], pool: str, canary: Canary, rules: Rules) -> WorkerConfig:
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
        return WorkerConfig(key=name, pool=pool, connection=None, http=_http(address, settings), rules=rules)
    if comma and not _HTTP_URL.fullmatch(url):
        raise ConfigError(f"target {text!r}: {url!r} is no HTTP URL; write NAME=HOST:PORT,http://HOST:PORT")
    return WorkerConfig(
        key=name or address,
        pool=pool,
        connection=Connection.parse(address, **settings),
        http=_http(url, settings) if url else None,
        canary=canary,
        rules=rules,
    )


def _http(url: str, settings: Mapping[str, Any]) -> HttpConnection:
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
