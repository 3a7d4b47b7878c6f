"""Fixtures of the fleet's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.colours import COLOURS
from tests.fleet.both import BothFleet
from vllm_cp.testing import FakeWorker

MakeFleet = Callable[..., BothFleet]
Start = Callable[..., FakeWorker]


@pytest.fixture(params=COLOURS)
def colour(request: pytest.FixtureRequest) -> str:
    """sync, then async."""
    return str(request.param)


@pytest.fixture
def fleet_of(colour: str) -> MakeFleet:
    """``fleet_of([target, ...])``: a fleet of the test's colour, for ``async with``."""

    def make(targets: Any, **options: Any) -> BothFleet:
        return BothFleet(colour, targets, **options)

    return make


@pytest.fixture
def start() -> Iterator[Start]:
    """``start(version="0.28.0")``: a fake worker, closed at the end."""
    with ExitStack() as open_workers:
        yield lambda **options: open_workers.enter_context(FakeWorker(**options))
