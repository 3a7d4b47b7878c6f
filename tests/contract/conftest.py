"""Fixtures of the contract: every test runs on the fake and the genuine binary, at each version, in both colours."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any, TypeVar

import pytest
import pytest_asyncio

from tests.certs import Certs, make_certs
from tests.colours import COLOURS, Both, both
from tests.contract.rigs import Rig, Wish, fake_rig, real_rig
from tests.real.fetch import VERSIONS, is_fetched
from tests.real.sim.model import make_model
from tests.real.waiting import eventually
from vllm_cp import Connection

T = TypeVar("T")
Connect = Callable[..., Awaitable[Both]]
Build = Callable[..., Rig]
Running = Callable[..., Awaitable[asyncio.Future[Any]]]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every test that builds a rig does so as fake and as genuine, at each version it is for."""
    if "build" not in metafunc.fixturenames:
        return
    oldest = getattr(metafunc.function, "oldest", (0, 0))
    kinds = [pytest.param("fake"), pytest.param("real", marks=pytest.mark.real)]
    metafunc.parametrize("kind", kinds)
    metafunc.parametrize("version", [v for v in VERSIONS if numbers(v) >= oldest])


def needs(major: int, minor: int) -> Callable[[T], T]:
    """For tests of what came with a version: earlier ones are left out."""

    def mark(test: T) -> T:
        test.oldest = (major, minor)  # type: ignore[attr-defined]
        return test

    return mark


def numbers(version: str) -> tuple[int, int]:
    """``0.28.0`` -> (0, 28)."""
    major, minor, _ = version.split(".")
    return int(major), int(minor)


@pytest.fixture
def since(version: str) -> tuple[int, int]:
    """The version under test, to compare with."""
    return numbers(version)


@pytest.fixture(params=COLOURS)
def colour(request: pytest.FixtureRequest) -> str:
    """sync, then async."""
    return str(request.param)


@pytest.fixture(scope="session")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Certs:
    """PEM files, made once."""
    return make_certs(tmp_path_factory.mktemp("certs"))


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without weights, made once."""
    return make_model(tmp_path_factory.mktemp("model") / "plain")


@pytest.fixture
def build(
    kind: str, version: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Build]:
    """``build(ranks=2, configured=True)`` starts the worker that the test wishes for."""
    with ExitStack() as open_rigs:

        def build(**wish: Any) -> Rig:
            wanted = Wish(version=version, **wish)
            if kind == "fake":
                return open_rigs.enter_context(fake_rig(wanted))
            _require(version)
            model = request.getfixturevalue("model_directory")
            return open_rigs.enter_context(real_rig(wanted, model, tmp_path_factory.mktemp("stack")))

        yield build


def _require(version: str) -> None:
    if is_fetched(version):
        return
    word = f"no vllm-rs {version} here; fetch it with: python -m tests.real.fetch {version}"
    if os.environ.get("CI", "").lower() in ("1", "true") or os.environ.get("VLLM_CP_REQUIRE_REAL") == "1":
        pytest.fail(word, pytrace=False)
    pytest.skip(word)


@pytest_asyncio.fixture
async def connect(colour: str) -> AsyncIterator[Connect]:
    """``await connect(rig)`` gives a client of the test's colour, closed afterwards."""
    async with AsyncExitStack() as open_clients:

        async def connect(where: Rig | Connection, **options: Any) -> Both:
            target = where if isinstance(where, Connection) else where.target
            return await open_clients.enter_async_context(both(colour, target, **options))

        yield connect


@pytest_asyncio.fixture
async def start_generation() -> AsyncIterator[Running]:
    """Starts a long generation and returns once the engine works on it."""
    started: list[asyncio.Future[Any]] = []

    async def start(rig: Rig, client: Both, request_id: str = "mine", **options: Any) -> asyncio.Future[Any]:
        options = {"max_tokens": 2500, "timeout_s": 30, **options}
        started.append(asyncio.ensure_future(client.generate("hello", request_id=request_id, **options)))
        count = sum(not future.done() for future in started)
        await asyncio.to_thread(eventually, lambda: rig.running(count), 5.0, "the engine to generate")
        return started[-1]

    yield start
    for future in started:
        if not future.done():
            await give_up(future)


async def give_up(future: asyncio.Future[Any]) -> None:
    """Give up a call whose worker is going away."""
    future.cancel()
    await asyncio.gather(future, return_exceptions=True)
