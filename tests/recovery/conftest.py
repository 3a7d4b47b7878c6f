"""Fixtures of the stories: the worker they are told on, and the pace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.real.sim.model import make_model
from tests.recovery.pace import FAST, Pace
from tests.recovery.rigs import Rig, fake, real


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without weights, made once."""
    return make_model(tmp_path_factory.mktemp("model") / "plain")


@pytest.fixture
def pace() -> Pace:
    """Fast, unless a test is told at both paces."""
    return FAST


@pytest.fixture
def build(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Rig]]:
    """``build(ranks=2)`` starts the worker that the test wishes for."""
    kind, _, version = str(request.param).partition("-")
    with ExitStack() as running:

        def build(**wish: Any) -> Rig:
            if kind == "fake":
                return running.enter_context(fake(version, **wish))
            model = request.getfixturevalue("model_directory")
            return running.enter_context(real(version, model, tmp_path_factory.mktemp("stack"), **wish))

        yield build
