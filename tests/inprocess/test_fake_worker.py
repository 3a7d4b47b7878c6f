"""FakeWorker as a product: what a user's test may rely on."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.inprocess.conftest import named_threads
from tests.real.waiting import eventually
from vllm_cp import (
    AsyncControlClient,
    Connection,
    ControlClient,
    ControlError,
    EngineFailed,
    FinishReason,
    HealthStatus,
    KvEventSource,
    NotFound,
    OutOfTime,
    Parallelism,
    PauseMode,
    ServerInfo,
    WorkerUnreachable,
)
from vllm_cp.testing import FakeWorker


def test_it_starts_fast_and_leaves_no_thread_behind() -> None:
    """A worker comes up within a second and is gone without a trace, also with calls in flight."""
    began = time.monotonic()
    with FakeWorker() as worker:
        assert time.monotonic() - began < 1.0
        worker.hang()
        with ControlClient(worker.target) as client, ThreadPoolExecutor(5) as pool:
            pending = [pool.submit(client.is_paused, timeout_s=30) for _ in range(5)]
            watch = client.watch()
            assert next(watch) is HealthStatus.SERVING
            worker.wait_for_call("IsPaused", count=5)
            worker.stop()
            for call in pending:
                with pytest.raises(WorkerUnreachable):
                    call.result(5)
            with pytest.raises(WorkerUnreachable):
                next(watch)
    assert not named_threads("vllm-cp-fake")
    gc.collect()  # a forgotten socket or loop would be a ResourceWarning now


def test_a_worker_that_was_never_used_closes_as_well() -> None:
    """Closing works without a start, after a stop, and twice."""
    FakeWorker().close()
    worker = FakeWorker().start()
    worker.stop()
    worker.stop()
    worker.close()
    worker.close()
    with pytest.raises(RuntimeError, match="not running"):
        worker.hang()


def test_a_worker_that_has_not_started_says_so() -> None:
    """The target is known once the port is open; asking before is a clear mistake."""
    with pytest.raises(RuntimeError, match="has not started"):
        _ = FakeWorker().target
    with FakeWorker() as worker, pytest.raises(RuntimeError, match="started already"):
        worker.start()


def test_a_taken_port_is_an_error() -> None:
    """Two workers cannot share a port, and the second says so."""
    with FakeWorker() as first:
        port = int(first.target.rpartition(":")[2])
        with pytest.raises(OSError, match=str(port)):
            FakeWorker(port=port).start()
    assert not named_threads("vllm-cp-fake")


@pytest.mark.parametrize("version", ["0.26.0", "latest", ""])
def test_a_version_without_a_control_plane_is_refused(version: str) -> None:
    """There is no worker of a version that never had the control plane."""
    with pytest.raises(ValueError, match=r"0\.27\.0"):
        FakeWorker(version=version)


def test_ranks_are_checked() -> None:
    """A worker has a rank at least, and a verb names only ranks it has."""
    with pytest.raises(ValueError, match="1 rank"):
        FakeWorker(ranks=0)
    with FakeWorker(ranks=2) as worker, pytest.raises(ValueError, match="no rank 2"):
        worker.hang(rank=2)


def test_facts_are_set_by_name(worker: FakeWorker) -> None:
    """Any field of what the worker says can be changed while it runs, wherever it sits in the message."""
    worker.set(total_kv_blocks=0, tensor_parallel_size=8, served_model_name="llama", sleep_mode_enabled=True)
    with ControlClient(worker.target) as client:
        info = client.server_info()
        assert info.total_kv_blocks is None
        assert info.parallelism is not None
        assert info.parallelism.tensor_parallel_size == 8
        assert info.rl_capabilities is not None
        assert info.rl_capabilities.sleep_mode_enabled
        assert client.model_info().served_model_name == "llama"


def test_a_fact_that_does_not_exist_is_refused(worker: FakeWorker) -> None:
    """A misspelt name never passes silently, and a bad value changes nothing."""
    with pytest.raises(TypeError, match="did you mean 'total_kv_blocks'"):
        worker.set(total_kv_block=1)
    with pytest.raises(TypeError):
        worker.set(max_model_len=7, total_kv_blocks="many")
    with pytest.raises(TypeError, match="rank="):
        worker.set(rank=0, total_kv_blocks=1)
    with ControlClient(worker.target) as client:
        assert client.server_info().max_model_len == 4096


def test_it_says_what_it_is_given() -> None:
    """Facts given at the start come out as they went in."""
    info = ServerInfo(instance_id="abc", parallelism=Parallelism(data_parallel_size=2), total_kv_blocks=7)
    source = KvEventSource(transport="zmq", endpoint="tcp://*:5557", data_parallel_rank=0, encoding="msgpack")
    with FakeWorker(info=info, kv_sources=[source]) as worker, ControlClient(worker.target) as client:
        seen = client.server_info()
        assert (seen.instance_id, seen.total_kv_blocks, seen.engine_version) == ("abc", 7, "0.33.0")
        (read,) = client.kv_event_sources()
        assert (read.endpoint, read.data_parallel_rank) == ("tcp://*:5557", 0)
        worker.set(kv_sources=())
        assert client.kv_event_sources() == ()


def test_calls_are_recorded(worker: FakeWorker) -> None:
    """Every call is remembered with its metadata, deadline, request and end."""
    with ControlClient(worker.target) as client:
        client.abort(["a", "b"], timeout_s=3.0, rank=0)
        with pytest.raises(ControlError):
            client.sleep(level=1, mode=PauseMode.KEEP)
    abort, sleep = worker.calls
    assert abort.method == "Control.Abort"
    assert abort.request_ids == ("a", "b")
    assert abort.rank == 0
    assert abort.get(
        "user-agent",
    ).startswith("vllm-cp/")  # type: ignore[union-attr]
    assert abort.deadline_s == pytest.approx(3.0, abs=0.5)
    assert abort.code == "OK"
    assert (sleep.method, sleep.code) == ("Control.Sleep", "FAILED_PRECONDITION")
    assert dict(sleep.request) == {"level": 1, "mode": 3}


def test_a_failure_can_be_scripted(worker: FakeWorker) -> None:
    """A method fails as often as it is told to, or until it is healed."""
    worker.fail("IsPaused", "INTERNAL", "boom", times=1)
    worker.fail("Health.Check", "RESOURCE_EXHAUSTED")
    with ControlClient(worker.target) as client:
        with pytest.raises(EngineFailed, match="boom"):
            client.is_paused()
        assert client.is_paused() is False
        for _ in range(3):
            with pytest.raises(ControlError):
                client.check()
        worker.heal("Check")
        assert client.check() is HealthStatus.SERVING
    with pytest.raises(ValueError, match="NOPE"):
        worker.fail("IsPaused", "NOPE")
    with pytest.raises(ValueError, match="OK"):
        worker.fail("IsPaused", "OK")
    with pytest.raises(ValueError, match="IsPause'"):
        worker.fail("IsPause", "INTERNAL")


def test_a_delay_can_be_scripted(worker: FakeWorker) -> None:
    """A delayed method answers late, and not at all to a caller with less patience."""
    worker.delay("GetServerInfo", 0.2, times=2)
    with ControlClient(worker.target) as client:
        with pytest.raises(OutOfTime):
            client.server_info(timeout_s=0.1)
        began = time.monotonic()
        client.server_info()
        assert time.monotonic() - began >= 0.2
        began = time.monotonic()
        client.server_info()
        assert time.monotonic() - began < 0.15


def test_a_hundred_hung_calls_and_watches_leave_the_rest_alone(worker: FakeWorker) -> None:
    """Hung calls hold no thread: discovery goes on beside a hundred of them, and all answer after the thaw."""
    worker.hang()
    with ControlClient(worker.target) as client, ThreadPoolExecutor(100) as pool:
        watches = [client.watch() for _ in range(60)]
        assert {next(watch) for watch in watches} == {HealthStatus.SERVING}
        hung = [pool.submit(client.generate, "x", timeout_s=20) for _ in range(100)]
        worker.wait_for_call("Generate", count=100)
        began = time.monotonic()
        client.server_info()
        assert client.check() is HealthStatus.SERVING
        assert time.monotonic() - began < 1.0
        assert len(named_threads("vllm-cp-fake")) < 12
        worker.unhang()
        assert {call.result(10).finish_reason for call in hung} == {FinishReason.LENGTH}
        worker.health("NOT_SERVING")
        assert {next(watch) for watch in watches} == {HealthStatus.NOT_SERVING}


def test_one_health_name_can_move_alone(worker: FakeWorker) -> None:
    """All names move together as on the real server, unless a test wants to see one alone."""
    worker.health("NOT_SERVING", "vllm.Inference")
    with ControlClient(worker.target) as client:
        assert client.check("vllm.Inference") is HealthStatus.NOT_SERVING
        assert client.check("vllm.Control") is HealthStatus.SERVING
    with pytest.raises(ValueError, match="nope"):
        worker.health("SERVING", "nope")
    with pytest.raises(ValueError, match="SLEEPY"):
        worker.health("SLEEPY")


def test_stop_refuses_and_restart_is_another_instance(worker: FakeWorker) -> None:
    """A stopped worker's port refuses; the restarted one serves on the same port under another id, healthy again."""
    target = worker.target
    with ControlClient(target) as client:
        first = client.server_info().instance_id
        worker.set(total_kv_blocks=5)
        worker.die(reported=True)
        worker.fail("IsPaused", "INTERNAL")
        worker.stop()
        host, _, port = target.rpartition(":")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, int(port)), timeout=1)
        with pytest.raises(WorkerUnreachable):
            client.check(timeout_s=0.3)
        worker.restart()
        assert worker.target == target
        eventually(lambda: _serving(client), 5.0, "the client to reconnect")
        second = client.server_info()
        assert second.instance_id not in (None, first)
        assert second.total_kv_blocks == 5
        assert client.is_paused() is False
        worker.restart(instance_id="mine")
        eventually(lambda: _serving(client), 5.0, "the client to reconnect")
        assert client.server_info().instance_id == "mine"
        assert len({call.method for call in worker.calls}) >= 3  # the record survives


