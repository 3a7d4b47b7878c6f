"""Workers without a control port: health, tokens and fault tolerance over HTTP are all there is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator

import pytest

from tests.recovery.pace import EXACT_S, RETURN_S, Pace
from tests.recovery.rigs import REAL, Rig, on
from tests.recovery.watched import Watched
from vllm_cp.faults import AsyncFaultTolerance, HttpConnection, recover_async
from vllm_cp.models.recovery import RecoveryOutcome
from vllm_cp.testing import FakeHttp, FakeWorker

GIVES_UP_S = 20.0


@pytest.fixture
def http() -> Iterator[FakeHttp]:
    """A Python server with two engines behind it."""
    with FakeHttp(engines=(0, 1), engine_recovery_timeout_s=GIVES_UP_S) as server:
        yield server


async def test_what_http_can_prove(http: FakeHttp, pace: Pace) -> None:
    """Health proves serving; tokens that move on every engine prove answering, and when they stop that is unknown."""
    async with Watched(None, pace, http=http.url) as w:
        await w.ready()
        # What cannot be proved is absent, and ready falls back; that nothing was generated yet is known.
        await w.until(lambda view: view.metrics is not None)
        assert w.rungs() == {"reachable": True, "serving": True, "warm": False}
        for tokens in range(1, 100):
            await asyncio.to_thread(http.set, generation_tokens=tokens)
            if w.view.state.rungs.answering.holds:
                break
            await asyncio.sleep(pace.rules.interval_s / 2)
        assert w.rungs() == dict.fromkeys(("reachable", "serving", "answering", "admitting", "warm"), True)
        await w.until(lambda view: view.state.rungs.answering.holds is None)
        assert w.view.state.ready
        assert not w.faults
        http.set(healthy=False)
        await w.falls("not_serving", within_s=pace.round_s + EXACT_S)
        http.set(healthy=True)
        await w.ready(within_s=pace.round_s + EXACT_S)
        episode = await w.settled()
        assert (w.faults, w.ends) == ({"engine_reported": 1}, {"resumed": 1})
        assert episode.detail


async def test_retried_by_fault_tolerance(http: FakeHttp, pace: Pace) -> None:
    """An engine falls ill, says until when it waits, and a retry brings it back: one fault, ended as retried."""
    async with Watched(None, pace, http=http.url, gives_up_after_s=GIVES_UP_S) as w:
        await w.ready()
        await w.until(lambda view: len(view.state.evidence.engines) == 2)
        ill_at = time.time()
        http.fall_ill(1, info="NCCL time-out")
        await w.falls("ft_unhealthy", within_s=pace.round_s + EXACT_S)
        assert w.rungs() == {"reachable": True, "serving": True, "admitting": False, "warm": False}
        await w.until(lambda view: bool(view.gives_up_at))
        gives_up_at = dict(w.view.gives_up_at)
        assert list(gives_up_at) == [1]
        assert gives_up_at[1] - ill_at == pytest.approx(GIVES_UP_S, abs=pace.round_s + EXACT_S)
        await w.until(lambda _: bool(w.faults))
        assert dict(w.view.gives_up_at) == gives_up_at, "the time to give up does not move"
        async with AsyncFaultTolerance(http.url) as client:
            (healthy, ill) = await recover_async([client], deadline_s=5, poll_s=0.05)
        well_at = time.time()
        assert (healthy.outcome, ill.outcome) == (RecoveryOutcome.NOT_NEEDED, RecoveryOutcome.RECOVERED)
        await w.ready(within_s=pace.round_s + EXACT_S)
        episode = await w.settled()
        assert (w.faults, w.ends) == ({"ft_unhealthy": 1}, {"retried": 1})
        assert not w.view.gives_up_at
        assert episode.detail == "fault tolerance says an engine is unhealthy"
        assert 0 <= episode.start - ill_at < pace.round_s + EXACT_S
        assert episode.end is not None
        assert abs(episode.end - well_at) < pace.round_s + EXACT_S


async def test_an_engine_that_gave_up(pace: Pace) -> None:
    """Nobody told the engine to retry, and it is dead: still one fault, until another process answers."""
    with FakeHttp(engine_recovery_timeout_s=1.0) as http:
        async with Watched(None, pace, http=http.url, gives_up_after_s=1.0) as w:
            await w.until(lambda view: view.facts is not None and view.state.instance_id is not None)
            http.fall_ill()
            await w.falls("ft_unhealthy")
            await w.falls("ft_dead")
            assert not w.view.gives_up_at
            await asyncio.to_thread(http.stop)
            await w.falls("unreachable")
            http.set(process_start=1_900_000_000.0)
            await asyncio.to_thread(http.restart)
            back = time.monotonic()
            ready = await w.ready()
            assert ready.monotonic - back < RETURN_S
            await w.settled()
            assert (w.faults, w.ends) == ({"ft_unhealthy": 1}, {"replaced": 1})
            assert w.view.state.restarts == 1
            await w.stays(lambda view: view.state.ready, pace.rules.window_s)


async def test_a_fault_of_both_sides_is_one(pace: Pace) -> None:
    """A worker with both servers: fault tolerance says unhealthy, then health says so too; overlapping is one fault."""
    with FakeWorker() as worker, FakeHttp() as http:
        async with Watched(worker.target, pace, http=http.url) as w:
            await w.ready_and_idle()
            http.fall_ill()
            await w.falls("ft_unhealthy")
            worker.die(reported=True)
            await w.falls("not_serving")
            await asyncio.to_thread(worker.restart)
            await asyncio.to_thread(http.restart)
            await w.settled()
            assert (w.faults, w.ends) == ({"ft_unhealthy": 1}, {"replaced": 1})


@on(REAL)
async def test_the_rust_frontend_over_http_alone(build: Callable[..., Rig], pace: Pace) -> None:
    """A genuine frontend that is only known by its URL is a worker like any other; fault tolerance is not offered."""
    rig = build(ranks=2)
    url = HttpConnection.parse(rig.http_url).base
    async with Watched(None, pace, http=url) as w:
        await w.ready()
        await w.until(lambda view: view.metrics is not None)
        assert w.rungs() == {"reachable": True, "serving": True, "warm": False}
        died = await asyncio.to_thread(rig.die, 1)
        fell = await w.falls("not_serving", since=died.monotonic)
        assert fell.monotonic - died.monotonic < pace.round_s + EXACT_S
        back = await asyncio.to_thread(rig.restart)
        ready = await w.ready(since=back.monotonic)
        assert ready.monotonic - back.monotonic < RETURN_S
        await w.settled()
        assert w.faults == {"engine_reported": 1}
        assert not w.view.state.evidence.engines
