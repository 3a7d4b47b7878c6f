"""The table of failures in the README of the tests points at tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_every_test_that_is_named_exists() -> None:
    """Whatever the table names is a file here, with that test in it; and every file of this directory is named."""
    named = re.findall(r"`(\w+/test_\w+\.py)(?:::(test_\w+))?`", (TESTS / "README.md").read_text())
    assert len(named) > 40
    missing = [
        f"{path}::{test}"
        for path, test in named
        if not (TESTS / path).exists() or (test and f"def {test}(" not in (TESTS / path).read_text())
    ]
    assert missing == []
    here = {f"field/{path.name}" for path in Path(__file__).parent.glob("test_*.py")} - {"field/test_table.py"}
    assert here - {path for path, _ in named} == set()
