"""The listening sockets, bound before anything else starts: a busy port is found out at once."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Iterable

from vllm_cp_exporter.config import Listen

__all__ = ["CannotListen", "bind"]

_BACKLOG = 128
#: This machine has no such address, or no IPv6 at all.
_NOT_HERE = {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT}


class CannotListen(Exception):
    """The address cannot be listened on. Its text is one line with address and port."""

    def __init__(self, listen: Listen, why: str) -> None:
        super().__init__(f"cannot listen on {listen}: {why}")


def bind(listen: Listen) -> list[socket.socket]:
    """Sockets that listen on every address of the host. Raises CannotListen; then none is left open.

    ``::`` serves IPv4 as well, on one socket, and is all IPv4 addresses on a machine without IPv6.
    """
    with contextlib.ExitStack() as undo:
        bound: list[socket.socket] = []
        problem: OSError | None = None
        try:
            for family, address in _addresses(listen):
                try:
                    port = bound[0].getsockname()[1] if bound else listen.port
                    bound.append(undo.enter_context(_listening(family, address, port)))
                except OSError as error:
                    problem = error
                    if error.errno not in _NOT_HERE:
                        raise
                else:
                    if listen.host == "::":
                        break
        except OSError as error:
            raise CannotListen(listen, error.strerror or str(error)) from None
        if not bound:
            raise CannotListen(listen, problem.strerror if problem and problem.strerror else "no such address")
        undo.pop_all()
        return bound


def _addresses(listen: Listen) -> Iterable[tuple[int, str]]:
    if listen.host == "::":
        return [(socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")]  # noqa: S104  (asked for: all addresses)
    found = socket.getaddrinfo(listen.host, listen.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return dict.fromkeys((family, str(address[0])) for family, _, _, _, address in found)


def _listening(family: int, address: str, port: int) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        # A port whose last owner just stopped is free; one that somebody listens on is not.
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0 if address == "::" else 1)
        made.bind((address, port))
        made.listen(_BACKLOG)
    except BaseException:
        made.close()
        raise
    made.setblocking(False)
    return made
