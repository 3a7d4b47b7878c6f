"""Following a worker's KV-cache events: how it can be heard, when it is done at all, and at whose cost."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from tests.exporter.kv import STATE, hurry, listeners, numbers, resident, state, stored, until, until_true
from tests.exporter.pages import page
from tests.kv.collect import STORED
from tests.recovery.watched import Watched
from vllm_cp import KvEventSource
from vllm_cp.kv import Subscriber
from vllm_cp.testing import FakeKvPublisher, FakeWorker
from vllm_cp_exporter import kvwatch
from vllm_cp_exporter.kvwatch import KvWatch


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)


# -- how it can be heard ----------------------------------------------------------------------


async def test_quiet_is_not_off() -> None:
    """A publisher that says nothing is connected and has no last event; zeros are there to count from."""
    with FakeKvPublisher() as kv, FakeWorker(kv_sources=[kv.source]) as worker:
        async with Watched(worker.target, kv_events=True) as w:
            seen = await state(w, "connected")
            for absent in ("last_sequence", "last_event_timestamp_seconds", "view_complete", "blocks_resident"):
                assert not seen.of(f"kv_{absent}"), absent
            for zero in ("gaps", "batches_lost", "publisher_restarts", "queue_drops", "replay_seconds"):
                assert seen[f"kv_{zero}_total", "w"] is not None, zero
            assert seen["kv_events_total", "stored"] == 0
            assert set(seen.by("kv_replays_total", "result")) == {"ok", "partial", "failed"}
            assert seen["kv_queue_depth", "w"] == 0


@pytest.mark.parametrize(("code", "word"), [("UNIMPLEMENTED", "unsupported"), ("UNAUTHENTICATED", "denied")])
async def test_a_worker_that_does_not_tell(code: str, word: str) -> None:
    """A worker that has no such call is unsupported, one that does not let us ask says denied."""
    with FakeWorker() as worker:
        worker.fail("Control.GetKvEventSources", code)
        async with Watched(worker.target, kv_events=True) as w:
            await state(w, word, "all")


async def test_events_that_are_off() -> None:
    """Events that are off in the engine are disabled, which is no trouble of ours."""
    with FakeWorker() as worker:
        async with Watched(worker.target, kv_events=True) as w:
            await state(w, "disabled", "all")


async def test_a_publisher_out_of_reach() -> None:
    """A publisher behind a closed port is unreachable until it is there; an address that nobody outside the engine can
    use is unsupported."""
    inside = KvEventSource(transport="zmq", endpoint="inproc://kv", data_parallel_rank=1, encoding="msgpack")
    with FakeKvPublisher() as kv, FakeWorker(kv_sources=[kv.source, inside]) as worker:
        kv.stop()
        async with Watched(worker.target, kv_events=True) as w:
            await w.until(lambda view: numbers(view, STATE).get(("0", "unreachable")) == 1)
            await w.until(lambda view: numbers(view, STATE).get(("1", "unsupported")) == 1)
            await asyncio.to_thread(kv.restart)
            kv.store(range(16))
            seen = await until(w, "kv_blocks_resident", "0", "gpu", is_=1)
            assert seen[STATE, "0", "connected"] == 1


async def test_a_worker_that_is_down() -> None:
    """A worker that was never there is unknown; one that went away keeps its counts."""
    async with Watched("127.0.0.1:9", kv_events=True) as w:
        await w.falls("unreachable")
        await state(w, "unknown", "all")
    with FakeKvPublisher() as kv, FakeWorker(kv_sources=[kv.source]) as worker:
        async with Watched(worker.target, kv_events=True) as w:
            kv.store(range(16))
            await until(w, "kv_last_sequence", "0", is_=0)
            await asyncio.to_thread(worker.stop)
            await asyncio.to_thread(kv.stop)
            await w.falls("unreachable")
            await w.until(lambda view: numbers(view, STATE).get(("0", "connected")) == 0)
            assert page(w.view)["kv_blocks_stored_total", "gpu"] == 1


# -- on and off, and at whose cost ------------------------------------------------------------


async def test_only_where_it_is_wanted() -> None:
    """Nobody's events are followed unasked. It can be turned on and off under way, and the rows come and go with it."""
    with FakeKvPublisher() as kv, FakeWorker(kv_sources=[kv.source]) as worker:
        async with Watched(worker.target) as w:
            await w.ready_and_idle()
            assert not [sample.name for sample in page(w.view).samples if sample.name.startswith("vllm_cp_kv_")]
            assert not listeners()
            config, settings = w.watcher.config, w.watcher._settings
            for turn in range(2):
                assert w.watcher.change(replace(config, kv_events=True), settings), "on the same connection"
                kv.store(range(100 * turn, 100 * turn + 16))
                await until(w, "kv_last_sequence", "0", is_=turn)
                assert w.watcher.change(config, settings)
                assert not numbers(w.view, "kv_events_total")
                await asyncio.to_thread(lambda: until_true(lambda: not listeners()))


