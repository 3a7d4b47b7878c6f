"""Abort, pause, sleep: what happens to generations."""

from __future__ import annotations

import asyncio

import pytest

from tests.contract.conftest import Build, Connect, Running, needs
from tests.contract.rigs import BRIEF_S, aside
from tests.real.waiting import eventually
from vllm_cp import FinishReason, NotAdmitting, OutOfTime, PauseMode, RanksDisagree

Version = tuple[int, int]


async def test_an_aborted_generation_keeps_what_it_had(
    build: Build, connect: Connect, start_generation: Running
) -> None:
    """Abort ends a generation with status OK, reason ABORTED and the text so far; unknown ids are no matter."""
    rig = build()
    client = await connect(rig)
    running = await start_generation(rig, client)
    await client.abort([])
    await client.abort(["nobody"])
    await asyncio.sleep(BRIEF_S)  # some tokens
    assert not running.done()
    await client.abort(["nobody", "mine"])
    await client.abort(["mine"])
    ended = await asyncio.wait_for(running, 5)
    assert ended.finish_reason is FinishReason.ABORTED
    assert 0 < (ended.output_tokens or 0) < 2500
    assert ended.text
    assert ended.prompt_tokens == 5


async def test_generations_of_one_id_are_aborted_together(
    build: Build, connect: Connect, start_generation: Running
) -> None:
    """An id names all generations that were started with it, on whatever rank."""
    rig = build(ranks=2)
    client = await connect(rig)
    running = [await start_generation(rig, client, "same") for _ in range(3)]
    await client.abort(["same"])
    ended = await asyncio.wait_for(asyncio.gather(*running), 5)
    assert {one.finish_reason for one in ended} == {FinishReason.ABORTED}


async def test_a_passed_deadline_stops_the_engine(build: Build, connect: Connect) -> None:
    """A generation whose caller ran out of time does not go on."""
    rig = build()
    client = await connect(rig)
    with pytest.raises(OutOfTime):
        await client.generate("x", max_tokens=2500, timeout_s=BRIEF_S)
    await asyncio.to_thread(eventually, lambda: not rig.running(1), 5.0)


@needs(0, 28)
@pytest.mark.parametrize("mode", list(PauseMode))
async def test_a_paused_worker_takes_nothing_new(
    build: Build, connect: Connect, start_generation: Running, since: Version, mode: PauseMode
) -> None:
    """ABORT ends what runs, WAIT lets it finish, KEEP holds it. New requests queue, or from 0.33 are refused unless
    KEEP; after the resume all is as before."""
    rig = build()
    client = await connect(rig)
    running = await start_generation(rig, client, max_tokens=2500 if mode is not PauseMode.WAIT else 60)
    await client.pause(mode=mode, clear_cache=False)
    assert await client.is_paused() is True
    assert await client.is_sleeping() is True  # although it is only paused
    if mode is PauseMode.KEEP:
        await asyncio.wait([running], timeout=BRIEF_S)
        assert not running.done()
    else:
        ended = (await asyncio.wait_for(running, 5)).finish_reason
        assert ended is (FinishReason.ABORTED if mode is PauseMode.ABORT else FinishReason.LENGTH)
    refused = since >= (0, 33) and mode is not PauseMode.KEEP
    with pytest.raises(NotAdmitting if refused else OutOfTime) as failed:
        await client.generate("x", timeout_s=BRIEF_S)
    if refused:
        assert failed.value.code == "UNAVAILABLE"
        assert failed.value.detail == "Generation is paused. Please retry after it resumes."
    await client.resume()
    assert await client.is_paused() is False
    assert (await client.generate("x")).finish_reason is FinishReason.LENGTH
    if mode is PauseMode.KEEP:
        assert not running.done()
        await client.abort(["mine"])
        assert (await running).finish_reason is FinishReason.ABORTED


@needs(0, 28)
async def test_a_pause_that_ran_out_of_time_has_paused(
    build: Build, connect: Connect, start_generation: Running
) -> None:
    """Pause(WAIT) waits for what runs; a caller who gives up leaves the worker paused, and a resume works."""
    rig = build()
    client = await connect(rig)
    running = await start_generation(rig, client)
    with pytest.raises(OutOfTime):
        await client.pause(mode=PauseMode.WAIT, clear_cache=False, timeout_s=BRIEF_S)
    assert await client.is_paused() is True
    await client.resume()
    assert await client.is_paused() is False
    assert not running.done()
    await client.abort(["mine"])
    await running


@needs(0, 28)
async def test_a_resume_waits_behind_a_pending_pause(build: Build, connect: Connect, start_generation: Running) -> None:
    """While a pause waits for work to finish, other changes wait behind it; questions are answered."""
    rig = build()
    client = await connect(rig)
    running = await start_generation(rig, client)
    pausing = asyncio.ensure_future(client.pause(mode=PauseMode.WAIT, clear_cache=False, timeout_s=20))
    await _until_paused(client)
    with pytest.raises(OutOfTime):
        await client.resume(timeout_s=BRIEF_S)
    with pytest.raises(OutOfTime):
        await client.update_weight_version("v2", timeout_s=BRIEF_S)
    assert await client.weight_version() == "default"
    assert not pausing.done()
    await client.abort(["mine"])
    await asyncio.wait_for(pausing, 5)
    assert (await running).finish_reason is FinishReason.ABORTED
    await client.resume()


@needs(0, 28)
async def test_sleep_and_wake(build: Build, connect: Connect, start_generation: Running) -> None:
    """A sleeping worker is paused too, wakes part by part, and generates once all of it is awake."""
    rig = build(configured=True)
    client = await connect(rig)
    running = await start_generation(rig, client)
    await client.sleep(level=1, mode=PauseMode.ABORT)
    assert (await running).finish_reason is FinishReason.ABORTED
    assert (await client.is_sleeping(), await client.is_paused()) == (True, True)
    with pytest.raises(OutOfTime):
        await client.generate("x", timeout_s=BRIEF_S)
    await client.resume()
    assert (await client.is_sleeping(), await client.is_paused()) == (True, False)
    await client.wake_up(["weights"])
    assert await client.is_sleeping() is True
    await client.wake_up(["kv_cache"])
    assert (await client.is_sleeping(), await client.is_paused()) == (False, False)
    assert (await client.generate("x")).finish_reason is FinishReason.LENGTH
    await client.sleep(level=2, mode=PauseMode.KEEP)
    await client.wake_up()
    assert await client.is_sleeping() is False


@needs(0, 28)
async def test_ranks_may_disagree(build: Build, connect: Connect) -> None:
    """Ranks in different states are told in the server's words, as RanksDisagree: all of them are alive."""
    rig = build(ranks=2)
    client = await connect(rig)
    await aside(lambda: rig.set_rank(1, paused=True, weight_version="other"))
    words = "utility call `{}` returned inconsistent results across engines: {}"
    for verb, text in (
        ("is_paused", "is_paused failed: " + words.format("is_scheduler_paused", "[false, true]")),
        ("is_sleeping", "is_sleeping failed: " + words.format("is_sleeping", "[false, true]")),
        ("weight_version", "get_weight_version failed: " + words.format("get_weight_version", '["default", "other"]')),
    ):
        with pytest.raises(RanksDisagree) as failed:
            await getattr(client, verb)()
        assert (failed.value.code, failed.value.detail) == ("INTERNAL", text)
    await client.resume()
    assert await client.is_paused() is False


async def _until_paused(client: object) -> None:
    for _ in range(100):
        if await client.is_paused():  # type: ignore[attr-defined]
            return
        await asyncio.sleep(0.02)
    pytest.fail("never paused")
