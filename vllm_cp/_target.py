"""Targets: what people write, and what gRPC is given."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from vllm_cp.errors import ConfigError

__all__ = ["DEFAULT_PORT", "Target", "parse_target"]

DEFAULT_PORT = 8001
_FORMS = "host:port, [ipv6]:port, dns:///host:port or unix:/path"
_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?")


@dataclass(frozen=True, slots=True)
class Target:
    """A parsed target."""

    #: The one canonical spelling, ``[::1]:8001`` or ``unix:/run/vllm.sock``; also what errors and labels show.
    name: str
    #: What gRPC resolves.
    grpc: str
    #: Host or address without brackets; ``None`` for a unix socket.
    host: str | None
    #: TCP port; ``None`` for a unix socket.
    port: int | None

    def __str__(self) -> str:
        return self.name


def parse_target(text: str) -> Target:
    """Parse any form people write; a bare host means port 8001. Raises ConfigError that shows the right form."""
    if not text:
        raise ConfigError(f"the target is empty; write {_FORMS}")
    if any(c.isspace() or not c.isprintable() for c in text):
        raise ConfigError(f"target {text!r} holds spaces or unprintable characters; write {_FORMS}")
    scheme, separator, rest = text.partition("://")
    if separator and scheme not in ("dns", "unix"):
        raise ConfigError(f"target {text!r} is a URL; write {_url_hint(rest)} without {scheme}://")
    if text.startswith(("unix:", "unix-abstract:")):
        kind, _, path = text.partition(":")
        path = path.removeprefix("//") if path.startswith("///") else path
        if not path or path.startswith("//"):
            raise ConfigError(f"target {text!r} has no usable path; write unix:/absolute/path")
        return Target(name=f"{kind}:{path}", grpc=f"{kind}:{path}", host=None, port=None)
    if text.startswith("dns:"):
        return _dns(text)
    host, port = _host_port(text, text)
    literal = f"[{host}]" if ":" in host else host
    # dns:/// keeps gRPC from reading a host name as a URI scheme; literals need it as little as names.
    return Target(name=f"{literal}:{port}", grpc=f"dns:///{literal}:{port}", host=host, port=port)


def _dns(text: str) -> Target:
    rest = text.removeprefix("dns:")
    authority = ""
    if rest.startswith("//"):
        authority, slash, rest = rest[2:].partition("/")
        if not slash or not rest:
            raise ConfigError(f"target {text!r} lacks a host after the authority; write dns:///host:port")
    host, port = _host_port(rest, text)
    literal = f"[{host}]" if ":" in host else host
    name = f"dns://{authority}/{literal}:{port}"
    return Target(name=name, grpc=name, host=host, port=port)


def _host_port(text: str, whole: str) -> tuple[str, int]:
    if text.startswith("["):
        inside, bracket, after = text[1:].partition("]")
        if not bracket or not _is_ipv6(inside):
            raise ConfigError(f"target {whole!r} has no IPv6 address in its brackets; write [::1]:{DEFAULT_PORT}")
        if after and not after.startswith(":"):
            raise ConfigError(f"target {whole!r} goes on after the bracket; write [{inside}]:{DEFAULT_PORT}")
        return _canonical_ipv6(inside), _port(after[1:], whole) if after else DEFAULT_PORT
    if text.count(":") > 1:
        head, _, tail = text.rpartition(":")
        examples = [f"[{head}]:{tail}"] if _is_ipv6(head) and tail.isdigit() else []
        if _is_ipv6(text):
            examples = [*(examples or [f"[{text}]:{DEFAULT_PORT}"]), f"[{text}]"]
        if examples:
            raise ConfigError(f"target {whole!r} is IPv6 without brackets; write {' or '.join(examples)}")
        raise ConfigError(f"target {whole!r} has too many colons; write {_FORMS}")
    host, colon, port = text.partition(":")
    if not _HOST.fullmatch(host):
        raise ConfigError(f"target {whole!r} has no usable host name; write {_FORMS}")
    return host, _port(port, whole) if colon else DEFAULT_PORT


def _port(text: str, whole: str) -> int:
    if not text:
        raise ConfigError(f"target {whole!r} ends without a port; write {whole}{DEFAULT_PORT}, or leave the colon out")
    if not (text.isascii() and text.isdigit()) or not 1 <= int(text) <= 65535:
        raise ConfigError(f"target {whole!r} has port {text!r}; a port is a number from 1 to 65535")
    return int(text)


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def _canonical_ipv6(text: str) -> str:
    return str(ipaddress.IPv6Address(text))


def _url_hint(rest: str) -> str:
    host = re.split(r"[/?#]", rest, maxsplit=1)[0].rpartition("@")[2]
    if not host:
        return _FORMS
    return host if re.search(r":\d+$", host) else f"{host}:{DEFAULT_PORT}"
