"""Fixtures of the tests of what went wrong in the field."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from tests.certs import Certs, make_certs
from tests.colours import COLOURS
from vllm_cp.testing import FakeWorker


@pytest.fixture
def fake() -> Iterator[FakeWorker]:
    """A healthy worker of the newest version."""
    with FakeWorker() as running:
        yield running


@pytest.fixture(params=COLOURS)
def colour(request: pytest.FixtureRequest) -> str:
    """sync, then async."""
    return str(request.param)


@pytest.fixture
def nobody() -> Iterator[str]:
    """A target that refuses connections: bound, so that nobody else gets it, and never listening."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"


@pytest.fixture
def mute() -> Iterator[str]:
    """A target that accepts connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture(scope="session")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Certs:
    """PEM files, made once."""
    return make_certs(tmp_path_factory.mktemp("certs"))
