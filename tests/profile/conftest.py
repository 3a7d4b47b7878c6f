"""Fixtures of the lock's tests."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.profile.facts import MODEL, SERVER, SOURCES
from vllm_cp.cli import main
from vllm_cp.testing import FakeWorker


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


@pytest.fixture
def worker() -> Iterator[FakeWorker]:
    """A worker that says much about itself, with two KV publishers."""
    with FakeWorker(version="0.33.0", ranks=2, info=SERVER, model=MODEL, kv_sources=SOURCES) as running:
        yield running
