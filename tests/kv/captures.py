"""Frames recorded from a real vLLM; see data/README.md."""

from __future__ import annotations

import json
from pathlib import Path

DATA = Path(__file__).parent / "data"


def frames(name: str) -> list[list[bytes]]:
    """The messages of a recording."""
    lines = (DATA / f"{name}.jsonl").read_text().splitlines()
    return [[bytes.fromhex(frame) for frame in json.loads(line)] for line in lines]


def payloads(name: str) -> list[bytes]:
    """Their batches."""
    return [message[-1] for message in frames(name) if message[-1]]