async def test_a_flood_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that say very much are counted in short turns, one at a time; the loop turns for the others in between,
    and in the end all of it is counted."""
    monkeypatch.setattr(kvwatch, "_TURN_S", 0.001)
    batches, turns = 300, asyncio.Lock()
    with FakeKvPublisher() as kv, FakeWorker(kv_sources=[kv.source]) as worker:
        for n in range(batches):
            kv.publish(*[stored(100 * n + block, medium="GPU") for block in range(100)])
        async with Watched(worker.target, kv_events=True) as one, Watched(worker.target, kv_events=True) as two:
            for w in (one, two):
                w.watcher._kv._turn = turns
            looks = 0

            async def others() -> None:
                nonlocal looks
                while True:
                    looks += 1
                    await asyncio.sleep(0)

            task = asyncio.create_task(others())
            for w in (one, two):
                seen = await until(w, "kv_blocks_resident", "0", "gpu", is_=100 * batches)
                assert seen["kv_queue_drops_total", "w"] == 0
            task.cancel()
            assert looks > batches / 10


async def test_a_queue_that_overflows(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is too much to be counted is dropped, and said: drops, losses, and no number of blocks held."""
    monkeypatch.setattr(kvwatch, "_LIMITS", kvwatch._LIMITS | {"max_queue": 5})
    subscribe = KvWatch._subscribe
    made: list[Subscriber] = []

    def noting(self: KvWatch) -> Subscriber:
        made.append(subscribe(self))
        return made[-1]

    monkeypatch.setattr(KvWatch, "_subscribe", noting)
    with FakeKvPublisher(replay=False) as kv, FakeWorker(kv_sources=[kv.source]) as worker:
        async with Watched(worker.target, kv_events=True) as w:
            await state(w, "connected")
            await asyncio.to_thread(kv.wait_subscribed)
            kv.publish(STORED)
            await until(w, "kv_last_sequence", "0", is_=0)
            async with w.watcher._kv._turn:
                for n in range(20):
                    kv.publish({**STORED, "block_hashes": [100 + n]})
                # Published in this thread; nobody counts meanwhile, so the listener alone has to be waited for.
                await asyncio.to_thread(lambda: until_true(lambda: made[0].stats().sources[0].last_seq == 20))
            seen = await until(w, "kv_queue_drops_total", is_=15)
            seen = await until(w, "kv_events_total", "stored", "gpu", "none", is_=6)
            assert seen["kv_batches_lost_total", "w"] == 15
            assert not resident(seen)


async def test_a_fault_of_our_own(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Should following fail, that costs a line and a moment, and neither the worker's other rows nor its counts."""
    monkeypatch.setattr(kvwatch, "_AGAIN_S", 0.02)
    real = Subscriber.poll
    failed: list[Subscriber] = []

    def once(self: Subscriber, timeout_s: float | None = 0.0) -> Any:
        if w.view.kv.last_sequence and not failed:
            failed.append(self)
            raise RuntimeError("a surprise")
        return real(self, timeout_s)

    with FakeKvPublisher() as kv, FakeWorker(kv_sources=[kv.source]) as worker:
        async with Watched(worker.target, kv_events=True) as w:
            kv.store(range(16))
            await until(w, "kv_last_sequence", "0", is_=0)
            monkeypatch.setattr(Subscriber, "poll", once)
            await asyncio.to_thread(lambda: until_true(lambda: bool(failed)))
            kv.store(range(100, 116))
            seen = await until(w, "kv_last_sequence", "0", is_=1)
            assert resident(seen) == {"gpu": 2}
            assert len(listeners()) == 1
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == ["kv_failed"]
