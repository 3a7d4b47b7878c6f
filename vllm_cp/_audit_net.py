"""Names, addresses and ports as an audit needs them: every wait has an end, and nothing is sent."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import selectors
import socket
import threading
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

__all__ = ["Deadline", "Endpoint", "accepting", "is_loopback", "own_addresses", "resolve", "words"]

# Addresses that are for documentation only: asking which of ours would be used sends nothing.
_ELSEWHERE = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))


class Deadline:
    """A point in time that all waits of one question share."""

    def __init__(self, timeout_s: float) -> None:
        self._at = time.monotonic() + timeout_s

    def left(self) -> float:
        """Seconds left. Raises TimeoutError when there are none."""
        left = self._at - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        return left


def words(error: OSError) -> str:
    """What went wrong, without the line numbers that some of the system's texts begin with."""
    return "timed out" if isinstance(error, TimeoutError) else error.strerror or str(error) or type(error).__name__


class Endpoint(NamedTuple):
    """One address and port."""

    ip: str
    port: int

    def __str__(self) -> str:
        return f"[{self.ip}]:{self.port}" if ":" in self.ip else f"{self.ip}:{self.port}"

    def connect(self, deadline: Deadline) -> socket.socket:
        """A connection. Raises OSError."""
        return socket.create_connection((self.ip, self.port), timeout=deadline.left())


def resolve(host: str, port: int, timeout_s: float) -> tuple[Endpoint, ...]:
    """The addresses of a host, each once. Raises OSError, TimeoutError too."""
    found: list[Any] = []

    def look() -> None:
        try:
            found.append(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError) as error:
            found.append(error)

    # The system's resolver knows no deadline: it is left behind when it takes too long.
    thread = threading.Thread(target=look, daemon=True, name="vllm-cp-audit-resolve")
    thread.start()
    thread.join(timeout_s)
    if not found:
        raise TimeoutError(f"the name {host} was not resolved in time")
    if isinstance(found[0], Exception):
        raise OSError(f"the name {host} cannot be resolved: {getattr(found[0], 'strerror', None) or found[0]}")
    return tuple(dict.fromkeys(Endpoint(str(address[0]), port) for *_, address in found[0]))


def accepting(endpoints: Iterable[Endpoint], timeout_s: float) -> tuple[Endpoint, ...]:
    """Those that accept a TCP connection, in the order given; all are tried at once and nothing is sent."""
    wanted = tuple(dict.fromkeys(endpoints))
    accepted: set[Endpoint] = set()
    waiting = set()
    deadline = time.monotonic() + timeout_s
    with contextlib.ExitStack() as sockets, selectors.DefaultSelector() as selector:
        for endpoint in wanted:
            family = socket.AF_INET6 if ":" in endpoint.ip else socket.AF_INET
            try:
                trying = sockets.enter_context(socket.socket(family, socket.SOCK_STREAM))
            except OSError as error:
                if error.errno == errno.EAFNOSUPPORT:
                    continue
                raise  # no more sockets: that says nothing about the port
            trying.setblocking(False)
            # What is refused at once, for want of a route, leaves no error behind on the socket.
            if trying.connect_ex(endpoint) in (0, errno.EINPROGRESS):
                selector.register(trying, selectors.EVENT_WRITE, endpoint)
                waiting.add(endpoint)
        while waiting and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                selector.unregister(key.fileobj)
                waiting.discard(key.data)
                tried = key.fileobj
                assert isinstance(tried, socket.socket)
                if tried.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
                    accepted.add(key.data)
    return tuple(endpoint for endpoint in wanted if endpoint in accepted)


def is_loopback(ip: str) -> bool:
    """Whether an address can be reached from its own host only."""
    try:
        address = ipaddress.ip_address(ip)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    # Who connects to "any address" comes to his own host.
    return address.is_loopback or address.is_unspecified or (mapped is not None and mapped.is_loopback)


def own_addresses(timeout_s: float) -> tuple[str, ...]:
    """Addresses of this host that others may reach, as far as its name and its routes tell."""
    found = []
    for family, elsewhere in _ELSEWHERE:
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as asking:
            asking.connect((elsewhere, 9))
            found.append(str(asking.getsockname()[0]))
    with contextlib.suppress(OSError):
        found += [endpoint.ip for endpoint in resolve(socket.gethostname(), 0, timeout_s)]
    # A link-local address means nothing without its interface.
    return tuple(dict.fromkeys(ip for ip in found if "%" not in ip and not _is_special(ip)))


def _is_special(ip: str) -> bool:
    address = ipaddress.ip_address(ip)
    return address.is_loopback or address.is_link_local or address.is_unspecified
