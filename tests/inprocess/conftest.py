"""Fixtures for tests of the clients against fake workers."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.certs import Certs, make_certs
from tests.colours import COLOURS, Both, both
from vllm_cp import Connection
from vllm_cp.testing import FakeWorker

Connect = Callable[..., Awaitable[Both]]


@pytest.fixture
def worker() -> Iterator[FakeWorker]:
    """A worker of the newest version with one rank."""
    with FakeWorker() as started:
        yield started


@pytest.fixture(params=COLOURS)
def colour(request: pytest.FixtureRequest) -> str:
    """sync, then async."""
    return str(request.param)


@pytest_asyncio.fixture
async def connect(colour: str) -> AsyncIterator[Connect]:
    """``await connect(worker.target)`` gives a client of the test's colour, closed afterwards."""
    async with AsyncExitStack() as open_clients:

        async def connect(target: str | Connection, **options: Any) -> Both:
            return await open_clients.enter_async_context(both(colour, target, **options))

        yield connect


@pytest_asyncio.fixture
async def client(connect: Connect, worker: FakeWorker) -> Both:
    """A client of the worker."""
    return await connect(worker.target)


@pytest.fixture(scope="session")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Certs:
    """PEM files, made once."""
    return make_certs(tmp_path_factory.mktemp("certs"))


def named_threads(prefix: str) -> list[threading.Thread]:
    """The living threads whose names begin so."""
    return [thread for thread in threading.enumerate() if thread.name.startswith(prefix)]


def token_file(path: Path, token: str) -> Path:
    """Write a token the way an operator's secret mount does: replaced at once, never half there."""
    new = path.with_suffix(".new")
    new.write_text(token)
    new.replace(path)
    return path
