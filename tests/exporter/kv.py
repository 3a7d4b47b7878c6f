"""Waiting for what a worker's KV-cache events make of its page."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.exporter.pages import Page, page
from tests.kv.collect import FAST
from tests.recovery.watched import Watched
from vllm_cp_exporter import kvwatch
from vllm_cp_exporter.kvrows import KV_ROWS
from vllm_cp_exporter.kvview import KV_STATES
from vllm_cp_exporter.snapshot import WorkerView

STATE = "kv_subscriber_state"


def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks and views in quick succession, and a subscriber with no time to lose."""
    monkeypatch.setattr(kvwatch, "_TICK_S", 0.02)
    monkeypatch.setattr(kvwatch, "_VIEW_S", 0.02)
    monkeypatch.setattr(kvwatch, "_LIMITS", kvwatch._LIMITS | FAST)


def numbers(view: WorkerView, name: str) -> dict[tuple[str, ...], float]:
    """One row by its own labels."""
    (row,) = [row for row in KV_ROWS if row.name == f"vllm_cp_{name}"]
    return {labels: value for labels, value in row.read(view) if isinstance(value, int | float)}


async def until(w: Watched, name: str, *labels: str, is_: float) -> Page:
    """The page on which a sample has a value: the one that is, or the first one to come."""
    return page((await w.until(lambda view: numbers(view, name).get(labels) == is_)).view)


async def state(w: Watched, word: str, rank: str = "0") -> Page:
    """The page, once the rank's publisher is in a state."""
    found = await until(w, STATE, rank, word, is_=1)
    assert set(found.by(STATE, "state")) == set(KV_STATES)
    assert sum(found.by(STATE, "state").values()) == 1
    return found


def stored(*hashes: int, **others: Any) -> dict[str, Any]:
    return {"type": "BlockStored", "block_hashes": list(hashes), "token_ids": [], "block_size": 0, **others}


def removed(*hashes: int, **others: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), **others}


CLEARED = {"type": "AllBlocksCleared"}


def resident(seen: Page) -> dict[str, float]:
    """By medium; fails when one is below zero."""
    held = seen.by("kv_blocks_resident", "medium")
    assert all(blocks >= 0 for blocks in held.values())
    return held


def until_true(check: Callable[[], bool], turns: int = 1000) -> None:
    """Until it is so, for some seconds at most."""
    waiting = threading.Event()
    assert any(check() or waiting.wait(0.005) for _ in range(turns))


def listeners() -> list[threading.Thread]:
    """Threads of subscribers."""
    return [thread for thread in threading.enumerate() if thread.name == "vllm-cp-kv"]
