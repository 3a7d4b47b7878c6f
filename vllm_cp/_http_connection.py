"""How a worker's HTTP side is reached: base URL, TLS, token. Everything is checked when it is built."""

from __future__ import annotations

import base64
import os
import ssl
import threading
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import SplitResult, urlsplit

from vllm_cp.config import Retry, Tls, read_token
from vllm_cp.errors import ConfigError

__all__ = ["DEFAULT_URL", "HttpConnection", "Token", "tls_context"]

DEFAULT_URL = "http://localhost:8000"
_FORM = "http://host:8000 or https://host:8000"


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpConnection:
    """Everything that says how one worker's HTTP server is reached. Built once, checked at once, shared freely."""

    #: Base URL: ``http://host:port`` or ``https://host:port``, with a path where a proxy puts the worker under one.
    url: str = DEFAULT_URL
    #: Files for ``https``; without them the system's CA certificates are trusted.
    tls: Tls | None = None
    #: File with a bearer token; read again whenever it changes. Sent over ``https`` only.
    token_file: Path | None = None
    #: File with ``user:password`` on one line, in place of a token; read again whenever it changes.
    basic_auth_file: Path | None = None
    #: Send the token or password over ``http`` all the same. Anybody on the way can read it.
    insecure_token: bool = False
    #: Default deadline of a call, seconds.
    timeout_s: float = 5.0
    retry: Retry = field(default_factory=Retry)
    #: Honour ``http_proxy`` and its kin. Off: workers are reached directly.
    proxy: bool = False
    #: Name to send and to expect in the worker's certificate, where it differs from the host dialled.
    server_name: str | None = None
    #: Longest answer that is read, bytes. A page of metrics takes about 40 KB per engine.
    max_answer_bytes: int = 16 * 1024 * 1024

    def __post_init__(self) -> None:
        secure = _split(self.url).scheme == "https"
        if not 0 < self.timeout_s < float("inf"):
            raise ConfigError(f"timeout_s must be a positive number of seconds, not {self.timeout_s}")
        if self.max_answer_bytes < 1:
            raise ConfigError(f"max_answer_bytes must be 1 or more, not {self.max_answer_bytes}")
        if not secure and self.tls is not None:
            raise ConfigError(f"{self.base} is plaintext and TLS files are given: write https://, or drop them")
        if not secure and self.server_name is not None:
            raise ConfigError("server_name is the name in a TLS certificate: write https://, or drop it")
        if self.token_file is not None and self.basic_auth_file is not None:
            raise ConfigError("token_file and basic_auth_file exclude each other: give one of the two")
        if self.basic_auth_file is not None:
            if not secure and not self.insecure_token:
                raise ConfigError(
                    f"a password for {self.base} would cross the network in plaintext: write https://,"
                    " or say insecure_token=True if you accept that"
                )
            _read_password(self.basic_auth_file)
        if self.token_file is not None:
            if not secure and not self.insecure_token:
                raise ConfigError(
                    f"a token for {self.base} would cross the network in plaintext: write https://,"
                    " or say insecure_token=True if you accept that"
                )
            read_token(self.token_file)

    @classmethod
    def parse(cls, url: str, /, **settings: Any) -> HttpConnection:
        """A connection to ``url``; further fields by keyword. Raises ConfigError."""
        return cls(url=url, **settings)

    @property
    def base(self) -> str:
        """The one canonical spelling, without a slash at the end; also what errors and labels show."""
        parts = _split(self.url)
        return f"{parts.scheme}://{parts.netloc.lower()}{parts.path.rstrip('/')}"

    @property
    def secure(self) -> bool:
        """Whether this is ``https``."""
        return _split(self.url).scheme == "https"

    @property
    def host(self) -> str:
        """The host dialled, without brackets."""
        return _split(self.url).hostname or ""

    @property
    def port(self) -> int:
        """The port dialled."""
        parts = _split(self.url)
        return parts.port or (443 if parts.scheme == "https" else 80)


