"""What a whole fleet says of itself."""

from __future__ import annotations

import time

import pytest

from tests.fleet.conftest import MakeFleet, Start
from vllm_cp import ConfigError, CredentialsRejected, KvEventSource, OutOfTime, WorkerUnreachable
from vllm_cp.discovery import DiscoveredTarget
from vllm_cp.models.health import HealthStatus


async def test_every_fact_of_every_worker(fleet_of: MakeFleet, start: Start) -> None:
    """Health, server, model and event sources, with the identity and pool that discovery gave."""
    plain = start()
    events = start(kv_sources=[KvEventSource(transport="zmq", endpoint="tcp://*:5557", encoding="msgpack")])
    targets = [
        DiscoveredTarget(key="ml/a", target=plain.target, pool="chat"),
        DiscoveredTarget(key="ml/b", target=events.target),
    ]
    async with fleet_of(targets) as fleet:
        before = time.time()
        snapshot = await fleet.snapshot()
    first, second = snapshot
    assert before <= snapshot.as_of <= time.time()
    assert snapshot.complete
    assert len(snapshot) == 2
    assert (first.key, first.pool, first.health) == ("ml/a", "chat", HealthStatus.SERVING)
    assert first.server is not None
    assert first.server.engine_version == "0.33.0"
    assert first.sources == ()
    assert second.sources is not None
    assert second.sources[0].connect_to == "tcp://127.0.0.1:5557"


async def test_a_dead_engine_still_tells_its_facts(fleet_of: MakeFleet, start: Start) -> None:
    """They come from the frontend's memory; the health says what they are worth."""
    worker = start()
    worker.die(reported=True)
    async with fleet_of([worker.target]) as fleet:
        (seen,) = await fleet.snapshot()
    assert seen.health is HealthStatus.NOT_SERVING
    assert seen.server is not None
    assert seen.errors == {}


async def test_unknown_is_none_and_says_why(fleet_of: MakeFleet, start: Start) -> None:
    """A fact that one worker won't tell costs that fact; a worker that isn't there costs all, after one question."""
    partly, down = start(), start()
    partly.fail("GetKvEventSources", "PERMISSION_DENIED", "mesh")
    target = down.target
    down.stop()
    nowhere = DiscoveredTarget(key="ml/a", target=None, problem="no port")
    async with fleet_of([partly.target, target, nowhere]) as fleet:
        snapshot = await fleet.snapshot()
    one, two, three = snapshot
    assert not snapshot.complete
    assert one.model is not None
    assert (one.sources, list(one.errors)) == (None, ["sources"])
    assert isinstance(one.errors["sources"], CredentialsRejected)
    assert (two.health, two.server, two.model, two.sources) == (None, None, None, None)
    assert {type(error) for error in two.errors.values()} == {WorkerUnreachable}
    assert {error.method for error in two.errors.values() if isinstance(error, WorkerUnreachable)} == {"Health.Check"}
    assert {type(error) for error in three.errors.values()} == {ConfigError}
    assert set(two.errors) == set(three.errors) == {"health", "server", "model", "sources"}


async def test_a_deadline_keeps_what_came_before_it(fleet_of: MakeFleet, start: Start) -> None:
    """A worker that falls silent half-way has told half of its facts."""
    worker = start()
    worker.delay("GetModelInfo", 30.0)
    async with fleet_of([worker.target]) as fleet:
        (seen,) = await fleet.snapshot(deadline_s=0.4)
    assert seen.server is not None
    assert (seen.model, seen.sources) == (None, None)
    assert {type(error) for error in seen.errors.values()} == {OutOfTime}
    assert list(seen.errors) == ["model", "sources"]


@pytest.mark.parametrize(("version", "lora"), [("0.28.0", None), ("0.29.0", False)])
async def test_facts_are_read_knowing_the_workers_version(
    fleet_of: MakeFleet, start: Start, version: str, lora: bool | None
) -> None:
    """An unset flag is a no where the version has it, and unknown where it doesn't."""
    async with fleet_of([start(version=version).target]) as fleet:
        (seen,) = await fleet.snapshot()
    assert seen.model is not None
    assert seen.model.supports_lora is lora