def test_a_drain_holds_new_calls_and_lets_old_ones_finish(worker: FakeWorker) -> None:
    """While it drains it says NOT_SERVING, ends its watches, finishes what runs and answers nobody new."""
    worker.set(token_interval_s=0.02)
    with ControlClient(worker.target) as client, ThreadPoolExecutor(1) as pool:
        watch = client.watch()
        assert next(watch) is HealthStatus.SERVING
        running = pool.submit(client.generate, "x", max_tokens=20)
        worker.wait_for_call("Generate")
        worker.drain(30, busy=False)
        assert list(watch) == [HealthStatus.NOT_SERVING]
        with pytest.raises(OutOfTime):
            client.server_info(timeout_s=0.1)
        assert running.result(5).finish_reason is FinishReason.LENGTH
        # Nothing is in flight any more, so it is gone long before the thirty seconds are over.
        eventually(lambda: _gone(client), 5.0, "the drained worker to go")


def test_a_draining_worker_may_have_forgotten_its_services(worker: FakeWorker) -> None:
    """A scripted answer is given during a drain as well, so the real server's odd NOT_FOUND can be had."""
    worker.fail("Check", "NOT_FOUND", "service not registered", times=1)
    worker.drain(10)
    with ControlClient(worker.target) as client:
        assert client.check() is HealthStatus.SERVICE_UNKNOWN
        with pytest.raises(OutOfTime):
            client.check(timeout_s=0.1)


