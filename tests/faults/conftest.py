"""Fixtures of the tests of fault tolerance and the other HTTP routes."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.certs import Certs, make_certs
from tests.faults.colours import COLOURS, Both
from vllm_cp.faults import HttpConnection
from vllm_cp.testing._http import FakeHttp

Connect = Callable[..., Both]
DATA = Path(__file__).parent / "data"


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No proxy or certificate setting of the machine reaches the clients."""
    for name in list(os.environ):
        if name.lower().endswith("_proxy") or name in ("SSL_CERT_FILE", "SSL_CERT_DIR", "SSLKEYLOGFILE"):
            monkeypatch.delenv(name)


@pytest.fixture(params=COLOURS)
def colour(request: pytest.FixtureRequest) -> str:
    """sync, then async."""
    return str(request.param)


@pytest.fixture
def server() -> Iterator[FakeHttp]:
    """A Python server with fault tolerance and one engine."""
    with FakeHttp() as started:
        yield started


@pytest_asyncio.fixture
async def connect(colour: str) -> AsyncIterator[Connect]:
    """``connect(url)`` gives a client of the test's colour, closed afterwards."""
    async with AsyncExitStack() as open_clients:

        def connect(url: str | HttpConnection, **options: Any) -> Both:
            client = Both(colour, url, **options)
            open_clients.push_async_callback(client.close)
            return client

        yield connect


@pytest.fixture(scope="session")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Certs:
    """Certificates for localhost and 127.0.0.1."""
    return make_certs(tmp_path_factory.mktemp("http-certs"))


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    """A file with the token "s3cret"."""
    path = tmp_path / "token"
    path.write_text("s3cret\n")
    return path
