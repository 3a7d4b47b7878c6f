"""Where the daemon can listen, and how it says that it cannot."""

from __future__ import annotations

import errno
import socket
from typing import Any

import pytest

from vllm_cp import ConfigError
from vllm_cp_exporter.config import Listen, parse_listen
from vllm_cp_exporter.listen import CannotListen, bind


def _reached(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=2).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize(
    ("text", "ipv4", "ipv6"),
    [
        ("[::1]:0", False, True),
        ("[::]:0", True, True),
        (":0", True, True),
        ("0.0.0.0:0", True, False),
        ("127.0.0.1:0", True, False),
        ("localhost:0", True, True),
    ],
)
def test_b10_addresses(text: str, ipv4: bool, ipv6: bool) -> None:
    """Bracketed IPv6 works; all addresses, written as [::] or as nothing, serve IPv4 as well."""
    sockets = bind(parse_listen(text))
    try:
        port = sockets[0].getsockname()[1]
        assert {each.getsockname()[1] for each in sockets} == {port}
        assert _reached("127.0.0.1", port) is ipv4
        assert _reached("::1", port) is ipv6 or text.startswith("localhost")
    finally:
        for each in sockets:
            each.close()


def test_b10_unbracketed() -> None:
    """IPv6 without brackets is refused with the right form."""
    with pytest.raises(ConfigError, match=r"write \[::\]:9400"):
        parse_listen(":::9400")


@pytest.mark.parametrize("host", ["127.0.0.1", "::", "::1"])
def test_b35_busy(host: str) -> None:
    """A busy port is one line with address and port."""
    (taken,) = bind(Listen(host, 0))
    listen = Listen(host, taken.getsockname()[1])
    try:
        with pytest.raises(CannotListen) as refused:
            bind(listen)
    finally:
        taken.close()
    assert str(refused.value) == f"cannot listen on {listen}: Address already in use"


def test_b35_second_start_on_the_same_port() -> None:
    """A port that was just given up can be taken again at once."""
    (first,) = bind(Listen("127.0.0.1", 0))
    port = first.getsockname()[1]
    client = socket.create_connection(("127.0.0.1", port))
    accepted, _ = first.accept()
    accepted.close()  # the side that closes first is the one that leaves the port in TIME_WAIT
    client.close()
    first.close()
    (second,) = bind(Listen("127.0.0.1", port))
    second.close()


def test_b35_privileged(monkeypatch: pytest.MonkeyPatch) -> None:
    """A port that is not allowed is one line with address and port."""

    def refuse(*_: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", refuse)
    with pytest.raises(CannotListen, match=r"^cannot listen on 0\.0\.0\.0:80: Permission denied$"):
        bind(Listen("0.0.0.0", 80))


def test_no_such_host() -> None:
    """A name that nobody knows is one line, too."""
    with pytest.raises(CannotListen, match=r"cannot listen on no-such-host\.invalid:9400: "):
        bind(Listen("no-such-host.invalid", 9400))


def test_an_address_that_is_not_ours() -> None:
    """An address of another machine can't be listened on."""
    with pytest.raises(CannotListen, match=r"cannot listen on 192\.0\.2\.1:9400: "):
        bind(Listen("192.0.2.1", 9400))


def test_all_addresses_without_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine without IPv6, all addresses are all IPv4 addresses."""
    real = socket.socket

    def without_ipv6(family: int = socket.AF_INET, *arguments: Any) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        return real(family, *arguments)

    monkeypatch.setattr(socket, "socket", without_ipv6)
    (only,) = bind(Listen("::", 0))
    assert only.family == socket.AF_INET
    only.close()
