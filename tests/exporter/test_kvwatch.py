"""KV-cache events on the page: counted once, and held against what the publisher did."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.exporter.kv import (
    CLEARED,
    STATE,
    hurry,
    listeners,
    numbers,
    removed,
    resident,
    state,
    stored,
    until,
    until_true,
)
from tests.kv.collect import STORED, number, pack
from tests.recovery.watched import Watched
from vllm_cp.testing import FakeKvPublisher, FakeWorker, KvLayout

H1, H2, H9 = 1, 2, 9


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)


# -- what is counted --------------------------------------------------------------------------


async def test_b06_stored_twice_and_removed_twice() -> None:
    """A block stored twice is held until it is removed twice; media are counted apart, a clear empties all of them, a
    removal of what is not held takes nothing away, and the counters of events only rise."""
    steps: list[tuple[dict[str, Any], dict[str, float]]] = [
        (stored(H1, medium="GPU"), {"gpu": 1}),
        (stored(H1, medium="GPU"), {"gpu": 1}),
        (removed(H1, medium="GPU"), {"gpu": 1}),
        (removed(H1, medium="GPU"), {"gpu": 0}),
        (removed(H9, medium="GPU"), {"gpu": 0}),
        (stored(H2, medium="CPU"), {"gpu": 0, "cpu": 1}),
        (stored(H2, medium="GPU"), {"gpu": 1, "cpu": 1}),
        (removed(H2, medium="GPU"), {"gpu": 0, "cpu": 1}),
        (CLEARED, {"gpu": 0, "cpu": 0}),
        (removed(H2, medium="CPU"), {"gpu": 0, "cpu": 0}),
    ]
    with FakeKvPublisher() as kv, FakeWorker(kv_sources=[kv.source]) as worker:
        async with Watched(worker.target, kv_events=True) as w:
            before: dict[tuple[str, ...], float] = {}
            for event, held in steps:
                seq = kv.publish(event)
                seen = await until(w, "kv_last_sequence", "0", is_=seq)
                assert resident(seen) == held
                assert seen["kv_view_complete", "0"] == 1
                now = numbers(w.view, "kv_events_total")
                assert sum(now.values()) == seq + 1
                assert all(now[labels] >= count for labels, count in before.items())
                before = now
    assert before == {
        ("stored", "gpu", "none"): 3,
        ("stored", "cpu", "none"): 1,
        ("removed", "gpu", "none"): 4,
        ("removed", "cpu", "none"): 1,
        ("cleared", "none", "none"): 1,
        ("unknown", "none", "none"): 0,
    }
    assert numbers(w.view, "kv_blocks_removed_total") == {("0", "gpu"): 4, ("0", "cpu"): 1}


@pytest.mark.parametrize("layout", KvLayout)
async def test_layouts(layout: KvLayout) -> None:
    """However batches are laid out, the numbers are the same, and the cache is as large as it is."""
    with (
        FakeKvPublisher(layout=layout, capacity=6) as kv,
        FakeWorker(kv_sources=[kv.source]) as worker,
    ):
        async with Watched(worker.target, kv_events=True) as w:
            await state(w, "connected")
            kv.store(range(64))
            kv.store(range(100, 164))
            seen = await until(w, "kv_last_sequence", "0", is_=1)
            assert seen.by("kv_blocks_stored_total", "medium") == {"gpu": 8}
            assert seen.by("kv_blocks_removed_total", "medium") == {"gpu": 2}
            assert resident(seen) == {"gpu": len(kv.cache.blocks)} == {"gpu": 6}
            assert set(seen.by("kv_decode_failures_total", "reason").values()) == {0}
            received = seen["kv_last_event_timestamp_seconds", "0"]
            assert received is not None
            assert abs(received - w.view.state.discovered) < 60


async def test_offload_tiers() -> None:
    """Media and tiers have labels of their own: an absent one is none, a medium nobody knows is unknown, and a
    publisher that invents tiers without end fills one label value."""
    with FakeKvPublisher() as kv, FakeWorker(kv_sources=[kv.source]) as worker:
        async with Watched(worker.target, kv_events=True) as w:
            kv.publish(
                stored(1, 2, medium="GPU"),
                stored(1, 2, medium="CPU", ownership="host"),
                stored(3, medium="STORAGE", ownership="nvme"),
                stored(4, medium="TAPE", ownership="x" * 65),
                stored(5),
                removed(1, medium="CPU", ownership="host"),
                {"type": "BlockMoved"},
            )
            seen = await until(w, "kv_last_sequence", "0", is_=0)
            assert {labels: n for labels, n in numbers(w.view, "kv_events_total").items() if n} == {
                ("stored", "gpu", "none"): 1,
                ("stored", "cpu", "host"): 1,
                ("stored", "storage", "nvme"): 1,
                ("stored", "unknown", "unknown"): 1,
                ("stored", "none", "none"): 1,
                ("removed", "cpu", "host"): 1,
                ("unknown", "none", "none"): 1,
            }
            assert resident(seen) == {"gpu": 2, "cpu": 1, "storage": 1, "unknown": 1, "none": 1}
            kv.publish(*[stored(n, medium="CPU", ownership=f"tier-{n}") for n in range(100)])
            seen = await until(w, "kv_last_sequence", "0", is_=1)
            tiers = seen.by("kv_events_total", "tier")
            assert len(tiers) == 8 + len({"none", "unknown"})
            assert tiers["unknown"] == 94


async def test_ranks_are_apart() -> None:
    """Each rank has its own numbers, whether it has a publisher of its own or shares one for all."""
    with (
        FakeKvPublisher(rank=0) as zero,
        FakeKvPublisher(rank=None, stamp=3) as shared,
        FakeWorker(kv_sources=[zero.source, shared.source]) as worker,
    ):
        async with Watched(worker.target, kv_events=True) as w:
            zero.store(range(16))
            shared.store(range(32))
            await until(w, "kv_last_sequence", "0", is_=0)
            seen = await until(w, "kv_last_sequence", "all", is_=0)
            assert seen.by("kv_blocks_stored_total", "rank") == {"0": 1, "3": 2}
            assert seen.by("kv_blocks_resident", "rank") == {"0": 1, "3": 2}
            assert seen[STATE, "all", "connected"] == seen[STATE, "0", "connected"] == 1


# -- what goes wrong --------------------------------------------------------------------------


async def test_a_gap_that_is_filled() -> None:
    """Batches that were missed and replayed are a gap and no loss; the view stays complete."""
    with FakeKvPublisher() as kv, FakeWorker(kv_sources=[kv.source]) as worker:
        async with Watched(worker.target, kv_events=True) as w:
            kv.store(range(16))
            first = await until(w, "kv_last_sequence", "0", is_=0)
            kv.drop(2)
            for start in (100, 200, 300):
                kv.store(range(start, start + 16))
            seen = await until(w, "kv_last_sequence", "0", is_=3)
            assert (seen["kv_gaps_total", "w"], seen["kv_batches_lost_total", "w"]) == (1, 0)
            before, after = first["kv_replays_total", "ok"], seen["kv_replays_total", "ok"]
            assert before is not None
            assert after is not None
            assert after > before
            assert seen["kv_replay_seconds_total", "w"] != first["kv_replay_seconds_total", "w"]
            assert resident(seen) == {"gpu": 4}


async def test_a_gap_that_is_not() -> None:
    """Without a replay the batches are lost: what is held is not known, and absent, until the cache is cleared."""
    with FakeKvPublisher(replay=False) as kv, FakeWorker(kv_sources=[kv.source]) as worker:
        async with Watched(worker.target, kv_events=True) as w:
            await state(w, "connected")
            await asyncio.to_thread(kv.wait_subscribed)
            kv.store(range(16))
            assert resident(await until(w, "kv_last_sequence", "0", is_=0)) == {"gpu": 1}
            kv.drop(3)
            for start in (100, 200, 300, 400):
                kv.store(range(start, start + 16))
            seen = await until(w, "kv_batches_lost_total", is_=3)
            assert seen["kv_view_complete", "0"] == 0
            assert not resident(seen)
            assert seen["kv_blocks_stored_total", "gpu"] == 2
            assert sum(seen.by("kv_replays_total", "result").values()) == 0
            kv.clear()
            assert resident(await until(w, "kv_view_complete", "0", is_=1)) == {"gpu": 0}


async def test_history_that_is_gone() -> None:
    """A replay that comes to its end is ok, also where older batches are gone from it; one that is never answered has
    failed. Both are counted with what they lost."""
    with FakeKvPublisher() as kv, FakeWorker(kv_sources=[kv.source]) as worker:
        async with Watched(worker.target, kv_events=True) as w:
            kv.store(range(16))
            await until(w, "kv_last_sequence", "0", is_=0)
            kv.drop(4)
            for start in (100, 200, 300, 400):
                kv.store(range(start, start + 16))
            kv.forget(keep=2)
            kv.store(range(500, 516))
            seen = await until(w, "kv_last_sequence", "0", is_=5)
            assert (seen["kv_batches_lost_total", "w"], seen["kv_replays_total", "failed"]) == (2, 0)
            assert not resident(seen)
            kv.deafen()
            kv.drop(1)
            kv.store(range(600, 616))
            kv.store(range(700, 716))
            seen = await until(w, "kv_batches_lost_total", is_=3)
            failed = seen["kv_replays_total", "failed"]
            assert failed is not None
            assert failed >= 1


async def test_a_publisher_that_restarts() -> None:
    """A new process at the same address: counted, its cache is new, and no counter falls."""
    with FakeKvPublisher() as kv, FakeWorker(kv_sources=[kv.source]) as worker:
        async with Watched(worker.target, kv_events=True) as w:
            kv.store(range(64))
            await until(w, "kv_last_sequence", "0", is_=0)
            await asyncio.to_thread(kv.restart)
            kv.store(range(32))
            seen = await until(w, "kv_publisher_restarts_total", is_=1)
            seen = await until(w, "kv_blocks_resident", "0", "gpu", is_=2)
            assert seen["kv_blocks_stored_total", "gpu"] == 6


async def test_a_worker_that_comes_back_elsewhere() -> None:
    """A new instance publishes at another address: it is found there, and what was counted stays."""
    with (
        FakeKvPublisher() as old,
        FakeKvPublisher() as new,
        FakeWorker(kv_sources=[old.source]) as worker,
    ):
        async with Watched(worker.target, kv_events=True) as w:
            old.store(range(64))
            await until(w, "kv_last_sequence", "0", is_=0)
            await asyncio.to_thread(worker.stop)
            worker.set(kv_sources=[new.source])
            await asyncio.to_thread(worker.restart)
            new.store(range(16))
            seen = await until(w, "kv_blocks_resident", "0", "gpu", is_=1)
            assert seen["kv_blocks_stored_total", "gpu"] == 5
            await asyncio.to_thread(lambda: until_true(lambda: old.subscribers == 0))
            worker.set(kv_sources=[])
            await asyncio.to_thread(worker.restart)
            seen = await state(w, "disabled", "all")
            assert not seen.of("kv_blocks_resident")
            assert not seen.of("kv_last_sequence")
            assert seen["kv_blocks_stored_total", "gpu"] == 5
    await asyncio.to_thread(lambda: until_true(lambda: not listeners()))


async def test_poison() -> None:
    """Garbage is counted by its reason and ends nothing; every reason is there from the start."""
    with FakeKvPublisher() as kv, FakeWorker(kv_sources=[kv.source]) as worker:
        async with Watched(worker.target, kv_events=True) as w:
            await state(w, "connected")
            await asyncio.to_thread(kv.wait_subscribed)
            kv.publish(STORED)
            seen = await until(w, "kv_last_sequence", "0", is_=0)
            reasons = {"frames", "sequence", "reserved", "msgpack", "batch", "event"}
            assert seen.by("kv_decode_failures_total", "reason") == dict.fromkeys(reasons, 0)
            kv.poison(b"", b"short")
            kv.poison(b"", b"7 bytes", pack(STORED))
            kv.poison(b"", number(2**64 - 1), pack(STORED))
            kv.poison()
            kv.publish({"type": "BlockStored"}, {**STORED, "block_hashes": [2]})
            seen = await until(w, "kv_last_sequence", "0", is_=2)
            failures = seen.by("kv_decode_failures_total", "reason")
            assert {reason for reason, count in failures.items() if count} == reasons - {"batch"}
            assert seen["kv_batches_lost_total", "w"] == 1
            assert seen["kv_blocks_stored_total", "gpu"] == 2
            assert not [n for n in seen.by("exporter_row_errors_total", "row").values() if n]
