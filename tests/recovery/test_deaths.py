"""Deaths, silences and outages: one fault each, with the right cause, end and length."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from tests.recovery.pace import EXACT_S, FAST, RETURN_S, WORD_S, Pace, both_paces
from tests.recovery.rigs import FAKE, REAL, REAL_OLD, RealRig, Rig, on
from tests.recovery.watched import Watched
from tests.recovery.word import NOT_SERVING, Word
from vllm_cp import HealthStatus
from vllm_cp.models.episode import EndKind, Episode

Build = Callable[..., Rig]


@on(FAKE, REAL, REAL_OLD)
async def test_reported_death(build: Build, pace: Pace) -> None:
    """One of two ranks reports its death: not ready at the server's word, and one fault until another instance serves.

    (B17 A: a new word, a broken stream, a closed port and a new instance are one fault.)
    """
    rig = build(ranks=2)
    async with Watched(rig.target, pace) as w:
        await w.ready_and_idle()
        with Word(rig.target) as word:
            died = await asyncio.to_thread(rig.die, 1)
            # A question that was on its way to the engines may come back with their error first.
            fell = await w.falls("not_serving", "engine_error", since=died.monotonic)
            said = await asyncio.to_thread(word.heard, NOT_SERVING)
        assert fell.monotonic - said < WORD_S
        assert fell.view.state.open_fault is not None
        assert not w.faults, "a cause is not counted before the window is over"
        await w.until(lambda _: bool(w.faults))
        back = await asyncio.to_thread(rig.restart)
        episode = await w.settled()
        assert w.faults in ({"engine_reported": 1}, {"engine_error": 1})
        assert w.ends == {"replaced": 1}
        assert [episode.cause.value] == list(w.faults)
        assert episode.kind is EndKind.REPLACED
        assert w.view.state.restarts == 1
        assert_spans(episode, died.wall, back.wall, late_s=RETURN_S)


@on(FAKE, REAL)
async def test_hard_kill_of_one_of_two_ranks(build: Build, pace: Pace) -> None:
    """One of two ranks is killed hard and nobody says so: health is SERVING for ever, and the worker is not ready."""
    rig = build(ranks=2, processes=True)
    async with Watched(rig.target, pace) as w:
        await w.ready_and_idle()
        lost = await asyncio.to_thread(rig.lose, 0)
        fell = await w.falls("engine_silent", "engine_error", since=lost.monotonic)
        assert fell.monotonic - lost.monotonic < pace.silent_within_s + EXACT_S
        assert fell.view.state.evidence.health is HealthStatus.SERVING
        await w.until(lambda _: bool(w.faults))
        await w.stays(lambda view: view.state.evidence.health is HealthStatus.SERVING, 2 * pace.rules.interval_s)
        back = await asyncio.to_thread(rig.restart)
        episode = await w.settled()
        assert w.faults in ({"engine_silent": 1}, {"engine_error": 1})
        assert w.ends == {"replaced": 1}
        assert_spans(episode, lost.wall, back.wall, early_s=pace.round_s, late_s=RETURN_S)


@on(REAL_OLD)
async def test_hard_kill_on_the_oldest_version(build: Build, pace: Pace) -> None:
    """vLLM 0.27 has no round trip: whether engines answer is unknown there, never false, and ready means serving."""
    rig = build(ranks=2)
    async with Watched(rig.target, pace) as w:
        await w.ready_and_idle()
        await w.until(lambda view: view.state.evidence.round_trips_unsupported)
        assert w.rungs() == {"reachable": True, "serving": True}
        await asyncio.to_thread(rig.lose, 0)
        await w.stays(lambda view: view.state.ready, pace.silent_within_s + pace.rules.interval_s)
        assert w.rungs() == {"reachable": True, "serving": True}
        assert not w.faults


@both_paces
@on(FAKE, REAL)
async def test_hung_and_resumed(build: Build, pace: Pace) -> None:
    """An engine hangs and goes on: not ready although health says SERVING, and one fault that ends as resumed."""
    rig = build(ranks=2)
    async with Watched(rig.target, pace) as w:
        await w.ready_and_idle()
        # The worst phase: the next question is a whole interval away.
        await w.next_round_trip()
        hung = await asyncio.to_thread(rig.hang)
        fell = await w.falls("engine_silent", within_s=2 * pace.silent_within_s, since=hung.monotonic)
        assert fell.monotonic - hung.monotonic < pace.silent_within_s + EXACT_S
        assert fell.view.state.evidence.health is HealthStatus.SERVING
        await w.until(lambda _: bool(w.faults))
        on_again = await asyncio.to_thread(rig.unhang)
        ready = await w.ready(since=on_again.monotonic)
        assert ready.monotonic - on_again.monotonic < EXACT_S
        episode = await w.settled()
        assert (w.faults, w.ends) == ({"engine_silent": 1}, {"resumed": 1})
        # It began, as far as anybody can know, with the first question that was not answered.
        assert_spans(episode, hung.wall, on_again.wall, early_s=pace.round_s)


@both_paces
@on(FAKE, REAL)
async def test_killed_and_restarted(build: Build, pace: Pace) -> None:
    """A frontend is killed and comes back as another instance: one fault; the return is seen within 2.5 s of it."""
    rig = build()
    async with Watched(rig.target, pace) as w:
        await w.ready_and_idle()
        killed = await asyncio.to_thread(rig.kill)
        fell = await w.falls("unreachable", since=killed.monotonic)
        assert fell.monotonic - killed.monotonic < EXACT_S
        assert w.view.facts.server is None, "a dead worker keeps its state and loses its facts"
        short = pace is FAST and not isinstance(rig, RealRig)
        await w.stays(lambda view: not view.state.ready, 1.0 if short else pace.outage_s)
        back = await asyncio.to_thread(rig.restart)
        ready = await w.ready()
        assert ready.monotonic - back.monotonic < RETURN_S
        episode = await w.settled()
        assert (w.faults, w.ends) == ({"unreachable": 1}, {"replaced": 1})
        assert w.view.state.restarts == 1
        assert_spans(episode, killed.wall, back.wall, late_s=RETURN_S)
        await w.until(lambda view: view.facts.server is not None)


@on(FAKE, REAL)
async def test_sigterm_without_a_drain(build: Build, pace: Pace) -> None:
    """SIGTERM without a drain looks like a death: one fault, unless the target is taken away in the window."""
    rig = build()
    async with Watched(rig.target, pace) as w:
        await w.ready_and_idle()
        await w.listening()
        ended = await asyncio.to_thread(rig.terminate)
        fell = await w.falls("not_serving", "unreachable", since=ended.monotonic)
        assert fell.monotonic - ended.monotonic < EXACT_S
        back = await asyncio.to_thread(rig.restart)
        episode = await w.settled()
        # The two signals race.
        assert w.faults in ({"engine_reported": 1}, {"unreachable": 1})
        assert w.ends == {"replaced": 1}
        assert_spans(episode, ended.wall, back.wall, late_s=RETURN_S)
        await w.ready_and_idle()
        before = w.faults
        await asyncio.to_thread(rig.terminate)
        await w.falls()
        w.watcher.observer.feed(removed=True)
        assert (w.faults, w.ends) == (before, {"replaced": 1, "planned": 1})


def assert_spans(episode: Episode, start: float, end: float, *, early_s: float = 0.0, late_s: float = 0.0) -> None:
    """The episode began and ended when the simulator says so. ``early_s``: how long a beginning may go unseen,
    ``late_s``: how long an end may."""
    assert episode.end is not None
    assert episode.duration_s is not None
    assert -EXACT_S < episode.start - start < EXACT_S + early_s
    assert -EXACT_S < episode.end - end < EXACT_S + late_s
    assert -EXACT_S - early_s < episode.duration_s - (end - start) < EXACT_S + late_s
    assert time.time() >= episode.end
