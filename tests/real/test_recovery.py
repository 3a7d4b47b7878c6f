"""Stories that only the genuine frontend can tell: what it does when its own engine dies, when it stands still itself,
when one rank of several goes on working, and what a canary proves where there is no round trip."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.real.stack import Stack, StackFactory
from tests.recovery.pace import EXACT_S, FAST, RETURN_S
from tests.recovery.watched import Watched
from vllm_cp import ControlClient, ControlError, HealthStatus, PauseMode
from vllm_cp.models.ladder import Rung
from vllm_cp_exporter.config import Canary


async def test_a_managed_engine_is_killed(stack: StackFactory) -> None:
    """The frontend's own engine is killed: it may say SERVING for some seconds, then says so or just ends; one fault,
    whichever sign comes first, and a new instance ends it."""
    s = await asyncio.to_thread(lambda: stack(mode="managed"))
    async with Watched(s.target) as w:
        await w.ready_and_idle()
        await asyncio.to_thread(s.kill_engine, 0)
        killed = s.moment("kill-engine")
        fell = await w.falls(since=killed.monotonic)
        assert fell.monotonic - killed.monotonic < max(FAST.silent_within_s, 3.4) + EXACT_S
        assert await asyncio.to_thread(s.wait_exit, 10.0) == 1
        await w.falls("unreachable", since=killed.monotonic)
        await asyncio.to_thread(s.restart)
        served = s.moment("start").wall + s.ready_after
        episode = await w.settled()
        (cause,) = w.faults
        assert cause in {"engine_reported", "engine_silent", "engine_error", "unreachable"}
        assert (w.faults, w.ends) == ({cause: 1}, {"replaced": 1})
        assert episode.end is not None
        assert episode.start - killed.wall < 3.4 + EXACT_S
        assert -EXACT_S < episode.end - served < RETURN_S + EXACT_S


async def test_the_frontend_stands_still(stack: StackFactory) -> None:
    """The frontend itself is frozen: its port accepts and answers nothing. Unreachable since its last answer, and
    resumed when it thaws."""
    s = await asyncio.to_thread(stack)
    async with Watched(s.target) as w:
        await w.ready_and_idle()
        await w.next_round_trip()
        await asyncio.to_thread(s.freeze_frontend)
        frozen = s.moment("freeze")
        fell = await w.falls("unreachable")
        assert fell.monotonic - frozen.monotonic < FAST.silent_within_s + EXACT_S
        await w.until(lambda _: bool(w.faults))
        await asyncio.to_thread(s.thaw_frontend)
        thawed = s.moment("thaw")
        ready = await w.ready(since=thawed.monotonic)
        assert ready.monotonic - thawed.monotonic < RETURN_S
        episode = await w.settled()
        # Where it stood still with a question on its way, and had answered a Check meanwhile, the engines are the first
        # to be missed.
        assert w.faults in ({"unreachable": 1}, {"engine_silent": 1})
        assert w.ends == {"resumed": 1}
        assert w.view.state.restarts == 0
        assert -FAST.round_s - EXACT_S < episode.start - frozen.wall < FAST.round_s + EXACT_S


async def test_one_rank_works_and_the_other_is_gone(stack: StackFactory) -> None:
    """Tokens of the rank that lives prove nothing for the one that was killed: one fault all the same."""
    s = await asyncio.to_thread(lambda: stack(engines=2))
    async with Watched(s.target, http=s.http_url) as w:
        await w.ready_and_idle()
        traffic = [asyncio.create_task(asyncio.to_thread(_generate, s, rank)) for rank in (0, 1)]
        await w.until(lambda view: view.state.evidence.tokens_moved is not None)
        lost = await asyncio.to_thread(s.die, 0, "abrupt")
        fell = await w.falls("engine_silent", "engine_error")
        assert fell.monotonic - lost.monotonic < FAST.silent_within_s + FAST.round_s + EXACT_S
        assert fell.view.state.evidence.health is HealthStatus.SERVING
        moved = w.view.state.evidence.tokens
        await w.until(lambda view: view.state.evidence.tokens > moved)
        await w.until(lambda _: bool(w.faults))
        assert sum(w.faults.values()) == 1
        await asyncio.to_thread(s.kill)
        await asyncio.gather(*traffic)


def _generate(s: Stack, rank: int) -> None:
    """Tokens on one rank until the frontend is gone."""
    with ControlClient(s.target) as client:
        try:
            client.generate("hello", max_tokens=3500, rank=rank, timeout_s=60.0)
        except ControlError:
            return


@pytest.mark.parametrize("mode", [Canary.ALWAYS, Canary.ONCE])
async def test_a_canary_on_the_oldest_version(stack: StackFactory, mode: Canary) -> None:
    """On 0.27 a canary is all that proves answering: always, it goes on proving it; once, it proves warm and no more.
    Only a worker that is idle by its own page gets one."""
    s = await asyncio.to_thread(stack, "0.27.0")
    async with Watched(s.target, http=s.http_url, canary=mode) as w:
        await w.until(lambda view: view.state.rungs.warm.holds)
        assert w.rungs() == {rung.value: True for rung in Rung}
        assert w.view.state.rungs.answering.proof in {"canary", "tokens"}
        since = time.monotonic()
        if mode is Canary.ALWAYS:
            await w.stays(lambda view: view.state.rungs.answering.holds, 2 * FAST.silent_within_s)
            assert _canaries(s) > 2
        else:
            await w.until(lambda view: view.state.rungs.answering.holds is None, since=since)
            assert w.rungs() == {"reachable": True, "serving": True, "warm": True}
            assert _canaries(s) == 1
        assert w.view.state.ready
        assert not w.faults


def _asked(s: Stack) -> list[str]:
    """The ids of the generations that the engine was asked for."""
    return [message["request_id"] for message in s.received() if message["kind"] == "add"]


def _canaries(s: Stack) -> int:
    """How many of them were ours; here, all."""
    asked = _asked(s)
    assert all("vllm-cp-canary" in request_id for request_id in asked)
    return len(asked)


async def test_no_canary_for_the_busy_or_the_suspended(stack: StackFactory) -> None:
    """A worker that works, or that is paused, gets no canary: tokens of others prove the same, and a pause is meant."""
    s = await asyncio.to_thread(stack)
    async with Watched(s.target, http=s.http_url, canary=Canary.ALWAYS) as w:
        with ControlClient(s.target) as client:
            await asyncio.to_thread(lambda: client.pause(mode=PauseMode.ABORT, clear_cache=False))
            await w.falls("suspended")
            before = _canaries(s)
            await w.stays(lambda view: not view.state.ready, 5 * FAST.rules.interval_s)
            assert _canaries(s) == before
            await asyncio.to_thread(client.resume)
            await w.ready()
            # Somebody else's request is running: until it is done, nothing more is sent.
            await w.until(lambda view: "canary" in view.proofs)
            mine = asyncio.create_task(asyncio.to_thread(_ask_for, client, 150))
            await w.until(lambda view: view.metrics is not None and bool(view.metrics.running))
            sent = len(_asked(s))
            await w.stays(lambda view: view.state.ready, 4 * FAST.rules.interval_s)
            assert len(_asked(s)) == sent
            await mine
        assert not w.faults


def _ask_for(client: ControlClient, tokens: int) -> None:
    client.generate("hello", max_tokens=tokens, request_id="mine", timeout_s=30)
