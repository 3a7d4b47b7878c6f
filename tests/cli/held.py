"""Output that is written down, in ``golden/``."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["FORMATS", "GOLDEN", "held"]

GOLDEN = Path(__file__).parent / "golden"
FORMATS = ("table", "wide", "json", "jsonl", "yaml", "name")


def held(name: str, text: str) -> None:
    """The text is that of the golden file; ``UPDATE_GOLDEN=1`` writes the file anew."""
    path = GOLDEN / name
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text, "utf-8")
    assert text == path.read_text("utf-8"), f"UPDATE_GOLDEN=1 writes {path.name} anew"