def _serving(client: ControlClient) -> bool:
    try:
        return client.check() is HealthStatus.SERVING
    except WorkerUnreachable:
        return False


def _gone(client: ControlClient) -> bool:
    try:
        client.server_info(timeout_s=0.2)
    except OutOfTime:
        return False
    except WorkerUnreachable:
        return True
    return False


def test_a_drain_ends_after_its_time(worker: FakeWorker) -> None:
    """Whatever still runs when the drain time is over breaks off."""
    worker.set(token_interval_s=0.05)
    with ControlClient(worker.target) as client, ThreadPoolExecutor(1) as pool:
        running = pool.submit(client.generate, "x", max_tokens=2000, timeout_s=20)
        worker.wait_for_call("Generate")
        worker.drain(0.1)
        with pytest.raises(WorkerUnreachable):
            running.result(5)


def test_a_frozen_frontend_answers_nothing_until_it_thaws(worker: FakeWorker) -> None:
    """A frozen frontend takes connections and stays silent; what waited is answered after the thaw."""
    worker.freeze()
    with ControlClient(worker.target) as client, ThreadPoolExecutor(1) as pool:
        with pytest.raises(OutOfTime):
            client.check(timeout_s=0.1)
        waiting = pool.submit(client.server_info, timeout_s=10)
        worker.wait_for_call("GetServerInfo")
        worker.thaw()
        assert waiting.result(5).engine_version == "0.33.0"


