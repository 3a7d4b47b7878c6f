"""The public surface, as the type checkers of users see it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
USER_CODE = Path(__file__).with_name("user_code.py")


def run(*command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}
    return subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def test_mypy_agrees() -> None:
    """What users write passes mypy --strict, with the types that are documented; what is wrong is found."""
    pytest.importorskip("mypy", reason="the type checkers are in the dev extra")
    done = run("mypy", "--strict", "--config-file", "pyproject.toml", str(USER_CODE))
    assert done.returncode == 0, done.stdout + done.stderr


def test_pyright_agrees() -> None:
    """The same with pyright."""
    pytest.importorskip("pyright", reason="the type checkers are in the dev extra")
    done = run("pyright", str(USER_CODE))
    assert done.returncode == 0, done.stdout + done.stderr
