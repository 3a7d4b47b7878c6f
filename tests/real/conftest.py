"""Fixtures for tests against the genuine ``vllm-rs``; every test of this directory is marked ``real``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

# Tests name these modules from the top of the repository, whether or not it is installed.
if str(Path(__file__).parents[2]) not in sys.path:
    sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.real.fetch import is_fetched
from tests.real.ports import Ports
from tests.real.sim.facts import NEWEST
from tests.real.sim.model import make_model
from tests.real.stack import Stack, StackFactory

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is under this directory (the hook sees all tests of the run)."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.real)


def require_binary(version: str) -> None:
    """Skip when the binary is not there; fail instead where a skip would go unseen."""
    if is_fetched(version):
        return
    word = f"no vllm-rs {version} here; fetch it with: python -m tests.real.fetch {version}"
    if os.environ.get("CI", "").lower() in ("1", "true") or os.environ.get("VLLM_CP_REQUIRE_REAL") == "1":
        pytest.fail(word, pytrace=False)
    pytest.skip(word)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Model directories by kind (plain, moe, multimodal), each made once."""
    made: dict[str, Path] = {}

    def model(kind: str) -> Path:
        if kind not in made:
            directory = tmp_path_factory.mktemp("model") / kind
            made[kind] = make_model(directory, moe=kind == "moe", multimodal=kind == "multimodal")
        return made[kind]

    return model


@pytest.fixture
def stack(models: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[StackFactory]:
    """Starts stacks and stops them afterwards; a failed test shows what their frontends said."""
    with ExitStack() as running:

        def start(version: str = NEWEST, *, model: str = "plain", wait: bool = True, **options: Any) -> Stack:
            require_binary(version)
            made = Stack(version, model=models(model), directory=tmp_path_factory.mktemp("stack"), **options)
            running.callback(lambda: sys.stdout.write(f"-- frontend {version} --\n{made.log[-4000:]}\n"))
            running.callback(made.stop)
            return made.start(wait=wait)

        yield start


@pytest.fixture
def ports() -> Iterator[Ports]:
    """Loopback ports that no other worker of this run uses, held until the test ends."""
    with Ports() as held:
        yield held