def test_what_a_hung_engine_was_told_it_does_after_the_thaw(worker: FakeWorker) -> None:
    """A change that ran out of time is done all the same once the engine thaws."""
    with ControlClient(worker.target) as client:
        worker.hang()
        with pytest.raises(OutOfTime):
            client.pause(mode=PauseMode.KEEP, clear_cache=False, timeout_s=0.1)
        worker.unhang()
        assert client.is_paused() is True


def test_adapters_come_and_go(worker: FakeWorker) -> None:
    """Adapters are listed by name, loaded once, found by name, and come from allowed places only."""
    worker.set(max_loras=2, lora_path_prefixes=("/adapters",))
    with ControlClient(worker.target) as client:
        assert client.model_info().supports_lora is True
        assert client.load_lora("b", "/adapters/b").lora_id == 1
        client.load_lora("a", "org/a")
        assert [adapter.name for adapter in client.list_loras()] == ["a", "b"]
        with pytest.raises(ControlError) as again:
            client.load_lora("a", "/adapters/a")
        assert again.value.code == "ALREADY_EXISTS"
        with pytest.raises(ControlError, match="outside the configured"):
            client.load_lora("c", "/elsewhere/c")
        assert client.unload_lora("b").source_path == "/adapters/b"
        with pytest.raises(NotFound):
            client.unload_lora("b")


def test_waiting_for_a_call_has_an_end(worker: FakeWorker) -> None:
    """Waiting for a call that never comes is a TimeoutError that says how many came."""
    with pytest.raises(TimeoutError, match="0 calls of Abort"):
        worker.wait_for_call("Abort", timeout_s=0.05)


def test_it_listens_on_ipv6() -> None:
    """A worker may live on an IPv6 address, and its target is written as everywhere."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 loopback here")
    with FakeWorker(host="::1") as worker, ControlClient(Connection(target=worker.target)) as client:
        assert worker.target.startswith("[::1]:")
        assert client.check() is HealthStatus.SERVING


async def test_it_does_not_use_the_event_loop() -> None:
    """A worker in an asyncio test answers while the loop is busy elsewhere, and needs no await for its verbs."""
    async with FakeWorker() as worker, AsyncControlClient(worker.target) as client:
        assert await client.is_paused() is False
        worker.set(paused=True)
        assert await client.is_paused() is True
        pending = asyncio.create_task(client.generate("x", timeout_s=5))
        assert await asyncio.to_thread(worker.wait_for_call, "Generate")
        assert threading.current_thread() is threading.main_thread()
        with pytest.raises(ControlError):
            await pending
