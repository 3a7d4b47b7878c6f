"""The web config file: who may read the daemon's pages, in the format of Prometheus' exporter-toolkit.

Strict: an unknown key, a key of the toolkit's that is not offered here, and a value that makes no sense are each one
clear message. Paths are relative to the file.
"""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from vllm_cp import ConfigError
from vllm_cp.files import read_file

__all__ = ["ServerTls", "WebFile", "read_web_file"]

#: bcrypt, its cost, and 53 characters of salt and hash.
_HASH = re.compile(r"\$2[aby]\$(\d\d)\$[./A-Za-z0-9]{53}")
#: Above this one wrong password costs a second of a core.
_HIGHEST_COST = 14
#: The headers that the toolkit lets one set.
_HEADERS = (
    "Content-Security-Policy",
    "Strict-Transport-Security",
    "X-Content-Type-Options",
    "X-Frame-Options",
    "X-XSS-Protection",
)
_AUTH_TYPES = {
    "NoClientCert": ssl.CERT_NONE,
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}
_UNVERIFIED = ("RequestClientCert", "RequireAnyClientCert")
_VERSIONS = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}
#: What the toolkit has beside what is offered here.
_ELSEWHERE = {
    "tls_server_config": {
        "cert", "key", "client_ca", "max_version", "cipher_suites", "prefer_server_cipher_suites",
        "curve_preferences", "client_allowed_sans",
    },
    "http_server_config": set[str](),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTls:
    """``tls_server_config``."""

    cert_file: Path
    key_file: Path
    client_ca_file: Path | None = None
    client_auth: ssl.VerifyMode = ssl.CERT_NONE
    min_version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_2

    @property
    def files(self) -> tuple[Path, ...]:
        """All that is read."""
        return tuple(path for path in (self.cert_file, self.key_file, self.client_ca_file) if path is not None)

    def context(self) -> ssl.SSLContext:
        """A context for a server. Raises ConfigError."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = self.min_version
        try:
            context.load_cert_chain(self.cert_file, self.key_file, password=_no_password)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"tls_server_config: {self.cert_file} and {self.key_file} are no usable pair: {_why(error)}"
            ) from None
        if self.client_ca_file is not None:
            try:
                context.load_verify_locations(self.client_ca_file)
            except (OSError, ssl.SSLError) as error:
                raise ConfigError(f"tls_server_config: client_ca_file {self.client_ca_file}: {_why(error)}") from None
        context.verify_mode = self.client_auth
        context.set_alpn_protocols(["http/1.1"])
        return context


@dataclass(frozen=True, slots=True, kw_only=True)
class WebFile:
    """What the file says. An empty one guards nothing."""

    tls: ServerTls | None = None
    #: bcrypt hashes by user name.
    users: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}), repr=False)
    #: Headers of every answer.
    headers: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


def read_web_file(path: Path) -> WebFile:
    """Read and check the file; nothing of a password hash is in a message. Raises ConfigError."""
    import yaml

    try:
        text = read_file(path).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read web config file {os.fspath(path)!r}: {_why(error)}") from None
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark is not None else ""
        raise ConfigError(f"web config file {os.fspath(path)!r}{where}: no YAML") from None
    try:
        return _file(document or {}, path.parent)
    except ConfigError as error:
        raise ConfigError(f"web config file {os.fspath(path)!r}: {error}") from None


def _file(document: Any, beside: Path) -> WebFile:
    top = _section("the file", document, ("tls_server_config", "http_server_config", "basic_auth_users"))
    tls = top.get("tls_server_config")
    return WebFile(
        tls=_tls(tls, beside) if tls is not None else None,
        users=MappingProxyType(_users(top.get("basic_auth_users") or {})),
        headers=MappingProxyType(_http(top.get("http_server_config") or {})),
    )


def _tls(value: Any, beside: Path) -> ServerTls:
    name = "tls_server_config"
    said = _section(name, value, ("cert_file", "key_file", "client_auth_type", "client_ca_file", "min_version"))
    for needed in ("cert_file", "key_file"):
        if not said.get(needed):
            raise ConfigError(f"{name} needs {needed}")
    kind = said.get("client_auth_type") or "NoClientCert"
    if kind in _UNVERIFIED:
        raise ConfigError(
            f"{name}: client_auth_type {kind} takes certificates that nobody verified, which is not offered;"
            " write RequireAndVerifyClientCert with client_ca_file"
        )
    mode = _choice(f"{name}: client_auth_type", kind, _AUTH_TYPES)
    ca = said.get("client_ca_file")
    if mode is not ssl.CERT_NONE and not ca:
        raise ConfigError(f"{name}: client_auth_type {kind} needs client_ca_file")
    if mode is ssl.CERT_NONE and ca:
        raise ConfigError(f"{name}: client_ca_file is of no use with client_auth_type {kind}")
    tls = ServerTls(
        cert_file=_path(f"{name}: cert_file", said["cert_file"], beside),
        key_file=_path(f"{name}: key_file", said["key_file"], beside),
        client_ca_file=_path(f"{name}: client_ca_file", ca, beside) if ca else None,
        client_auth=mode,
        min_version=_choice(f"{name}: min_version", said.get("min_version") or "TLS12", _VERSIONS),
    )
    tls.context()
    return tls


def _users(value: Any) -> dict[str, str]:
    users = _section("basic_auth_users", value, None)
    for user, hashed in users.items():
        if not user or ":" in user:
            raise ConfigError(f"basic_auth_users: {user!r} is no user name: it is empty or holds a colon")
        found = _HASH.fullmatch(hashed) if isinstance(hashed, str) else None
        if found is None:
            raise ConfigError(
                f"basic_auth_users: the password of {user!r} is no bcrypt hash; htpasswd -nBC 10 makes one"
            )
        if not 4 <= int(found[1]) <= _HIGHEST_COST:
            raise ConfigError(
                f"basic_auth_users: the hash of {user!r} has cost {found[1]}; 4 to {_HIGHEST_COST} are taken"
            )
    if users:
        try:
            import bcrypt  # noqa: F401
        except ImportError:
            raise ConfigError(
                'basic_auth_users needs a library that is not here: pip install "vllm-cp[exporter]"'
            ) from None
    return users


def _http(value: Any) -> dict[str, str]:
    said = _section("http_server_config", value, ("http2", "headers"))
    # The daemon speaks HTTP/1.1, which is what http2: false asks for, and what http2: true allows.
    if not isinstance(said.get("http2", True), bool):
        raise ConfigError("http_server_config: http2 is true or false")
    headers = _section("http_server_config: headers", said.get("headers") or {}, _HEADERS)
    for name, text in headers.items():
        if not isinstance(text, str) or not text.isprintable():
            raise ConfigError(f"http_server_config: headers: {name} is one line of text")
    return headers


def _section(name: str, value: Any, known: Iterable[str] | None) -> dict[str, Any]:
    """A mapping with known keys."""
    if not isinstance(value, dict):
        raise ConfigError(f"{name} holds keys and values")
    for key in value:
        if not isinstance(key, str):
            raise ConfigError(f"{name}: the key {key!r} is no text")
        if known is not None and key not in known:
            if key in _ELSEWHERE.get(name, ()):
                raise ConfigError(f"{name}: {key} is the exporter-toolkit's, and not offered here")
            raise ConfigError(f"{name}: unknown key {key!r}; known are {', '.join(known)}")
    return value


def _choice(name: str, value: Any, choices: Mapping[str, Any]) -> Any:
    if not isinstance(value, str) or value not in choices:
        raise ConfigError(f"{name} is {value!r}; write {' or '.join(choices)}")
    return choices[value]


def _path(name: str, value: Any, beside: Path) -> Path:
    if not isinstance(value, str):
        raise ConfigError(f"{name} is a path")
    return beside / value


def _why(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return error.reason or "no PEM"
    return getattr(error, "strerror", None) or "no UTF-8 text"


def _no_password() -> NoReturn:
    # Else OpenSSL would ask the terminal for one and wait.
    raise ConfigError("tls_server_config: the key is encrypted: give one without a passphrase")
