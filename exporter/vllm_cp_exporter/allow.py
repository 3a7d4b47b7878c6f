"""Which targets ``/probe`` may ask, and at which address: whoever can reach the daemon must not reach all it can."""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase

from vllm_cp import Connection

__all__ = ["Allowed", "NotAllowed", "Unresolved", "admit", "resolve"]

_Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Resolve = Callable[[str, int], Awaitable[list[str]]]


class NotAllowed(Exception):
    """The target is none that may be asked."""


class Unresolved(Exception):
    """The target may be asked, and its name has no address."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """A target that may be asked."""

    #: Canonical, as written: ``llama-0:8001``.
    name: str
    #: What a certificate is checked against; ``None`` for a socket file.
    host: str | None
    #: The addresses that were checked, as targets, the best first: ``10.0.0.7:8001``. Nothing else is dialled.
    addresses: tuple[str, ...]
    #: What allows it.
    by: str


# Their own: names that nobody answers for must not hold up what else waits for a thread.
_RESOLVERS = ThreadPoolExecutor(8, thread_name_prefix="probe-dns")


async def resolve(host: str, port: int) -> list[str]:
    """The addresses of a name, in the system's order of preference. Raises OSError."""
    if _address(host) is not None:
        return [host]
    look_up = functools.partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    found = await asyncio.get_running_loop().run_in_executor(_RESOLVERS, look_up)
    return list(dict.fromkeys(str(address[0]) for _, _, _, _, address in found))


async def admit(
    connection: Connection, allow: Iterable[str], *, discovered: bool, resolve: Resolve = resolve
) -> Allowed:
    """The target of a connection, resolved once, if it may be asked. Raises NotAllowed, Unresolved.

    ``allow`` holds patterns of names (``*.workers.internal``, ``llama-?:8001``) and networks (``10.0.0.0/8``). A
    pattern lets in whatever address the name has; a network lets in only the addresses that lie in it.
    """
    target = connection.address
    if target.host is None or target.port is None:
        if not discovered:
            raise NotAllowed(f"{target.name} is a socket file, and none of the discovered targets")
        return Allowed(name=target.name, host=None, addresses=(target.name,), by="discovered")
    patterns, networks = _split(allow)
    by = "discovered" if discovered else _matching(target.host, target.port, patterns)
    refusal = f"{target.name} is neither discovered nor allowed by the configuration (probe_allow)"
    if by is None and (not networks or target.name.startswith("dns://")):
        # Not even looked up: what does not resolve would tell itself from what is not allowed.
        raise NotAllowed(refusal)
    try:
        found = await resolve(target.host, target.port)
    except (OSError, UnicodeError) as error:
        if by is None:
            raise NotAllowed(
                f"{target.name} is neither discovered nor allowed by the configuration (probe_allow)"
            ) from None
        raise Unresolved(f"{target.host}: {getattr(error, 'strerror', None) or error}") from None
    if by is None:
        inside = [(text, network) for text in found if (network := _network_of(text, networks)) is not None]
        if not inside:
            raise NotAllowed(refusal)
        found, by = [text for text, _ in inside], f"network {inside[0][1]}"
    if not found:
        raise Unresolved(f"{target.host}: no address")
    addresses = tuple(f"[{text}]:{target.port}" if ":" in text else f"{text}:{target.port}" for text in found)
    return Allowed(name=target.name, host=target.host, addresses=addresses, by=by)


def _split(allow: Iterable[str]) -> tuple[list[str], list[_Network]]:
    patterns: list[str] = []
    networks: list[_Network] = []
    for text in allow:
        try:
            networks.append(ipaddress.ip_network(text, strict=False))
        except ValueError:
            patterns.append(text)
    return patterns, networks


def _matching(host: str, port: int, patterns: Iterable[str]) -> str | None:
    """The pattern that the name fits. One without a port is good for all ports of the host."""
    name = host.rstrip(".").lower()
    # A pattern of names says nothing of addresses: * is not meant for 169.254.169.254.
    if _address(host) is not None:
        return None
    for pattern in patterns:
        wanted, colon, port_wanted = pattern.lower().rpartition(":")
        if not colon:
            wanted, port_wanted = pattern.lower(), "*"
        if fnmatchcase(name, wanted) and fnmatchcase(str(port), port_wanted):
            return f"pattern {pattern}"
    return None


def _network_of(text: str, networks: Iterable[_Network]) -> _Network | None:
    address = _address(text)
    if address is None:
        return None
    return next((network for network in networks if address.version == network.version and address in network), None)


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    # ::ffff:10.0.0.1 reaches 10.0.0.1, so it is that address.
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address
