"""The ladder for users, in both colours: one look, waiting for a goal, and what cannot be waited for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.colours import COLOURS
from tests.recovery.ladders import BothLadders, ladder_to
from tests.recovery.pace import EXACT_S, FAST, PATIENCE_S, RETURN_S
from tests.recovery.rigs import FAKE, FAKE_OLD, REAL, REAL_OLD, FakeRig, Rig, on
from vllm_cp import NotSupported, OutOfTime
from vllm_cp.models.ladder import Rung
from vllm_cp.readiness import Progress

Build = Callable[..., Rig]
EVERY_S = 0.05
#: A look may take a second, so they are further apart than the daemon's questions.
RULES = replace(FAST.rules, interval_s=2.0, answer_within_s=1.5)

in_both_colours = pytest.mark.parametrize("colour", COLOURS)
#: Where each colour and each rig once is enough.
either = pytest.mark.parametrize(
    ("build", "colour"), [(FAKE, "sync"), pytest.param(REAL, "async", marks=pytest.mark.real)], indirect=["build"]
)


@in_both_colours
@on(FAKE, REAL)
async def test_one_look(build: Build, colour: str) -> None:
    """One look tells which rungs are proved, by what, since when, and why the top one is not."""
    rig = build(ranks=2)
    before = time.time()
    async with ladder_to(colour, rig.target) as ladder:
        rungs = await ladder.observe()
        assert rungs.highest is Rung.ADMITTING
        assert (rungs.serving.proof, rungs.answering.proof) == ("health", "round trip")
        assert rungs.answering.since is not None
        assert before < rungs.answering.since < time.time()
        assert rungs.answering.proved_at is not None
        assert (rungs.warm.holds, rungs.warm.provable) == (None, False)
        assert rungs.warm.why.startswith("nothing here sees generations")
        assert ladder.state.ready
        assert ladder.state.instance_id is not None


@in_both_colours
@on(FAKE, FAKE_OLD, REAL, REAL_OLD)
async def test_each_goal(build: Build, colour: str) -> None:
    """Every rung can be waited for where a canary is allowed, on the oldest version too; progress is told."""
    rig = build()
    async with ladder_to(colour, rig.target, canary=True) as ladder:
        for rung in Rung:
            seen: list[Progress] = []
            rungs = await ladder.wait_until(rung.value, PATIENCE_S, seen.append, every_s=EVERY_S)
            assert rungs[rung].holds
            assert seen[-1].rungs == rungs
        assert ladder.rungs() == dict.fromkeys((rung.value for rung in Rung), True)
        assert rungs.warm.proof == "canary"


@in_both_colours
@on(FAKE)
async def test_drained_and_gone(build: Build, colour: str) -> None:
    """A drain is noticed while it goes on; gone is only who has closed the port."""
    rig = build()
    async with ladder_to(colour, rig.target) as ladder:
        await _drains(ladder, rig, 1.0)


@pytest.mark.slow
@on(REAL)
async def test_a_long_drain(build: Build) -> None:
    """The same with the genuine frontend, and for longer than gRPC waits for a connection: that is not gone either."""
    rig = build(drains=True)
    async with ladder_to("async", rig.target) as ladder:
        await _drains(ladder, rig, 7.0)


async def _drains(ladder: BothLadders, rig: Rig, seconds: float) -> None:
    await ladder.wait_until("admitting", PATIENCE_S, every_s=EVERY_S)
    drained = asyncio.create_task(ladder.wait_until("drained", PATIENCE_S, every_s=EVERY_S))
    told = await asyncio.to_thread(rig.drain, seconds)
    await drained
    await ladder.wait_until("gone", PATIENCE_S, every_s=EVERY_S)
    assert time.monotonic() - told.monotonic > seconds - EXACT_S
    assert ladder.state.rungs.reachable.holds is False
    # Who is gone has drained, too.
    await ladder.wait_until("drained", PATIENCE_S, every_s=EVERY_S)


@in_both_colours
@on(FAKE_OLD, REAL_OLD)
async def test_what_the_oldest_version_cannot_prove(build: Build, colour: str) -> None:
    """Without a round trip and without a canary nothing proves that engines answer: NotSupported at once, with the
    version that brought it; what is below can be waited for."""
    rig = build()
    async with ladder_to(colour, rig.target) as ladder:
        await ladder.wait_until(Rung.SERVING, PATIENCE_S)
        began = time.monotonic()
        for rung in (Rung.ANSWERING, Rung.ADMITTING, Rung.WARM):
            with pytest.raises(NotSupported, match="UNPROVABLE") as caught:
                await ladder.wait_until(rung, PATIENCE_S)
            assert caught.value.target == rig.target
            # A canary is nothing that a later version would bring.
            assert caught.value.since == ("" if rung is Rung.WARM else "0.28")
        assert time.monotonic() - began < 5.0
        assert ladder.rungs() == {"reachable": True, "serving": True}
        assert ladder.state.ready


@either
async def test_out_of_time(build: Build, colour: str) -> None:
    """A wait that runs out of time says what was seen last; looks at a frozen engine never queue a second question."""
    rig = build()
    await asyncio.to_thread(rig.hang)
    async with ladder_to(colour, rig.target, rules=RULES) as ladder:
        seen: list[Progress] = []
        with pytest.raises(OutOfTime, match="a round trip has been waiting for") as caught:
            await ladder.wait_until("answering", 1.6, seen.append, every_s=EVERY_S)
        assert (caught.value.method, caught.value.target) == ("wait for answering", rig.target)
        assert ladder.rungs()["serving"] is True
        assert ladder.rungs()["answering"] is False
        assert seen[-1].why.startswith("a round trip has been waiting for")
        if isinstance(rig, FakeRig):
            assert len([call for call in rig.worker.calls if call.method == "Control.IsPaused"]) == 1
        unhung = await asyncio.to_thread(rig.unhang)
        await ladder.wait_until("admitting", PATIENCE_S, every_s=EVERY_S)
        assert time.monotonic() - unhung.monotonic < 1.0 + EXACT_S
        # It was never seen to admit, so its silence was no fault.
        assert ladder.state.fault is None


@either
async def test_faults_on_the_ladder(build: Build, colour: str) -> None:
    """Whoever keeps looking has the faults too: a worker that is killed and comes back is one."""
    rig = build()
    async with ladder_to(colour, rig.target, rules=RULES) as ladder:
        await ladder.wait_until("admitting", PATIENCE_S, every_s=EVERY_S)
        killed = await asyncio.to_thread(rig.kill)
        await ladder.wait_until("gone", PATIENCE_S, every_s=EVERY_S)
        assert ladder.state.open_fault is not None
        back = await asyncio.to_thread(rig.restart)
        await ladder.wait_until("admitting", PATIENCE_S, every_s=EVERY_S)
        assert time.monotonic() - back.monotonic < RETURN_S
        deadline = time.monotonic() + PATIENCE_S
        while ladder.state.fault is not None and time.monotonic() < deadline:
            await ladder.observe()
            await asyncio.sleep(EVERY_S)
        assert {cause.value: n for cause, n in ladder.state.faults.items() if n} == {"unreachable": 1}
        assert {kind.value: n for kind, n in ladder.state.ends.items() if n} == {"replaced": 1}
        took = ladder.state.last_recovery_s
        assert took is not None
        assert -EXACT_S < took - (back.wall - killed.wall) < RETURN_S


@in_both_colours
async def test_a_goal_that_does_not_exist(colour: str) -> None:
    """A goal nobody knows, or no time to wait in, is a mistake of the caller and told at once."""
    async with ladder_to(colour, "127.0.0.1:9") as ladder:
        with pytest.raises(ValueError, match=r"cannot wait for 'happy'; wait for one of reachable, .*, gone, drained"):
            await ladder.wait_until("happy", 1.0)
        with pytest.raises(ValueError, match="deadline_s must be a positive number of seconds"):
            await ladder.wait_until("serving", 0.0)
        await ladder.wait_until("gone", PATIENCE_S)
