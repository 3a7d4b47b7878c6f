"""What waits for the consumer: bounded, and what went is said where it is missing."""

from __future__ import annotations

import random
import threading

from vllm_cp.kv import (
    Gap,
    GapReason,
    Notice,
    NoticeKind,
    Reset,
    ResetReason,
    SourceId,
    SourceState,
    StateChange,
)
from vllm_cp.kv._queue import Entry, ItemQueue
from vllm_cp.kv._sequence import Arrived

A, B = SourceId(rank=0), SourceId(rank=1)


def batch(seq: int, source: SourceId = A, size: int = 1) -> Arrived:
    """A batch of some bytes."""
    return Arrived(source, seq, bytes(size), False, 0.0)


def everything(queue: ItemQueue) -> list[Entry]:
    """All that is in it."""
    taken = []
    while (entry := queue.take()) is not None:
        taken.append(entry)
    return taken


def words(entries: list[Entry]) -> str:
    """Short: numbers, gaps, resets."""
    said = []
    for entry in entries:
        rank = entry.source.rank if entry.source is not None else "-"
        if isinstance(entry, Arrived):
            said.append(f"{rank}:{entry.seq}")
        elif isinstance(entry, Gap):
            said.append(f"{rank}:lost{entry.first}-{entry.last}")
        else:
            said.append(f"{rank}:{type(entry).__name__}")
    return " ".join(said)


def test_in_order() -> None:
    """What goes in comes out, in order."""
    queue = ItemQueue(10, 1000)
    queue.put([batch(0), batch(1)])
    queue.put([batch(0, B)])
    assert words(everything(queue)) == "0:0 0:1 1:0"
    assert (queue.depth, queue.bytes, queue.dropped) == (0, 0, 0)


def test_the_oldest_go_first_and_it_is_said_where_they_were() -> None:
    """Too slow: the gap comes before the next batch of its source, and other sources are not concerned."""
    queue = ItemQueue(3, 1000)
    queue.put([batch(0), batch(1), batch(0, B), batch(2), batch(3)])
    assert words(everything(queue)) == "1:0 0:lost0-1 0:2 0:3"
    assert queue.dropped == 2
    assert queue.dropped_of == {A: 2}


def test_bytes_count_too() -> None:
    """A few big ones are as much as many small ones."""
    queue = ItemQueue(100, 1000)
    queue.put([batch(seq, size=400) for seq in range(4)])
    assert words(everything(queue)) == "0:lost0-1 0:2 0:3"


def test_a_gap_that_is_dropped_grows() -> None:
    """Losses that follow one another are one loss."""
    queue = ItemQueue(1, 1000)
    queue.put([batch(0), Gap(source=A, first=1, last=3, reason=GapReason.EVICTED), batch(4), batch(5)])
    [gap, last] = everything(queue)
    assert gap == Gap(source=A, first=0, last=4, reason=GapReason.OVERFLOW)
    assert words([last]) == "0:5"


def test_a_reset_that_is_dropped_is_still_said() -> None:
    """What was lost before a reset does not matter after it; the reset does."""
    queue = ItemQueue(1, 1000)
    reset = Reset(source=A, reason=ResetReason.RESTARTED)
    queue.put([batch(7), batch(8), reset, batch(0), batch(1)])
    assert words(everything(queue)) == "0:Reset 0:lost0-0 0:1"


def test_a_consumer_that_is_away_owes_no_memory() -> None:
    """However much happens meanwhile, what is kept is bounded, and the last state and the resets are among it."""
    queue = ItemQueue(4, 1000)
    for number in range(10_000):
        queue.put([StateChange(source=A, state=SourceState.CONNECTED, detail=str(number))])
        queue.put([Reset(source=A, reason=ResetReason.RESTARTED), batch(number)])
        queue.put([Notice(source=A, kind=NoticeKind.RANK_DISAGREES, detail="x")])
    left = everything(queue)
    assert len(left) < 200
    assert StateChange(source=A, state=SourceState.CONNECTED, detail="9999") in left


def test_losses_add_up_for_any_consumer() -> None:
    """Slow, fast or in between: per source, batches and gaps together have no holes."""
    chance = random.Random(3)
    queue = ItemQueue(5, 1000)
    following = {A: 0, B: 0}
    told: dict[SourceId, int] = {A: 0, B: 0}

    def take(count: int) -> None:
        for _ in range(count):
            entry = queue.take()
            if entry is None:
                return
            assert isinstance(entry, Arrived | Gap)
            first = entry.seq if isinstance(entry, Arrived) else entry.first
            assert first == told[entry.source]
            told[entry.source] = (entry.seq if isinstance(entry, Arrived) else entry.last) + 1

    for _ in range(3000):
        source = chance.choice((A, B))
        queue.put([batch(following[source], source)])
        following[source] += 1
        take(chance.choice((0, 0, 1, 2, 9)))
    take(10_000)
    assert told == following


def test_waiting_ends_with_the_next_entry_or_with_the_queue() -> None:
    """A consumer that waits is woken by what comes, and by the end."""
    queue = ItemQueue(5, 1000)
    assert queue.wait(0.01) is None
    threading.Timer(0.02, lambda: queue.put([batch(0)])).start()
    assert queue.wait(5.0) == batch(0)
    threading.Timer(0.02, queue.close).start()
    assert queue.wait(5.0) is None
    assert queue.closed
