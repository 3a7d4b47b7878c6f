"""Fixtures of the audit's tests."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.audit.servers import Http, Scripted
from tests.certs import Certs, make_certs
from vllm_cp import _audit_net as net
from vllm_cp._audit_net import Endpoint
from vllm_cp.cli import main


class Ended(NamedTuple):
    """How a command line ended, and what it wrote."""

    code: int
    out: str
    err: str


Cli = Callable[..., Ended]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cli:
    """Runs a command line in this process, without settings of the machine."""
    for name in list(os.environ):
        if name.startswith("VLLM_CP_") or name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))

    def run(*args: str) -> Ended:
        capsys.readouterr()
        code = main(args)
        out, err = capsys.readouterr()
        return Ended(int(code), out, err)

    return run


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The other addresses of this host, as the audit sees them; on Linux all of 127/8 is there to bind."""
    addresses = ["127.0.0.2"]
    monkeypatch.setattr(net, "own_addresses", lambda _: tuple(addresses))
    return addresses


@pytest.fixture(scope="session")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Certs:
    """Certificates for localhost and 127.0.0.1, good until tomorrow."""
    return make_certs(tmp_path_factory.mktemp("certs"))


@pytest.fixture
def http() -> Iterator[Callable[..., Http]]:
    """Starts HTTP servers with given statuses by path; ended afterwards."""
    with ExitStack() as running:
        yield lambda *args, **settings: running.enter_context(Http(*args, **settings))


@pytest.fixture
def scripted() -> Iterator[Callable[..., Endpoint]]:
    """Starts servers that say given bytes to everybody and hang up, or go on waiting."""
    with ExitStack() as running:
        yield lambda *args, **settings: running.enter_context(Scripted(*args, **settings)).endpoint


@pytest.fixture
def refusing() -> Iterator[Endpoint]:
    """A port that refuses: bound, so that nobody else gets it, and never listening."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield Endpoint("127.0.0.1", held.getsockname()[1])


@pytest.fixture
def silent() -> Iterator[Endpoint]:
    """A port that accepts and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield Endpoint("127.0.0.1", listener.getsockname()[1])
