"""Names, addresses and ports."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from vllm_cp import _audit_net as net
from vllm_cp._audit_net import Deadline, Endpoint, accepting, is_loopback, resolve

# Kept from before the fixture that replaces it.
own_addresses = net.own_addresses


def test_who_accepts(silent: Endpoint, refusing: Endpoint) -> None:
    """Of several ports those that listen, each once, in the order given."""
    assert accepting([refusing, silent, silent, refusing], 2) == (silent,)
    assert accepting([], 2) == ()


def test_nobody_answers_in_time() -> None:
    """Ports behind a firewall that drops are waited for together, no longer than the time given."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=0)
    full = []
    with listener:
        endpoint = Endpoint("127.0.0.1", listener.getsockname()[1])
        try:
            # A full backlog is as silent as a dropped packet.
            for _ in range(8):
                full.append(waiting := socket.socket())
                waiting.setblocking(False)
                waiting.connect_ex(endpoint)
            while accepting([endpoint], 0.05):
                full.append(waiting := socket.socket())
                waiting.setblocking(False)
                waiting.connect_ex(endpoint)
            began = time.monotonic()
            assert accepting([endpoint] * 3, 0.2) == ()
            assert time.monotonic() - began < 2
        finally:
            for waiting in full:
                waiting.close()


def test_no_route_is_not_acceptance() -> None:
    """An address without a route refuses at once, which must not look like an open port."""
    assert accepting([Endpoint("255.255.255.255", 9), Endpoint("0.0.0.0", 1)], 1) == ()


def test_too_many_sockets_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    """When this process has no more sockets, that is said, and not that the port is closed; a missing family is."""

    def failing(number: int) -> Callable[..., Any]:
        def make(*_: Any) -> Any:
            raise OSError(number, "no")

        return make

    monkeypatch.setattr(socket, "socket", failing(24))
    with pytest.raises(OSError, match="no"):
        accepting([Endpoint("127.0.0.1", 9)], 1)
    monkeypatch.setattr(socket, "socket", failing(97))
    assert accepting([Endpoint("::1", 9)], 1) == ()


def test_resolve() -> None:
    """Literals stay themselves, names give each address once."""
    assert resolve("127.0.0.1", 5, 2) == (Endpoint("127.0.0.1", 5),)
    assert resolve("::1", 5, 2) == (Endpoint("::1", 5),)
    assert str(resolve("::1", 5, 2)[0]) == "[::1]:5"
    assert Endpoint("127.0.0.1", 5) in resolve("localhost", 5, 2)


def test_a_resolver_that_never_answers_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's resolver knows no deadline; we do."""
    ended = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: ended.wait(5) and [])
    try:
        with pytest.raises(TimeoutError, match="the name far was not resolved in time"):
            resolve("far", 1, 0.05)
    finally:
        ended.set()


def test_a_name_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an OSError with the resolver's words; so is a name that can't be one."""

    def unknown(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(OSError, match="the name nope cannot be resolved: Name or service not known"):
        resolve("nope", 1, 2)
    monkeypatch.undo()
    with pytest.raises(OSError, match="cannot be resolved"):
        resolve("a" * 64 + ".example", 1, 2)


@pytest.mark.parametrize(
    ("ip", "loopback"),
    [
        *((ip, True) for ip in ("127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1", "0.0.0.0")),
        *((ip, False) for ip in ("10.0.0.1", "fd00::2", "worker")),
    ],
)
def test_loopback(ip: str, loopback: bool) -> None:
    """Addresses that only their own host can reach."""
    assert is_loopback(ip) is loopback


def test_own_addresses_are_those_others_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither loopback nor link-local; a host whose name does not resolve still has those of its routes."""
    for ip in own_addresses(2):
        assert not is_loopback(ip)
    monkeypatch.setattr(
        net, "resolve", lambda *_: tuple(Endpoint(ip, 0) for ip in ("10.0.0.5", "127.0.1.1", "fe80::1", "fe80::1%eth0"))
    )
    assert [ip for ip in own_addresses(2) if ip.startswith(("10.0.0.5", "fe80", "127."))] == ["10.0.0.5"]


def test_deadline() -> None:
    """All waits share one, and a passed one is an error rather than no limit."""
    deadline = Deadline(0.0)
    with pytest.raises(TimeoutError):
        deadline.left()
    assert 4 < Deadline(5).left() <= 5
