"""How many faults was that? What is counted when signals overlap, repeat, come too early or lie."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.recovery.pace import EXACT_S, PATIENCE_S, RETURN_S, WORD_S, Pace
from tests.recovery.rigs import FAKE, REAL, FakeRig, RealRig, Rig, on
from tests.recovery.watched import Watched
from vllm_cp import AsyncControlClient, Connection, HealthStatus, OutOfTime
from vllm_cp.models.ladder import Rung
from vllm_cp.readiness import AsyncLadder, Progress
from vllm_cp.testing import FakeWorker

Build = Callable[..., Rig]


@on(FAKE)
async def test_b17_b_a_flapping_worker(build: Build, pace: Pace) -> None:
    """NOT_SERVING for 100 ms, ten times: ready follows the server's word each time, and it is one fault."""
    rig = build()
    assert isinstance(rig, FakeRig)
    async with Watched(rig.target, pace) as w:
        await w.ready_and_idle()
        begun = time.time()
        for _ in range(10):
            said = time.monotonic()
            rig.worker.health("NOT_SERVING")
            fell = await w.falls("not_serving", since=said)
            assert fell.monotonic - said < WORD_S
            await w.stays(lambda view: not view.state.ready, 0.1)
            said = time.monotonic()
            rig.worker.health("SERVING")
            ready = await w.ready(since=said)
            assert ready.monotonic - said < WORD_S
        ended = time.time()
        episode = await w.settled()
        assert (w.faults, w.ends) == ({"engine_reported": 1}, {"resumed": 1})
        assert episode.duration_s == pytest.approx(ended - begun, abs=EXACT_S)


@on(REAL)
async def test_a_crash_loop(build: Build, pace: Pace) -> None:
    """A worker that comes up and falls over again before the window has passed has one fault, and as many restarts."""
    rig = build()
    async with Watched(rig.target, pace, rules=replace(pace.rules, window_s=1.5)) as w:
        await w.ready_and_idle()
        first = await asyncio.to_thread(rig.kill)
        await w.falls("unreachable")
        for times in (1, 2):
            back = await asyncio.to_thread(rig.restart)
            await w.ready()
            await w.until(lambda view: view.state.restarts > 0)
            if times == 1:
                await asyncio.to_thread(rig.kill)
                await w.falls("unreachable")
        await w.until(lambda view: view.state.restarts == 2)
        episode = await w.settled()
        assert (w.faults, w.ends) == ({"unreachable": 1}, {"replaced": 1})
        assert abs(episode.start - first.wall) < EXACT_S
        assert episode.end is not None
        assert -EXACT_S < episode.end - back.wall < RETURN_S


@on(REAL)
async def test_b17_d_first_seen_broken(build: Build, pace: Pace) -> None:
    """A worker that hangs when it is first seen has no fault, since nobody saw when it began; its first ready is none
    either."""
    rig = build()
    await asyncio.to_thread(rig.hang)
    async with Watched(rig.target, pace) as w:
        await w.falls("engine_silent")
        assert w.view.state.evidence.health is HealthStatus.SERVING
        assert w.view.pool_state == "starting"
        await asyncio.to_thread(rig.unhang)
        await w.ready()
        await w.stays(lambda view: view.state.ready, pace.rules.window_s)
        assert (w.faults, w.ends, w.view.episodes) == ({}, {}, ())
        assert w.view.state.last_recovery_s is None


async def test_b17_d_absent_from_the_start(pace: Pace) -> None:
    """A worker that is not there at first has no fault, and its start is measured from the closed port on."""
    with FakeWorker() as worker:
        worker.stop()
        async with Watched(worker.target, pace) as w:
            await w.falls("unreachable")
            await asyncio.to_thread(worker.restart)
            served = time.monotonic()
            ready = await w.ready()
            assert ready.monotonic - served < RETURN_S
            await w.until(lambda view: view.state.instance_id is not None)
            assert w.view.state.startup.phases().keys() == {"to_socket", "to_serving"}
            await w.stays(lambda view: view.state.ready, pace.rules.window_s)
            assert (w.faults, w.ends, w.view.episodes) == ({}, {}, ())


async def test_a_replacement_that_nobody_saw(pace: Pace) -> None:
    """Another instance answers and no break was seen: one fault, counted as replaced unseen, without a length."""
    with FakeWorker() as worker:
        async with Watched(worker.target, pace) as w:
            await w.ready_and_idle()
            worker.set(instance_id="another")
            await w.until(lambda view: view.state.restarts == 1)
            assert (w.faults, w.ends) == ({"replaced_unseen": 1}, {"replaced": 1})
            assert w.episode.duration_s is None
            await w.ready(since=0.0)


