"""Both clients and time: closing, watching, event loops, forks."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

from tests.colours import Both
from tests.inprocess.conftest import Connect, named_threads
from tests.real.waiting import eventually
from vllm_cp import (
    AsyncControlClient,
    ClientClosed,
    Connection,
    ControlClient,
    ForkedClient,
    HealthStatus,
    NotFound,
    OutOfTime,
    Retry,
    WorkerUnreachable,
)
from vllm_cp.testing import FakeWorker


async def test_a_closed_client_says_so(client: Both) -> None:
    """A closed client refuses calls by name, and closing twice is fine."""
    await client.close()
    await client.close()
    with pytest.raises(ClientClosed):
        await client.server_info()
    with pytest.raises(ClientClosed):
        await anext(client.watch())


async def test_closing_ends_calls_in_flight(worker: FakeWorker, client: Both) -> None:
    """Calls in flight end at once with ClientClosed when the client is closed under them."""
    worker.hang()
    calls = [asyncio.ensure_future(client.is_paused(timeout_s=30)) for _ in range(5)]
    await asyncio.to_thread(worker.wait_for_call, "IsPaused", count=5)
    began = time.monotonic()
    await client.close()
    ended = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 5)
    assert [type(error) for error in ended] == [ClientClosed] * 5
    assert time.monotonic() - began < 2


async def test_closing_ends_a_call_between_two_tries(worker: FakeWorker, connect: Connect) -> None:
    """A call that waits for its next try ends as well."""
    retry = Retry(attempts=100, initial_s=0.2, max_s=0.2)
    client = await connect(Connection(target=worker.target, retry=retry))
    worker.fail("GetServerInfo", "UNAVAILABLE", "gone")
    call = asyncio.ensure_future(client.server_info(timeout_s=30))
    await asyncio.to_thread(worker.wait_for_call, "GetServerInfo")
    await client.close()
    with pytest.raises(ClientClosed):
        await asyncio.wait_for(call, 5)


async def test_closing_ends_a_watch(worker: FakeWorker, client: Both) -> None:
    """A watch ends like any iterator when its client is closed: no error, no thread, no task left."""
    watch = client.watch()
    assert await anext(watch) is HealthStatus.SERVING
    waiting = asyncio.ensure_future(anext(watch, "the end"))  # type: ignore[call-overload]
    await asyncio.to_thread(worker.wait_for_call, "Watch")
    await asyncio.sleep(0.05)  # the iterator stands in its wait
    await client.close()
    assert await asyncio.wait_for(waiting, 5) == "the end"
    await asyncio.to_thread(eventually, lambda: not named_threads("vllm-cp-watch"), 5.0)


async def test_leaving_a_watch_ends_the_stream(worker: FakeWorker, client: Both) -> None:
    """Whoever stops iterating also stops the stream on the worker."""
    watch = client.watch()
    assert await anext(watch) is HealthStatus.SERVING
    await watch.aclose()  # type: ignore[attr-defined]
    await asyncio.to_thread(eventually, lambda: worker.calls[-1].code == "CANCELLED", 5.0)
    assert await client.check() is HealthStatus.SERVING


async def test_a_watch_tells_each_change_once(worker: FakeWorker, client: Both) -> None:
    """A watch yields the status now and then changes only, however many Checks go out meanwhile."""
    seen: list[HealthStatus] = []

    async def look() -> None:
        async for status in client.watch(check_every_s=0.02):
            seen.append(status)

    looking = asyncio.ensure_future(look())
    await asyncio.to_thread(worker.wait_for_call, "Check", count=3)
    worker.health("NOT_SERVING")
    await asyncio.to_thread(worker.wait_for_call, "Check", count=6)
    worker.health("SERVING")
    await asyncio.to_thread(worker.wait_for_call, "Check", count=9)
    worker.drain(0.2)
    await asyncio.wait_for(looking, 5)
    assert seen == [
        HealthStatus.SERVING,
        HealthStatus.NOT_SERVING,
        HealthStatus.SERVING,
        HealthStatus.NOT_SERVING,
    ]


async def test_a_watch_of_an_unknown_name_is_an_error(client: Both) -> None:
    """Unlike Check, a watch cannot go on after "there is no such name"."""
    with pytest.raises(NotFound, match="service not registered"):
        await anext(client.watch("nope"))


async def test_a_watch_ends_with_an_error_when_the_worker_goes(worker: FakeWorker, client: Both) -> None:
    """A worker that stops under a watch is WorkerUnreachable; one that drains is the end of the iteration."""
    watch = client.watch()
    assert await anext(watch) is HealthStatus.SERVING
    worker.stop()
    with pytest.raises(WorkerUnreachable):
        await asyncio.wait_for(anext(watch), 5)


async def test_a_half_open_peer_is_noticed(worker: FakeWorker, client: Both) -> None:
    """A peer that vanished without a word is noticed within four times the checking interval."""
    watch = client.watch(check_every_s=0.1)
    assert await anext(watch) is HealthStatus.SERVING
    worker.freeze()
    began = time.monotonic()
    with pytest.raises(OutOfTime):
        await asyncio.wait_for(anext(watch), 5)
    assert time.monotonic() - began < 0.4 + 0.5  # and half a second for a busy machine


async def test_a_quiet_but_living_peer_is_left_alone(worker: FakeWorker, client: Both) -> None:
    """A watch on which nothing happens goes on as long as the worker answers its Checks."""
    watch = client.watch(check_every_s=0.02)
    assert await anext(watch) is HealthStatus.SERVING
    waiting = asyncio.ensure_future(anext(watch))
    await asyncio.to_thread(worker.wait_for_call, "Check", count=10)
    assert not waiting.done()
    worker.health("NOT_SERVING")
    assert await asyncio.wait_for(waiting, 5) is HealthStatus.NOT_SERVING
    assert [call.method for call in worker.calls].count("Health.Watch") == 1


async def test_a_black_hole_in_the_network_is_noticed(worker: FakeWorker, connect: Connect) -> None:
    """The same when it is the network that swallows everything, after the connection stood."""
    with black_hole(worker.target) as (address, swallow):
        client = await connect(address)
        watch = client.watch(check_every_s=0.1)
        assert await anext(watch) is HealthStatus.SERVING
        swallow()
        began = time.monotonic()
        with pytest.raises(OutOfTime):
            await asyncio.wait_for(anext(watch), 5)
        assert time.monotonic() - began < 0.9


async def test_a_client_finds_its_worker_again(worker: FakeWorker, client: Both) -> None:
    """After a restart on the same address the same client serves on within its reconnect back-off."""
    await client.server_info()
    worker.stop()
    with pytest.raises(WorkerUnreachable):
        await client.server_info()
    worker.restart(instance_id="new")
    deadline = time.monotonic() + 5
    while True:
        try:
            assert (await client.server_info()).instance_id == "new"
            break
        except WorkerUnreachable:
            assert time.monotonic() < deadline


def test_one_asynchronous_client_serves_two_loops(worker: FakeWorker) -> None:
    """A client may be made outside of any loop and used in one asyncio.run after another."""
    client = AsyncControlClient(worker.target)

    async def ask() -> str:
        return (await client.server_info()).engine_version

    assert asyncio.run(ask()) == "0.33.0"
    assert asyncio.run(ask()) == "0.33.0"
    asyncio.run(client.close())


def test_one_asynchronous_client_serves_loops_side_by_side(worker: FakeWorker) -> None:
    """Loops in different threads may share a client: each has a channel of its own."""
    client = AsyncControlClient(worker.target)
    worker.delay("GetServerInfo", 0.1)
    seen: list[str] = []

    def run() -> None:
        async def ask() -> None:
            seen.append((await client.server_info()).engine_version)

        asyncio.run(ask())

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert seen == ["0.33.0"] * 3
    asyncio.run(client.close())


def test_one_synchronous_client_serves_many_threads(worker: FakeWorker) -> None:
    """A synchronous client is safe to share between threads."""
    with ControlClient(worker.target) as client:
        seen: list[str] = []
        threads = [
            threading.Thread(target=lambda: seen.extend(client.server_info().engine_version for _ in range(20)))
            for _ in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert len(seen) == 160


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # that forking with threads is unwise
def test_a_client_refuses_to_work_in_a_forked_child() -> None:
    """A child that inherits a client is told to make its own, instead of hanging in gRPC."""
    sync, asynchronous = ControlClient("127.0.0.1:9"), AsyncControlClient("127.0.0.1:9")
    child = os.fork()
    if child == 0:
        try:
            sync.server_info()
        except ForkedClient:
            try:
                asyncio.run(asynchronous.server_info())
            except ForkedClient:
                os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    sync.close()
    asyncio.run(asynchronous.close())
    assert os.waitstatus_to_exitcode(status) == 0


@contextmanager
def black_hole(target: str) -> Iterator[tuple[str, Callable[[], None]]]:
    """A TCP relay in front of a worker that at a word goes on taking bytes and hands on none."""
    host, _, port = target.rpartition(":")
    listener = socket.create_server((host, 0))
    silent, over = threading.Event(), threading.Event()
    ends: list[socket.socket] = [listener]

    def copy(source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                if not silent.is_set():
                    sink.sendall(data)
        except OSError:
            pass

    def accept() -> None:
        try:
            while not over.is_set():
                near, _ = listener.accept()
                far = socket.create_connection((host, int(port)))
                ends.extend((near, far))
                for pair in ((near, far), (far, near)):
                    threads.append(threading.Thread(target=copy, args=pair, daemon=True))
                    threads[-1].start()
        except OSError:
            pass

    threads = [threading.Thread(target=accept, daemon=True)]
    threads[0].start()
    try:
        yield f"{host}:{listener.getsockname()[1]}", silent.set
    finally:
        over.set()
        for end in ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        for thread in threads:
            thread.join(5)


def test_loops_that_are_over_leave_no_connection(worker: FakeWorker) -> None:
    """A client used in one asyncio.run after another keeps the connection of the running loop alone."""
    client = AsyncControlClient(worker.target)
    for _ in range(6):
        asyncio.run(client.check())
    assert len(client._lines) == 1
