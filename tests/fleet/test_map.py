"""One question to many workers."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.certs import make_certs
from tests.discovery.following import until
from tests.fleet.conftest import MakeFleet, Start
from vllm_cp import ClientClosed, ConfigError, Connection, OutOfTime, Tls, TlsFailed, WorkerUnreachable
from vllm_cp.discovery import DiscoveredTarget, StaticDiscoverer
from vllm_cp.fleet import AsyncFleet, Fleet, Outcome
from vllm_cp.testing import FakeFleet, TlsFiles


def info(worker: Any) -> Any:
    return worker.server_info()


@pytest.fixture
def nobody() -> Any:
    """A target that refuses connections."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{held.getsockname()[1]}"


async def test_one_outcome_per_worker_in_the_order_given(fleet_of: MakeFleet, start: Start) -> None:
    """Values and errors stand side by side: a dead worker and a broken one hide nobody."""
    good, broken, named = start(), start(), start()
    broken.fail("GetServerInfo", "INTERNAL", "boom")
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{held.getsockname()[1]}"
        async with fleet_of([nobody, good.target, broken.target, f"named={named.target}"]) as fleet:
            outcomes = await fleet.map(info)
    assert [one.key for one in outcomes] == [nobody, good.target, broken.target, "named"]
    assert [one.ok for one in outcomes] == [False, True, False, True]
    assert [one.target for one in outcomes][3] == named.target
    assert isinstance(outcomes[0].error, WorkerUnreachable)
    assert outcomes[1].unwrap().engine_version == "0.33.0"
    with pytest.raises(type(outcomes[2].error or Exception()), match="boom"):
        outcomes[2].unwrap()


async def test_each_worker_is_asked_once_over_a_connection_that_is_kept(fleet_of: MakeFleet, start: Start) -> None:
    """The second round finds the clients of the first."""
    workers = [start(), start()]
    async with fleet_of([worker.target for worker in workers]) as fleet:
        before = [fleet.fleet.client(worker.target) for worker in workers]
        for _ in range(3):
            assert all(one.ok for one in await fleet.map(info))
        assert [fleet.fleet.client(worker.target) for worker in workers] == before
    assert [len(worker.calls) for worker in workers] == [3, 3]


async def test_a_deadline_holds_for_all(fleet_of: MakeFleet, start: Start) -> None:
    """What is finished then is kept, what isn't is out of time, and nobody waits for the silent ones."""
    quick, slow = start(), start()
    slow.delay("GetServerInfo", 30.0)
    async with fleet_of([slow.target, quick.target]) as fleet:
        began = time.monotonic()
        late, good = await fleet.map(info, deadline_s=0.3)
        assert time.monotonic() - began < 2.0
    assert good.ok
    assert isinstance(late.error, OutOfTime)
    assert "not finished within 0.3 s" in str(late.error)


async def test_who_was_not_even_asked_is_told_apart(fleet_of: MakeFleet, start: Start) -> None:
    """One at a time, and the first takes it all."""
    slow, other = start(), start()
    slow.delay("GetServerInfo", 30.0)
    async with fleet_of([slow.target, other.target]) as fleet:
        late, unasked = await fleet.map(info, deadline_s=0.3, at_once=1)
    assert "not finished" in str(late.error)
    assert "not asked within 0.3 s" in str(unasked.error)
    assert other.calls == []


async def test_no_more_are_asked_at_once_than_allowed(fleet_of: MakeFleet, start: Start, colour: str) -> None:
    """The bound is exact, and used."""
    worker, count, lock = start(), 0, threading.Lock()
    peak: list[int] = []

    def enter(by: int) -> None:
        nonlocal count
        with lock:
            count += by
            peak.append(count)

    def ask(client: Any) -> Any:
        enter(1)
        try:
            return client.server_info()
        finally:
            enter(-1)

    async def ask_async(client: Any) -> Any:
        enter(1)
        try:
            return await client.server_info()
        finally:
            enter(-1)

    worker.delay("GetServerInfo", 0.02)
    async with fleet_of([f"w{number}={worker.target}" for number in range(12)]) as fleet:
        outcomes = await fleet.map(ask if colour == "sync" else ask_async, at_once=3)
    assert all(one.ok for one in outcomes)
    assert max(peak) == 3


@pytest.mark.parametrize("defect", [TypeError("no such argument"), KeyError("x"), ZeroDivisionError()])
async def test_a_defect_of_the_function_is_raised(fleet_of: MakeFleet, start: Start, defect: Exception) -> None:
    """A programming error isn't something that a worker did: it stops the round and says at which worker it was."""
    worker = start()

    def ask(client: Any) -> Any:
        raise defect

    async with fleet_of([worker.target]) as fleet:
        with pytest.raises(type(defect)) as raised:
            await fleet.map(ask)
        assert any(worker.target in note for note in getattr(raised.value, "__notes__", [worker.target]))
        assert (await fleet.map(info))[0].ok


