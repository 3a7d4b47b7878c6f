"""Changes in a fleet as they happen."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest

from tests.discovery.following import until
from tests.fleet.conftest import MakeFleet, Start
from vllm_cp import ConfigError, CredentialsRejected, OutOfTime, TlsFailed, WorkerUnreachable
from vllm_cp._fleet.changes import Pace, WorkerWatch
from vllm_cp.discovery import DiscoveredTarget, StaticDiscoverer
from vllm_cp.fleet import HealthChanged, InstanceChanged, WorkerAdded, WorkerChanged, WorkerRemoved
from vllm_cp.models.health import HealthStatus

SERVING, NOT_SERVING = HealthStatus.SERVING, HealthStatus.NOT_SERVING


async def test_it_begins_with_who_is_there_and_how_they_are(fleet_of: MakeFleet, start: Start) -> None:
    """One WorkerAdded and one HealthChanged per worker, dead ones and those without an address included."""
    good, down = start(), start()
    target = down.target
    down.stop()
    nowhere = DiscoveredTarget(key="ml/a", target=None, problem="no port")
    async with fleet_of([good.target, target, nowhere]).watching() as changes:
        await changes.until(lambda: len(changes.of(HealthChanged)) == 3)
        assert [change.key for change in changes.of(WorkerAdded)] == [good.target, target, "ml/a"]
        (first,), (second,), (third,) = (changes.of(HealthChanged, key) for key in (good.target, target, "ml/a"))
        assert (first.was, first.now, first.error) == (None, SERVING, None)
        assert (second.now, type(second.error)) == (None, WorkerUnreachable)
        assert (third.now, type(third.error)) == (None, ConfigError)
        assert changes.of(InstanceChanged) == []


async def test_a_reported_death_and_a_new_instance(fleet_of: MakeFleet, start: Start) -> None:
    """NOT_SERVING when the engine says so, no answer when the process is gone, then another instance."""
    worker = start()
    key = worker.target
    async with fleet_of([key]).watching() as changes:
        await changes.until(lambda: len(changes.of(HealthChanged)) == 1)
        await until(lambda: len([call for call in worker.calls if call.method.endswith("GetServerInfo")]) == 1)
        worker.die(reported=True)
        await changes.until(lambda: len(changes.of(HealthChanged)) == 2)
        worker.restart(instance_id="second")
        await changes.until(lambda: bool(changes.of(InstanceChanged)))
        seen = [(change.was, change.now) for change in changes.of(HealthChanged)]
        assert seen == [(None, SERVING), (SERVING, NOT_SERVING), (NOT_SERVING, None), (None, SERVING)]
        (instance,) = changes.of(InstanceChanged)
        assert instance.now == "second"
        assert instance.was != "second"


async def test_who_joins_moves_and_leaves(fleet_of: MakeFleet, start: Start) -> None:
    """Discovery's changes come in the same stream; a worker that left is heard of no more."""
    first, second, third = start(), start(), start()

    def worker(key: str, target: str, **fields: Any) -> DiscoveredTarget:
        return DiscoveredTarget(key=key, target=target, **fields)

    source = StaticDiscoverer([worker("a", first.target)])
    async with fleet_of(source).watching() as changes:
        await changes.until(lambda: len(changes.of(HealthChanged)) == 1)
        source.replace([worker("a", first.target), worker("b", second.target)])
        await changes.until(lambda: len(changes.of(HealthChanged, "b")) == 1)
        second.health("NOT_SERVING")
        await changes.until(lambda: len(changes.of(HealthChanged, "b")) == 2)
        source.replace([worker("a", first.target, pool="chat"), worker("b", third.target)])
        await changes.until(lambda: len(changes.of(WorkerChanged)) == 2)
        relabelled, moved = changes.of(WorkerChanged)
        assert (relabelled.was.pool, relabelled.target.pool) == ("default", "chat")
        assert (moved.was.target, moved.target.target) == (second.target, third.target)
        await changes.until(lambda: bool(changes.of(InstanceChanged, "b")))  # another instance at the new address
        assert [change.now for change in changes.of(HealthChanged, "b")] == [SERVING, NOT_SERVING, SERVING]
        source.replace([worker("b", third.target)])
        await changes.until(lambda: bool(changes.of(WorkerRemoved, "a")))
        first.stop()
        third.health("NOT_SERVING")
        await changes.until(lambda: len(changes.of(HealthChanged, "b")) == 4)
        assert len(changes.of(HealthChanged, "a")) == 1
        assert changes.of(WorkerRemoved, "a")[0].target.pool == "chat"
    assert len([call for call in first.calls if call.method.endswith("Watch")]) == 1


