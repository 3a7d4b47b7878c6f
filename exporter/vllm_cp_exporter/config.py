"""The daemon's settings, frozen. Built from flags by ``app``; every mistake is a ConfigError with its own message."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from vllm_cp import ConfigError, Connection
from vllm_cp.episodes import Rules

__all__ = ["ExporterConfig", "Listen", "WorkerConfig", "parse_listen", "parse_worker"]

_HTTP_URL = re.compile(r"https?://[^\s,]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """One worker to watch."""

    #: The ``worker`` label.
    key: str
    pool: str = "default"
    #: ``None`` for a worker that is reached over HTTP only.
    connection: Connection | None
    #: Base URL of its HTTP server, without a slash at the end.
    http_url: str | None = None
    canary: bool = False
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
    state_file: Path | None = None

    def __post_init__(self) -> None:
        for name in ("probe_interval_s", "info_interval_s"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} must be a positive number of seconds, not {getattr(self, name)}")
        seen: set[str] = set()
        for worker in self.workers:
            if worker.key in seen:
                raise ConfigError(f"two workers are called {worker.key!r}; give one another name: --target NAME=…")
            seen.add(worker.key)


def parse_worker(text: str, *, settings: Mapping[str, object], pool: str, canary: bool, rules: Rules) -> WorkerConfig:
    """A worker from ``[NAME=]HOST:PORT[,HTTP_URL]`` or ``[NAME=]HTTP_URL``; ``settings`` are Connection fields."""
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
        return WorkerConfig(
            key=name, pool=pool, connection=None, http_url=address.rstrip("/"), canary=False, rules=rules
        )
    if comma and not _HTTP_URL.fullmatch(url):
        raise ConfigError(f"target {text!r}: {url!r} is no HTTP URL; write NAME=HOST:PORT,http://HOST:PORT")
    connection = Connection.parse(address, **settings)
    return WorkerConfig(
        key=name or address,
        pool=pool,
        connection=connection,
        http_url=url.rstrip("/") or None,
        canary=canary,
        rules=rules,
    )


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
