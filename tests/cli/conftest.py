"""Fixtures of the command-line tests."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.certs import Certs, make_certs
from tests.cli.process import Ended
from vllm_cp import Connection
from vllm_cp.cli import _daemon, _fanout, _watching, ft, main, probe
from vllm_cp.testing import FakeKvPublisher, FakeWorker

Cli = Callable[..., Ended]


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch, context_file: Path) -> None:
    """No setting of the machine reaches the runs in this process."""
    for name in list(os.environ):
        if name.startswith("VLLM_CP_") or name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("VLLM_CP_CONTEXT_FILE", str(context_file))


@pytest.fixture
def context_file(tmp_path: Path) -> Path:
    """Where the runs in this process keep contexts; there is none yet."""
    return tmp_path / "contexts.json"


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Runs a command line in this process: ``cli("health", "--target", worker.target)``."""

    def run(*args: str) -> Ended:
        capsys.readouterr()
        code = main(args)
        assert code in range(256)
        out, err = capsys.readouterr()
        return Ended(int(code), out, err)

    return run


@pytest.fixture
def worker() -> Iterator[FakeWorker]:
    """A healthy worker of the newest version."""
    with FakeWorker() as running:
        yield running


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Connection]:
    """The connections that a command line stands for; nobody is asked."""
    seen: list[Connection] = []

    def nobody(connections: list[Connection], *_: object, **__: object) -> list[Any]:
        seen[:] = connections
        return []

    def probed(connection: Connection, *_: object) -> probe._Said:
        seen[:] = [connection]
        return probe._Said("serving")

    def named(servers: dict[str, Any], *_: object, **__: object) -> list[Any]:
        seen[:] = [Connection(target="h") for _ in servers]
        return []

    monkeypatch.setattr(_fanout, "ask_all", nobody)

    def daemon(*_: object) -> list[Any]:
        seen[:] = [Connection(target="daemon")]
        return []

    def looked(connections: list[Connection], *_: object) -> list[Any]:
        seen[:] = connections
        return []

    def lived(connections: list[Connection], *_: object) -> int:
        seen[:] = connections
        return 0

    monkeypatch.setattr("vllm_cp.cli._top_live.look", looked)
    monkeypatch.setattr("vllm_cp.cli._top_live.run", lived)
    monkeypatch.setattr(_fanout, "ask_each", named)
    monkeypatch.setattr(_daemon, "ask", daemon)
    monkeypatch.setattr(ft, "_recovered", named)
    monkeypatch.setattr(_watching, "watch_all", nobody)
    monkeypatch.setattr(probe, "_probe", probed)
    return seen


@pytest.fixture
def nobody() -> Iterator[str]:
    """A target that refuses connections: bound, so that nobody else gets it, and never listening."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"


@pytest.fixture
def silent() -> Iterator[str]:
    """A target that accepts connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture(scope="session")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Certs:
    """Certificates for localhost and 127.0.0.1."""
    return make_certs(tmp_path_factory.mktemp("certs"))


@pytest.fixture
def kv() -> Iterator[FakeKvPublisher]:
    """A publisher."""
    with FakeKvPublisher() as publisher:
        yield publisher


@pytest.fixture
def publishing(kv: FakeKvPublisher) -> Iterator[FakeWorker]:
    """The worker of that publisher."""
    with FakeWorker(kv_sources=[kv.source]) as worker:
        yield worker