async def test_what_the_world_does_to_a_function_is_an_outcome(fleet_of: MakeFleet, start: Start) -> None:
    """A function may do more than call the worker; files and sockets fail too."""

    def ask(client: Any) -> Any:
        raise ConnectionResetError("of something else")

    async with fleet_of([start().target]) as fleet:
        (only,) = await fleet.map(ask)
    assert isinstance(only.error, ConnectionResetError)


async def test_a_worker_that_cannot_be_reached_for_a_reason_of_ours(
    fleet_of: MakeFleet, start: Start, tmp_path: Path
) -> None:
    """A bad address or a missing token is that worker's outcome, and is tried anew each time."""
    token, worker = tmp_path / "token", start()
    bad = DiscoveredTarget(key="ml/a", target=None, problem="no port")
    from vllm_cp.discovery import Overrides

    late = DiscoveredTarget(key="ml/b", target=worker.target, overrides=Overrides(token_file=token))
    async with fleet_of([bad, late], connection=Connection(insecure_token=True)) as fleet:
        outcomes = await fleet.map(info)
        assert [type(one.error) for one in outcomes] == [ConfigError, ConfigError]
        assert "ml/a: no port" in str(outcomes[0].error)
        assert outcomes[0].target is None
        token.write_text("secret")
        assert [one.ok for one in await fleet.map(info)] == [False, True]
    assert ("authorization", "Bearer secret") in worker.calls[-1].metadata


async def test_tls_on_one_side_only(fleet_of: MakeFleet, start: Start, tmp_path: Path) -> None:
    """Each kind of mismatch is told for its own worker; there is no silent fall-back to plaintext."""
    certs = make_certs(tmp_path, ["worker.internal"])
    secure, plain = start(tls=TlsFiles(cert=certs.server_cert, key=certs.server_key)), start()
    async with fleet_of([secure.target, plain.target]) as fleet:
        refused, good = await fleet.map(info)
        assert isinstance(refused.error, TlsFailed)
        assert good.ok
    tls = Tls(ca_file=certs.ca)
    async with fleet_of([secure.target, plain.target], connection=Connection(tls=tls)) as fleet:
        misnamed, refused = await fleet.map(info)
        assert isinstance(misnamed.error, TlsFailed)
        assert isinstance(refused.error, TlsFailed)
    async with fleet_of([secure.target], connection=Connection(tls=tls, server_name="worker.internal")) as fleet:
        assert (await fleet.map(info))[0].ok


