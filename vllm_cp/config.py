"""How to reach a worker: addresses, TLS, tokens, retries. Everything is checked when it is built."""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm_cp._target import DEFAULT_PORT, Target, parse_target
from vllm_cp.errors import ConfigError
from vllm_cp.files import MEBIBYTE, read_file

__all__ = ["DEFAULT_TARGET", "Connection", "Retry", "Tls"]

#: A day: the longest time that makes sense to wait for one answer.
LONGEST_S = 86400.0
# Where the distributions keep them: Debian, Fedora, SUSE, Alpine and macOS.
_SYSTEM_ROOTS = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
    "/etc/ssl/cert.pem",
)
DEFAULT_TARGET = f"localhost:{DEFAULT_PORT}"
_CERTIFIED = re.compile(r"[!-~]{1,253}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """TLS to the worker, from PEM files.

    Without ``ca_file`` the system's CAs are trusted (those that gRPC ships, where the system has none); with
    ``cert_file`` and ``key_file`` the client shows a certificate (mTLS). Verification cannot be switched off.
    """

    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None

    def __post_init__(self) -> None:
        if (self.cert_file is None) != (self.key_file is None):
            raise ConfigError("a client certificate and its key belong together: give both files or neither")
        for what, path in (("CA", self.ca_file), ("certificate", self.cert_file), ("key", self.key_file)):
            if path is not None:
                _pem(what, path)

    def read(self) -> tuple[bytes | None, bytes | None, bytes | None]:
        """CA, key and certificate as PEM bytes, ``None`` where no file is set. Raises ConfigError."""
        return (
            _pem("CA", ca) if (ca := self.ca_file or _system_roots()) else None,
            _pem("key", self.key_file) if self.key_file else None,
            _pem("certificate", self.cert_file) if self.cert_file else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """When a safe read is asked again. Only UNAVAILABLE is retried, never a mutation, always inside the deadline."""

    #: Attempts in all; 1 is no retry.
    attempts: int = 3
    #: First pause, seconds; doubled each time; one half of each is fixed, the other is jitter. Three attempts span 0.4
    #: to 0.75 seconds: gRPC, which waits 0.2 s after a refused dial, has dialled again before the last one.
    initial_s: float = 0.25
    #: Longest pause, seconds.
    max_s: float = 1.0

    def __post_init__(self) -> None:
        if self.attempts < 1:
            raise ConfigError(f"retry attempts must be 1 or more, not {self.attempts}")
        _positive("retry initial_s", self.initial_s)
        _positive("retry max_s", self.max_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """Everything that says how one worker is reached. Built once, checked at once, shared freely."""

    #: ``host:port``, ``[ipv6]:port``, ``dns:///host:port``, ``unix:/path``; a bare host means port 8001.
    target: str = DEFAULT_TARGET
    #: ``None`` is plaintext.
    tls: Tls | None = None
    #: File with a bearer token; read again whenever it changes. Sent over TLS only.
    token_file: Path | None = None
    #: Send the token over plaintext all the same. Anybody on the way can read it.
    insecure_token: bool = False
    #: Default deadline of a unary call, seconds.
    timeout_s: float = 5.0
    retry: Retry = field(default_factory=Retry)
    #: Honour ``http_proxy`` and its kin. Off: workers are reached directly.
    proxy: bool = False
    #: Name to expect in the worker's certificate, where it differs from the host dialled.
    server_name: str | None = None
    #: Seconds between HTTP/2 keepalive pings; ``None`` sends none. Servers may cut clients that ping often.
    keepalive_s: float | None = None

    def __post_init__(self) -> None:
        parse_target(self.target)
        _positive("timeout_s", self.timeout_s)
        if self.keepalive_s is not None:
            _positive("keepalive_s", self.keepalive_s)
        if self.server_name is not None and self.tls is None:
            raise ConfigError("server_name is the name in a TLS certificate: give tls too, or drop it")
        if self.server_name is not None and not _CERTIFIED.fullmatch(self.server_name):
            raise ConfigError(
                f"server_name {self.server_name!r} is no name that a certificate holds: ASCII without spaces,"
                " an international name in its xn-- form"
            )
        if self.token_file is not None:
            if self.tls is None and not self.insecure_token:
                raise ConfigError(
                    f"a token for {self.target} would cross the network in plaintext: give tls,"
                    " or say insecure_token=True if you accept that"
                )
            read_token(self.token_file)

    @classmethod
    def parse(cls, target: str, /, **settings: Any) -> Connection:
        """A connection to ``target``, any form; further fields by keyword. Raises ConfigError."""
        return cls(target=target, **settings)

    @property
    def address(self) -> Target:
        """The parsed target."""
        return parse_target(self.target)


def read_token(path: Path) -> str:
    """The bearer token in a file, without the line end. Raises ConfigError; the message never holds the token."""
    try:
        token = read_file(path).decode("ascii").strip()
    except OSError as error:
        raise ConfigError(f"cannot read token file {os.fspath(path)!r}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"token file {os.fspath(path)!r} holds more than ASCII text") from None
    if not token or not token.isprintable() or " " in token:
        raise ConfigError(f"token file {os.fspath(path)!r} must hold one token on one line")
    return token


def _system_roots() -> Path | None:
    """The system's CAs as one file, ``None`` where there is none. ``SSL_CERT_FILE`` goes first, as everywhere."""
    if chosen := os.environ.get("SSL_CERT_FILE"):
        return Path(chosen)
    return next((path for path in map(Path, _SYSTEM_ROOTS) if path.is_file()), None)


def _pem(what: str, path: Path) -> bytes:
    try:
        data = read_file(path, limit=16 * MEBIBYTE)
    except OSError as error:
        raise ConfigError(f"cannot read TLS {what} file {os.fspath(path)!r}: {error.strerror}") from None
    if b"-----BEGIN " not in data:
        raise ConfigError(f"TLS {what} file {os.fspath(path)!r} is not PEM: no BEGIN line in it")
    return data


def _positive(what: str, value: float) -> None:
    # gRPC counts in nanoseconds: far above a day a deadline overflows and is over at once.
    if not (value > 0 and math.isfinite(value) and value <= LONGEST_S):
        raise ConfigError(f"{what} must be a number of seconds above 0 and up to {LONGEST_S:.0f}, not {value}")