def _split(url: str) -> SplitResult:
    if not url:
        raise ConfigError(f"the URL is empty; write {_FORM}")
    if any(c.isspace() or not c.isprintable() for c in url):
        raise ConfigError(f"URL {url!r} holds spaces or unprintable characters; write {_FORM}")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"URL {url!r} is malformed ({error}); write {_FORM}") from None
    if "@" in parts.netloc:
        # Not shown: what stands before the @ may be a password.
        raise ConfigError(f"the URL holds a user name or password; write {_FORM}, and give the token as a file")
    if parts.scheme not in ("http", "https"):
        hint = f"http://{url}" if "://" not in url else _FORM
        raise ConfigError(f"URL {url!r} is no HTTP base URL; write {hint}")
    if not parts.hostname or port == 0:
        raise ConfigError(f"URL {url!r} has no usable host and port; write {_FORM}")
    if parts.query or parts.fragment:
        raise ConfigError(f"URL {url!r} holds a query or a fragment; write {_FORM}")
    if parts.path.rstrip("/").endswith("/v1"):
        without = url.rstrip("/").removesuffix("/v1")
        raise ConfigError(f"URL {url!r} is the base of the OpenAI API; write {without}")
    return parts


def _read_password(path: Path) -> str:
    """``user:password`` of a file as an ``Authorization`` value. Raises ConfigError, without any of it."""
    try:
        text = path.read_text("utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is no UTF-8 text"
        raise ConfigError(f"cannot read password file {os.fspath(path)!r}: {why}") from None
    if not text.isprintable() or not text.partition(":")[0] or ":" not in text:
        raise ConfigError(f"password file {os.fspath(path)!r} must hold user:password on one line")
    return f"Basic {base64.b64encode(text.encode()).decode()}"


def _read_bearer(path: Path) -> str:
    return f"Bearer {read_token(path)}"


class Token:
    """The token or password of a file, read again when the file changes. Thread-safe."""

    def __init__(self, path: Path, *, basic: bool = False) -> None:
        self._path = path
        self._read = _read_password if basic else _read_bearer
        self._lock = threading.Lock()
        self._seen: tuple[int, int] | None = None
        self._value = ""

    def header(self) -> str:
        """The ``Authorization`` value. Raises ConfigError, without the token in it."""
        with self._lock:
            now = _identity(self._path)
            if now != self._seen:
                self._value = self._read(self._path)
                self._seen = now
            return self._value


def tls_context(connection: HttpConnection) -> ssl.SSLContext:
    """The TLS context of a connection. Raises ConfigError when its files are unusable.

    Loading CA certificates takes ten milliseconds and more, so clients of a fleet share one context per set of files.
    """
    if not connection.secure:
        return _no_context()
    tls = connection.tls or Tls()
    files = tuple(path for path in (tls.ca_file, tls.cert_file, tls.key_file) if path is not None)
    return _context(tls, tuple(_identity(path) for path in files))


@lru_cache(maxsize=1)
def _no_context() -> ssl.SSLContext:
    # The HTTP library wants one even for plaintext, and would load the CA certificates for it. This one trusts nobody.
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


@lru_cache(maxsize=16)
def _context(tls: Tls, _files: tuple[tuple[int, int], ...]) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=os.fspath(tls.ca_file) if tls.ca_file else None)
        if tls.cert_file and tls.key_file:
            context.load_cert_chain(tls.cert_file, tls.key_file, password=_no_password)
    except (OSError, ssl.SSLError) as error:
        reason = getattr(error, "reason", None) or error.strerror or str(error)
        raise ConfigError(
            f"a TLS file is unusable ({reason}): check the CA, and that certificate and key belong together"
        ) from None
    return context


def _no_password() -> NoReturn:
    # Else OpenSSL would ask the terminal for one and wait.
    raise ConfigError("the TLS key is encrypted: give one without a passphrase")


def _identity(path: Path) -> tuple[int, int]:
    try:
        stat = os.stat(path)
    except OSError as error:
        raise ConfigError(f"cannot read file {os.fspath(path)!r}: {error.strerror}") from None
    return stat.st_mtime_ns, stat.st_ino