async def test_proxy_variables_do_not_reach_the_workers(
    fleet_of: MakeFleet, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers are reached directly, whatever the company's machine has in its environment."""
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    async with fleet_of([start().target]) as fleet:
        assert (await fleet.map(info))[0].ok


async def test_ipv6_workers(fleet_of: MakeFleet, start: Start) -> None:
    """Bracketed addresses work, and are one worker however they are spelled."""
    worker = start(host="::1")
    async with fleet_of([worker.target.replace("::1", "0:0::1")]) as fleet:
        (only,) = await fleet.map(info)
    assert only.ok
    assert only.key == worker.target


async def test_connections_can_be_given_whole(fleet_of: MakeFleet, start: Start) -> None:
    """Then they are used as they are."""
    worker = start()
    async with fleet_of([Connection(target=worker.target, timeout_s=7.0)], connection=Connection(timeout_s=1.0)) as f:
        assert (await f.map(info))[0].ok
    assert 6.0 < (worker.calls[0].deadline_s or 0) < 7.5


async def test_an_empty_fleet_has_no_outcomes(fleet_of: MakeFleet) -> None:
    """And that is all there is to it."""
    async with fleet_of([]) as fleet:
        assert await fleet.map(info, deadline_s=1.0) == []


@pytest.mark.parametrize("bounds", [{"deadline_s": 0.0}, {"deadline_s": -1.0}, {"at_once": 0}])
async def test_bounds_that_bound_nothing_are_refused(fleet_of: MakeFleet, bounds: dict[str, Any]) -> None:
    """Before anybody is asked."""
    async with fleet_of([]) as fleet:
        with pytest.raises(ValueError, match="must be"):
            await fleet.map(info, **bounds)


@pytest.mark.parametrize("targets", ["a:1", ["a:1", "a:1"], ["http://a:1"], [Connection(target="a:1"), "a:1"], 3])
def test_targets_that_make_no_fleet_are_refused(fleet_of: MakeFleet, targets: Any) -> None:
    """A bare text, a worker twice, a URL: told at once, and with what to write."""
    with pytest.raises(ConfigError):
        fleet_of(targets)


async def test_a_closed_fleet_is_closed(fleet_of: MakeFleet, start: Start) -> None:
    """Its clients are, and it says so itself."""
    fleet = fleet_of([start().target])
    async with fleet:
        client = fleet.fleet.client(fleet.fleet.targets[0].key)
        await fleet.map(info)
    with pytest.raises(ClientClosed, match="fleet was closed"):
        await fleet.map(info)
    with pytest.raises(ClientClosed):
        await asyncio.to_thread(client.server_info) if fleet.colour == "sync" else await client.server_info()
    await fleet.close()


async def test_a_worker_that_leaves_while_it_is_asked(fleet_of: MakeFleet, start: Start) -> None:
    """Its own outcome says so; the others' are as they would be."""
    gone, stays = start(), start()
    gone.delay("GetServerInfo", 30.0)
    source = StaticDiscoverer([gone.target, stays.target])
    async with fleet_of(source) as fleet:
        asking = asyncio.ensure_future(fleet.map(info))
        await asyncio.to_thread(gone.wait_for_call, "GetServerInfo")
        source.replace([stays.target])
        await until(lambda: len(fleet.fleet.targets) == 1)
        left, good = await asking
    assert isinstance(left.error, ClientClosed)
    assert "left the fleet" in str(left.error)
    assert good.ok


async def test_closing_the_fleet_ends_the_calls_in_flight(fleet_of: MakeFleet, start: Start) -> None:
    """Nobody is left waiting for a worker that never answers."""
    silent = start()
    silent.delay("GetServerInfo", 30.0)
    fleet = fleet_of([silent.target])
    async with fleet:
        asking = asyncio.ensure_future(fleet.map(info))
        await asyncio.to_thread(silent.wait_for_call, "GetServerInfo")
    (only,) = await asking
    assert isinstance(only.error, ClientClosed)


async def test_two_hundred_workers_some_of_them_silent(fleet_of: MakeFleet) -> None:
    """Everybody who answers has an outcome in time, whatever the others do."""
    async with FakeFleet(200) as fakes:
        for number in range(0, 200, 20):
            fakes.worker(number).freeze()
        async with fleet_of(fakes.targets) as fleet:
            began = time.monotonic()
            outcomes = await fleet.map(info, deadline_s=3.0, at_once=64)
            took = time.monotonic() - began
    assert [one.key for one in outcomes] == fakes.targets
    assert [number for number, one in enumerate(outcomes) if not one.ok] == list(range(0, 200, 20))
    assert took < 5.0


async def test_cancelling_a_round_cancels_its_calls(start: Start) -> None:
    """Nothing goes on in the background."""
    silent = start()
    silent.delay("GetServerInfo", 30.0)
    async with AsyncFleet([silent.target]) as fleet:
        asking = asyncio.ensure_future(fleet.map(info))
        await asyncio.to_thread(silent.wait_for_call, "GetServerInfo")
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_function_that_refuses_to_be_cancelled_does_not_hold_the_round(start: Start) -> None:
    """The deadline is the caller's, not the function's."""
    end = asyncio.Event()

    async def stubborn(worker: object) -> None:
        while not end.is_set():
            try:
                await end.wait()
            except asyncio.CancelledError:
                continue

    async with AsyncFleet([start().target]) as fleet:
        began = time.monotonic()
        (only,) = await fleet.map(stubborn, deadline_s=0.1)
        assert time.monotonic() - began < 3.0
        assert isinstance(only.error, OutOfTime)
        end.set()
        await until(lambda: len(asyncio.all_tasks()) == 1)


async def test_a_function_that_is_not_async_is_a_defect(start: Start) -> None:
    """A likely mistake: the AsyncFleet takes what returns an awaitable."""
    async with AsyncFleet([start().target]) as fleet:
        with pytest.raises(TypeError, match="await"):
            await fleet.map(lambda worker: 3)  # type: ignore[arg-type, return-value]


def test_an_async_fleet_works_in_one_loop_after_another(start: Start) -> None:
    """Made at module level and used by two asyncio.run calls, with a source as well."""
    worker = start()
    plain, found = AsyncFleet([worker.target]), AsyncFleet(StaticDiscoverer([worker.target]))

    async def ask(fleet: AsyncFleet) -> list[Outcome[Any]]:
        return await fleet.map(info)

    for fleet in (plain, found, plain, found):
        assert asyncio.run(ask(fleet))[0].ok
    for fleet in (plain, found):
        asyncio.run(fleet.close())


def fleet_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("vllm-cp-fleet")]


def test_threads_last_no_longer_than_their_round(start: Start) -> None:
    """None between rounds; what a deadline left behind ends with the fleet."""
    quick, silent = start(), start()
    silent.delay("GetServerInfo", 30.0)
    with Fleet([quick.target]) as fleet:
        fleet.map(info)
        assert fleet_threads() == []
    with Fleet([quick.target, silent.target]) as fleet:
        fleet.map(info, deadline_s=0.2)
        assert len(fleet_threads()) == 1
    deadline = time.monotonic() + 5.0
    while fleet_threads() and time.monotonic() < deadline:
        threading.Event().wait(0.005)
    assert fleet_threads() == []


def test_a_source_that_needs_a_loop_is_refused_by_the_synchronous_fleet() -> None:
    """With the two ways out in the message."""

    class Streaming:
        name = "streaming"

        async def stream(self) -> Any:
            yield

    with pytest.raises(ConfigError, match=r"put InThread\(…\) around it, or use AsyncFleet"):
        Fleet(Streaming())  # type: ignore[arg-type]
