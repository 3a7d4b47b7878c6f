"""What looks like a fault and is none: drains, suspensions, weight updates, and engines with much to do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

from tests.recovery.pace import EXACT_S, RETURN_S, Pace, both_paces
from tests.recovery.rigs import FAKE, REAL, REAL_OLD, FakeRig, Rig, on
from tests.recovery.watched import Watched
from vllm_cp import AsyncControlClient, HealthStatus, PauseMode
from vllm_cp.models.ladder import Expect, Reason, Rung
from vllm_cp_exporter.snapshot import WorkerView

Build = Callable[..., Rig]
#: What is on the page of a worker that answers and takes nothing: the rungs above fall with the one that does not hold.
_ANSWERING = {"reachable": True, "serving": True, "answering": True, "admitting": False, "warm": False}


def no_fault(view: WorkerView) -> bool:
    """Nothing is open and nothing was counted."""
    return view.state.fault is None and not any(view.state.faults.values())


def always_ready(view: WorkerView) -> bool:
    """Nothing is wrong, and the worker is ready."""
    return view.state.ready and no_fault(view)


@both_paces
@on(FAKE, REAL, REAL_OLD)
async def test_sigterm_with_a_drain(build: Build, pace: Pace) -> None:
    """SIGTERM with a drain: NOT_SERVING, then new calls hang; it is told from a death in time, and is no fault."""
    rig = build(drains=True)
    # Nothing is counted here, so the window may be as long as a loaded machine needs.
    async with Watched(rig.target, pace, rules=replace(pace.rules, window_s=max(2.0, pace.rules.window_s))) as w:
        await w.ready_and_idle()
        await w.listening()
        told = await asyncio.to_thread(rig.drain, max(1.2, 3 * pace.rules.drain_after_s))
        fell = await w.falls("not_serving", "draining", since=told.monotonic)
        assert fell.monotonic - told.monotonic < EXACT_S
        await w.falls("draining")
        assert w.view.pool_state == "draining"
        await w.until(lambda view: view.state.rungs.reachable.holds is False)
        back = await asyncio.to_thread(rig.restart)
        ready = await w.ready()
        assert ready.monotonic - back.monotonic < RETURN_S
        await w.until(lambda view: view.state.restarts == 1)
        await w.stays(lambda view: view.state.ready, pace.rules.window_s)
        assert (w.faults, w.ends) == ({}, {"planned": 1})
        assert w.view.state.last_recovery_s is None


@on(FAKE, REAL)
async def test_pause_resume_sleep_and_wake(build: Build, pace: Pace) -> None:
    """Paused or asleep a worker answers and takes nothing: suspended, for as long as it takes, and no fault."""
    rig = build()
    async with Watched(rig.target, pace) as w, AsyncControlClient(rig.target) as client:
        await w.ready_and_idle()
        for what in ("pause", "sleep"):
            if what == "pause":
                await client.pause(mode=PauseMode.ABORT, clear_cache=False)
            else:
                await client.sleep(level=1, mode=PauseMode.ABORT)
            await w.falls("suspended", within_s=pace.round_s + EXACT_S)
            assert w.rungs() == _ANSWERING
            assert w.view.state.evidence.health is HealthStatus.SERVING
            assert w.view.pool_state == "suspended"
            await w.stays(lambda view: view.state.reason is Reason.SUSPENDED, 2 * pace.round_s)
            await (client.resume() if what == "pause" else client.wake_up())
            await w.ready(within_s=pace.round_s + EXACT_S)
        assert no_fault(w.view)


@on(FAKE)
async def test_a_pool_may_expect_to_be_suspended(build: Build, pace: Pace) -> None:
    """Where a pool is meant to be suspended, a suspended worker is ready."""
    rig = build()
    async with AsyncControlClient(rig.target) as client:
        await client.pause(mode=PauseMode.KEEP, clear_cache=False)
    async with Watched(rig.target, pace, rules=replace(pace.rules, expect=Expect.SUSPENDED)) as w:
        await w.ready_and_idle()
        assert w.holds(Rung.ADMITTING) is False


@on(REAL)
async def test_weight_sync(build: Build, pace: Pace) -> None:
    """While weights are transferred no engine answers, and the worker's own page says why: maintenance, no fault."""
    rig = build()
    async with Watched(rig.target, pace, http=rig.http_url) as w:
        await w.ready_and_idle()
        with rig.weight_sync(1.5 * pace.silent_within_s):
            await w.falls("maintenance", within_s=2 * pace.silent_within_s)
            assert w.holds(Rung.ANSWERING) is None
            assert w.view.state.evidence.health is HealthStatus.SERVING
            await w.ready(within_s=4 * pace.silent_within_s)
        await w.stays(always_ready, pace.rules.window_s)
        assert no_fault(w.view)


@both_paces
@on(FAKE, REAL)
async def test_a_long_step(build: Build, pace: Pace) -> None:
    """An engine is busy for 12 s in one step, whenever it begins: late answers are answers, and nothing is accused."""
    rig = build()
    async with Watched(rig.target, pace) as w:
        await w.ready_and_idle()
        for phase in (0.0, 0.8):
            await w.next_round_trip()
            await w.stays(always_ready, phase * pace.rules.interval_s)
            await asyncio.to_thread(rig.hang)
            await w.stays(always_ready, pace.busy_s)
            await asyncio.to_thread(rig.unhang)
        await w.next_round_trip()
        await w.stays(always_ready, pace.rules.window_s)


@on(FAKE, REAL)
async def test_a_flood(build: Build, pace: Pace) -> None:
    """Round trips come much too late and tokens move all the while: the engines are busy, and no fault."""
    rig = build()
    async with Watched(rig.target, pace, http=rig.http_url) as w:
        await w.ready_and_idle()
        with rig.traffic():
            await w.until(lambda view: view.state.evidence.tokens_moved is not None)
            late_at = time.monotonic()
            await asyncio.to_thread(rig.late, 1.6 * pace.rules.answer_within_s)
            await w.stays(always_ready, 2 * pace.rules.answer_within_s)
            assert w.since(late_at, lambda view: view.state.rungs.answering.proof == "tokens")
            assert w.holds(Rung.WARM) is True
            await asyncio.to_thread(rig.late, 0.0)
            await w.next_round_trip()
        assert no_fault(w.view)


@on(FAKE)
async def test_an_answer_after_a_weight_sync_may_take_a_moment(build: Build, pace: Pace) -> None:
    """When a weight update is over the engines have ``answer_within`` again: what waited then, waited with reason."""
    rig = build()
    async with Watched(rig.target, pace, http=rig.http_url) as w:
        await w.ready_and_idle()
        await asyncio.to_thread(rig.hang)
        assert isinstance(rig, FakeRig)
        rig.http.set(weight_updates=1)
        await w.falls("maintenance", within_s=2 * pace.silent_within_s)
        rig.http.set(weight_updates=0)
        await w.stays(no_fault, 0.5 * pace.rules.answer_within_s)
        await asyncio.to_thread(rig.unhang)
        await w.ready()
        await w.stays(always_ready, pace.rules.window_s)
