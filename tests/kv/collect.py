"""What socket tests share: batches to publish, and reading until something is there, never longer than a deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

import msgspec

from vllm_cp.kv import AsyncSubscriber, Batch, Gap, Item, Reset, Settings, SourceState, StateChange, Subscriber

#: Time constants at about 1/20 of the real ones.
FAST = {
    "catch_up_after_s": 0.1,
    "replay_idle_s": 0.5,
    "replay_total_s": 3.0,
    "replay_cool_down_s": 0.05,
    "reconnect_s": 0.02,
    "reconnect_max_s": 0.1,
    "handshake_s": 0.3,
    "heartbeat_s": 0.2,
    "refresh_s": 0.05,
    "refresh_max_s": 0.2,
    "refresh_final_s": 1.0,
}

#: An event to publish.
STORED = {"type": "BlockStored", "block_hashes": [1], "token_ids": [1, 2], "block_size": 2, "medium": "GPU"}


def pack(*events: object) -> bytes:
    """A batch."""
    return msgspec.msgpack.encode([1.0, events, 0])


def number(seq: int) -> bytes:
    """A sequence frame."""
    return seq.to_bytes(8, "big")


def states(items: list[Item]) -> list[SourceState]:
    """The states it went through."""
    return [item.state for item in items if isinstance(item, StateChange)]


def fast(**others: float) -> Settings:
    """Settings for tests."""
    return Settings(**{**FAST, **others})  # type: ignore[arg-type]


def until(
    subscriber: Subscriber,
    enough: Callable[[list[Item]], object],
    timeout_s: float = 5.0,
    seen: list[Item] | None = None,
) -> list[Item]:
    """What it says until ``enough`` of all that is true; TimeoutError with what came instead."""
    seen = [] if seen is None else seen
    deadline = time.monotonic() + timeout_s
    while not enough(seen):
        item = subscriber.poll(min(0.05, max(0.0, deadline - time.monotonic())))
        if item is not None:
            seen.append(item)
        elif time.monotonic() >= deadline or subscriber.over:
            raise TimeoutError(f"after {timeout_s} s: {words(seen)}")
    return seen


async def auntil(
    subscriber: AsyncSubscriber, enough: Callable[[list[Item]], object], timeout_s: float = 5.0
) -> list[Item]:
    """The same for asyncio."""
    seen: list[Item] = []

    async def read() -> None:
        while not enough(seen):
            seen.append(await anext(subscriber))

    try:
        await asyncio.wait_for(read(), timeout_s)
    except (asyncio.TimeoutError, StopAsyncIteration):
        raise TimeoutError(f"after {timeout_s} s: {words(seen)}") from None
    return seen


def seqs(items: Iterable[Item]) -> list[int]:
    """Numbers of the batches."""
    return [item.seq for item in items if isinstance(item, Batch)]


def words(items: Iterable[Item]) -> list[str]:
    """Batches, gaps and resets, short: ``0 1 lost 2-6 evicted 7``."""
    said = []
    for item in items:
        if isinstance(item, Batch):
            said.append(str(item.seq))
        elif isinstance(item, Gap):
            said.append(f"lost {item.first}-{item.last} {item.reason.value}")
        elif isinstance(item, Reset):
            said.append(item.reason.value + ("" if item.begins_at is None else f" {item.begins_at}"))
    return said


def batches(count: int) -> Callable[[list[Item]], bool]:
    """So many batches."""
    return lambda seen: len(seqs(seen)) >= count


def seq(number: int) -> Callable[[list[Item]], bool]:
    """The batch with this number is the last one."""
    return lambda seen: bool(seen) and number in seqs(seen[-1:])


def state(wanted: SourceState) -> Callable[[list[Item]], bool]:
    """A source, or the worker, is in this state."""
    return lambda seen: any(isinstance(item, StateChange) and item.state is wanted for item in seen)