@on(FAKE, REAL)
async def test_ranks_that_disagree(build: Build, pace: Pace) -> None:
    """One of two ranks is paused: all of them answer, none of it is a fault, and nothing is to be sent there."""
    rig = build(ranks=2)
    async with Watched(rig.target, pace) as w:
        await w.ready_and_idle()
        if isinstance(rig, RealRig):
            await asyncio.to_thread(rig.stack.set, 1, paused="abort")
        elif isinstance(rig, FakeRig):
            rig.worker.set(rank=1, paused=True)
        await w.falls("ranks_disagree")
        assert w.holds(Rung.ANSWERING) is True
        assert w.holds(Rung.ADMITTING) is False
        await w.stays(lambda view: view.state.fault is None, pace.silent_within_s)
        assert not w.faults


async def test_b13_the_engine_is_stuck_and_health_is_fine(pace: Pace) -> None:
    """The frontend answers health and facts while one RPC never answers and the engines are stuck: each thing that is
    known says for itself when it was last known, and nothing hangs."""
    with FakeWorker() as worker:
        async with Watched(worker.target, pace) as w:
            await w.ready_and_idle()
            worker.delay("GetModelInfo", 3600)
            worker.hang()
            at = time.time()
            await w.falls("engine_silent")
            await w.until(lambda view: view.proofs["health"] > at + pace.rules.interval_s)
            assert w.view.proofs["round_trip"] < at + EXACT_S < w.view.proofs["health"] + EXACT_S
            assert w.rungs()["serving"] is True
            assert w.rungs()["answering"] is False
            assert w.view.state.rungs.answering.why.startswith("a round trip has been waiting for")


async def test_b13_a_fact_that_never_comes_hides_no_restart(pace: Pace) -> None:
    """The model is asked for and never told: which instance answers is known all the same, and so is that it is new."""
    with FakeWorker() as worker:
        async with Watched(worker.target, pace) as w:
            await w.ready_and_idle()
            await asyncio.to_thread(worker.stop)
            await w.falls("unreachable")
            await asyncio.to_thread(worker.restart)
            worker.delay("GetModelInfo", 3600)
            await w.settled()
            assert (w.faults, w.ends) == ({"unreachable": 1}, {"replaced": 1})
            assert w.view.state.restarts == 1


async def test_b13_health_hangs_and_control_answers(pace: Pace) -> None:
    """A health service that never answers proves nothing: serving is not known, and the watcher goes on."""
    with FakeWorker() as worker:
        worker.delay("Check", 3600)
        worker.delay("Watch", 3600)
        async with Watched(impatient(worker.target), pace) as w:
            await w.falls("unreachable")
            assert w.watcher.attempted.is_set()
            assert w.view.state.rungs.reachable.why == "the port accepts calls and answers none"
            worker.heal()
            await w.ready()
            assert not w.faults


def impatient(target: str) -> Connection:
    """A connection that does not wait for long."""
    return Connection.parse(target, timeout_s=0.5)


async def test_b16_ready_too_early(pace: Pace) -> None:
    """A port that is open, a name that is not registered, one that does not serve: ready at none of them, and the wait
    ends with the last state seen; the health name that counts can be chosen."""
    seen: list[Progress] = []
    with socket.create_server(("127.0.0.1", 0)) as open_port:
        target = f"127.0.0.1:{open_port.getsockname()[1]}"
        async with AsyncControlClient(impatient(target)) as client, AsyncLadder(client) as ladder:
            with pytest.raises(OutOfTime, match="the port accepts calls and answers none"):
                await ladder.wait_until(Rung.SERVING, 1.2, every_s=0.1)
    with FakeWorker() as worker:
        async with AsyncControlClient(worker.target) as client:
            async with AsyncLadder(client, service="vllm.Inference") as ladder:
                worker.fail("Check", "NOT_FOUND", "unknown service")
                with pytest.raises(OutOfTime, match="health says SERVICE_UNKNOWN"):
                    await ladder.wait_until("admitting", 0.3, seen.append, every_s=0.05)
                assert len(seen) > 2
                assert [progress for progress in seen if progress.reason is None] == []
                worker.heal()
                worker.health("NOT_SERVING", "vllm.Inference")
                with pytest.raises(OutOfTime, match="health says NOT_SERVING"):
                    await ladder.wait_until("admitting", 0.3, every_s=0.05)
            async with AsyncLadder(client, service="vllm.Control") as other:
                await other.wait_until(Rung.ADMITTING, PATIENCE_S, every_s=0.05)
            async with AsyncLadder(client, service="vllm.Inference") as ladder:
                worker.health("SERVING")
                rungs = await ladder.wait_until("admitting", PATIENCE_S, every_s=0.05)
                assert rungs.highest is Rung.ADMITTING


@pytest.mark.parametrize("blocks", [0, None, 2**64 - 1])
async def test_b20_what_is_not_known_is_not_zero(blocks: int | None, pace: Pace) -> None:
    """A worker that reports no KV blocks is ready like any other, and its capacity is unknown rather than zero."""
    with FakeWorker() as worker:
        worker.set(total_kv_blocks=blocks)
        async with Watched(worker.target, pace) as w:
            await w.ready()
            await w.until(lambda view: view.facts.server is not None)
            assert w.view.facts.server is not None
            assert w.view.facts.server.total_kv_blocks == (blocks or None)