async def test_it_ends_with_the_fleet_and_leaves_nothing(fleet_of: MakeFleet, start: Start) -> None:
    """No thread, no stream, no exception."""
    workers = [start() for _ in range(3)]
    async with fleet_of([worker.target for worker in workers]).watching() as changes:
        await changes.until(lambda: len(changes.of(HealthChanged)) == 3)
    assert changes.ended
    await until(
        lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("vllm-cp-fleet-watch")]
    )


async def test_a_defect_of_the_source_ends_it_loudly(start: Start) -> None:
    """A watch that silently stood still would be taken for a quiet fleet."""
    from collections.abc import AsyncIterator

    from tests.fleet.both import BothFleet
    from vllm_cp.discovery import DiscoveryStatus, TargetSet

    class Broken:
        name, status = "broken", DiscoveryStatus()

        async def stream(self) -> AsyncIterator[TargetSet]:
            yield TargetSet()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        async with BothFleet("async", Broken()).watching() as changes:
            await until(lambda: changes.ended)


class Hands:
    """A clock set by hand."""

    def __init__(self) -> None:
        self.time = 0.0

    def watch(self) -> WorkerWatch:
        target = DiscoveredTarget(key="a:1", target="a:1")
        return WorkerWatch(target, wall=lambda: self.time, now=lambda: self.time, jitter=lambda: 0.5)


def test_pauses_grow_with_the_outage() -> None:
    """Within 2 s in the first minute, then every 10 s; a minute where only a person can help."""
    clock = Hands()
    watch = clock.watch()
    down = WorkerUnreachable("a:1", "Health.Watch", "UNAVAILABLE")
    watch.lost(down)
    assert watch.pause_s() == 1.5
    clock.time = 61.0
    assert watch.lost(down) is None
    assert watch.pause_s() == 10.0
    watch.said(SERVING)
    watch.lost(down)
    assert watch.pause_s() == 1.5
    for error in (TlsFailed, CredentialsRejected):
        watch.lost(error("a:1", "Health.Watch", "UNAVAILABLE"))
        assert watch.pause_s() == 60.0
    watch.moved(replace(watch.target, target="b:1"))
    watch.lost(down)
    assert watch.pause_s() == 1.5


def test_only_news_is_a_change() -> None:
    """The same word again, the same kind of failure again, the first instance: none of these is."""
    watch = Hands().watch()
    down = WorkerUnreachable("a:1", "Health.Watch", "UNAVAILABLE")
    assert watch.lost(down) is not None
    assert watch.lost(down) is None
    assert watch.lost(OutOfTime("a:1", "Health.Check", "DEADLINE_EXCEEDED")) is not None
    assert watch.said(SERVING) is not None
    assert watch.said(SERVING) is None
    assert watch.lost(None) is not None
    assert watch.instance("one") is None
    assert watch.instance(None) is None
    assert watch.instance("one") is None
    assert watch.instance("two") is not None


def test_watches_are_opened_at_a_bounded_pace() -> None:
    """A hundred a second, however many are asked for at once; idle time is not saved up."""
    time = 0.0
    pace = Pace(100, now=lambda: time)
    assert [round(pace.turn_s(), 3) for _ in range(4)] == [0.0, 0.01, 0.02, 0.03]
    time = 100.0
    assert [round(pace.turn_s(), 3) for _ in range(2)] == [0.0, 0.01]
