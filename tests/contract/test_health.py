"""How workers fall over, and what their clients see of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.contract.conftest import Build, Connect, Running, needs
from tests.contract.rigs import BRIEF_S, aside
from vllm_cp import (
    EngineFailed,
    FinishReason,
    HealthStatus,
    NotFound,
    OutOfTime,
    PauseMode,
    WorkerUnreachable,
)

Version = tuple[int, int]
NAMES = ("", "vllm.Inference", "vllm.Control")
SERVING, NOT_SERVING = HealthStatus.SERVING, HealthStatus.NOT_SERVING
FATAL = "engine core reported fatal failure"


async def news(watch: AsyncIterator[HealthStatus]) -> HealthStatus:
    """The next status, if it comes soon."""
    return await asyncio.wait_for(anext(watch), 5)


async def test_three_names_are_known(build: Build, connect: Connect) -> None:
    """Check and Watch know three names; any other is no service."""
    client = await connect(build())
    for name in NAMES:
        assert await client.check(name) is SERVING
        assert await news(client.watch(name)) is SERVING
    assert await client.check("nope") is HealthStatus.SERVICE_UNKNOWN
    with pytest.raises(NotFound, match="service not registered"):
        await news(client.watch("nope"))


@pytest.mark.parametrize("rank", [None, 1])
async def test_a_reported_death_is_final(
    build: Build, connect: Connect, start_generation: Running, since: Version, rank: int | None
) -> None:
    """An engine that reports its death, be it one of two, takes health down for good; the frontend lives on."""
    rig = build(ranks=2)
    client = await connect(rig)
    watches = [client.watch(name, check_every_s=0.1) for name in NAMES]
    assert [await news(watch) for watch in watches] == [SERVING] * 3
    running = await start_generation(rig, client)
    await aside(lambda: rig.die(reported=True, rank=rank))
    assert [await news(watch) for watch in watches] == [NOT_SERVING] * 3
    with pytest.raises(EngineFailed) as ended:
        await running
    assert (ended.value.code, ended.value.detail) == ("INTERNAL", f"engine-core error: {FATAL}")
    assert [await client.check(name) for name in NAMES] == [NOT_SERVING] * 3
    # What the frontend has in its memory it still tells.
    await client.server_info()
    await client.model_info()
    await client.kv_event_sources()
    await client.abort(["nobody"])
    with pytest.raises(EngineFailed, match=FATAL):
        await client.generate("x")
    if since >= (0, 28):
        for verb in ("is_paused", "is_sleeping"):
            with pytest.raises(EngineFailed) as failed:
                await getattr(client, verb)()
            assert failed.value.detail == f"{verb} failed: {FATAL}"
        with pytest.raises(EngineFailed, match=f"resume_generation failed: {FATAL}"):
            await client.resume()
    # The watch stays open.
    waiting = asyncio.ensure_future(anext(watches[0]))
    done, _ = await asyncio.wait([waiting], timeout=BRIEF_S)
    assert not done
    await client.close()
    await asyncio.gather(waiting, return_exceptions=True)


async def test_a_silent_death_goes_unnoticed(build: Build, connect: Connect, since: Version) -> None:
    """An engine that vanishes leaves health SERVING; only what needs the engine gets no answer."""
    rig = build()
    client = await connect(rig)
    watch = client.watch()
    assert await news(watch) is SERVING
    await aside(lambda: rig.die(reported=False))
    if since >= (0, 28):
        with pytest.raises(OutOfTime if not rig.genuine else (OutOfTime, EngineFailed)):
            await client.is_paused(timeout_s=BRIEF_S)
    else:
        with pytest.raises(OutOfTime):
            await client.generate("x", timeout_s=BRIEF_S)
    assert await client.check() is SERVING
    await client.server_info()
    await client.abort(["nobody"])


@needs(0, 28)
async def test_one_silent_death_of_two_blocks_round_trips_only(build: Build, connect: Connect) -> None:
    """With one rank of two gone, what asks every engine gets no answer, and generations go on on the other."""
    rig = build(ranks=2)
    client = await connect(rig)
    await aside(lambda: rig.die(reported=False, rank=1))
    with pytest.raises((OutOfTime, EngineFailed)):
        await client.is_paused(timeout_s=BRIEF_S)
    assert (await client.generate("x", rank=0)).finish_reason is FinishReason.LENGTH
    assert await client.check() is SERVING


async def test_a_hung_engine_serves_and_does_not_answer(build: Build, connect: Connect, since: Version) -> None:
    """A frozen engine leaves health SERVING, holds what needs it, and answers after the thaw."""
    rig = build()
    client = await connect(rig)
    await aside(rig.hang)
    with pytest.raises(OutOfTime):
        await client.generate("x", timeout_s=BRIEF_S)
    if since >= (0, 28):
        with pytest.raises(OutOfTime):
            await client.is_paused(timeout_s=BRIEF_S)
    assert await client.check() is SERVING
    await client.server_info()
    pending = asyncio.ensure_future(client.generate("x", timeout_s=20))
    done, _ = await asyncio.wait([pending], timeout=BRIEF_S)
    assert not done
    await aside(rig.unhang)
    assert (await pending).finish_reason is FinishReason.LENGTH
    if since >= (0, 28):
        assert await client.is_paused() is False


@needs(0, 28)
async def test_one_hung_rank_is_enough(build: Build, connect: Connect) -> None:
    """A round trip needs every rank; a generation needs its own only."""
    rig = build(ranks=2)
    client = await connect(rig)
    await aside(lambda: rig.hang(1))
    with pytest.raises(OutOfTime):
        await client.is_paused(timeout_s=BRIEF_S)
    assert (await client.generate("x", rank=0)).finish_reason is FinishReason.LENGTH
    with pytest.raises(OutOfTime):
        await client.generate("x", rank=1, timeout_s=BRIEF_S)
    await aside(rig.unhang)
    assert await client.is_paused() is False


@needs(0, 28)
async def test_a_change_out_of_time_happens_all_the_same(build: Build, connect: Connect) -> None:
    """What a hung engine was told it does after the thaw, although the caller was told that time ran out."""
    rig = build()
    client = await connect(rig)
    await aside(rig.hang)
    with pytest.raises(OutOfTime):
        await client.pause(mode=PauseMode.KEEP, clear_cache=False, timeout_s=BRIEF_S)
    with pytest.raises(OutOfTime):
        await client.update_weight_version("v9", timeout_s=BRIEF_S)
    await aside(rig.unhang)
    assert await client.is_paused() is True
    assert await client.weight_version() == "v9"


async def test_a_drain_lets_running_work_finish(build: Build, connect: Connect, start_generation: Running) -> None:
    """A draining worker ends its watches after NOT_SERVING, finishes what runs, and answers nobody new."""
    rig = build(drain_s=20)
    client = await connect(rig)
    watch = client.watch()
    assert await news(watch) is SERVING
    running = await start_generation(rig, client, max_tokens=70)
    await aside(rig.drain)
    assert await news(watch) is NOT_SERVING
    with pytest.raises(StopAsyncIteration):
        await news(watch)
    with pytest.raises(OutOfTime):
        await client.server_info(timeout_s=BRIEF_S)
    assert (await running).finish_reason is FinishReason.LENGTH
    await _gone(client)


async def test_a_stop_breaks_everything_off(build: Build, connect: Connect) -> None:
    """Without a drain a watch may hear NOT_SERVING, or just break; then nobody is there."""
    rig = build()
    client = await connect(rig)
    watch = client.watch()
    assert await news(watch) is SERVING
    await aside(rig.stop)
    try:
        assert await news(watch) is NOT_SERVING
        with pytest.raises((StopAsyncIteration, WorkerUnreachable)):
            await news(watch)
    except WorkerUnreachable:
        pass
    with pytest.raises(WorkerUnreachable):
        await client.server_info(timeout_s=1)


async def test_a_new_process_is_a_new_instance(build: Build, connect: Connect) -> None:
    """Recovery is a new process on the same address with another instance id; the same client finds it."""
    rig = build()
    client = await connect(rig)
    first = (await client.server_info()).instance_id
    await aside(lambda: rig.die(reported=True))
    await aside(rig.restart)
    for _ in range(100):
        try:
            second = await client.server_info()
            break
        except WorkerUnreachable:
            await asyncio.sleep(0.05)
    assert second.instance_id not in (None, first)
    assert await client.check() is SERVING
    assert (await client.generate("x")).finish_reason is FinishReason.LENGTH


async def test_a_frozen_frontend_is_noticed(build: Build, connect: Connect) -> None:
    """A frontend that stands still is OutOfTime for calls and, within four intervals, for watches; then it thaws."""
    rig = build()
    client = await connect(rig)
    watch = client.watch(check_every_s=0.1)
    assert await news(watch) is SERVING
    await aside(rig.freeze)
    try:
        with pytest.raises(OutOfTime):
            await client.check(timeout_s=BRIEF_S)
        with pytest.raises(OutOfTime):
            await asyncio.wait_for(anext(watch), 2)
    finally:
        await aside(rig.thaw)
    assert await client.check() is SERVING


async def _gone(client: object) -> None:
    """Return once nobody listens any more; a drain that is about to end may still hang a call."""
    for _ in range(40):
        try:
            await client.server_info(timeout_s=0.25)  # type: ignore[attr-defined]
        except OutOfTime:
            continue
        except WorkerUnreachable:
            return
    pytest.fail("the worker is still there")
