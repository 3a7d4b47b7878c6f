"""Both clients against a fake worker: deadlines, retries, records and metadata."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import pytest

from tests.colours import Both
from tests.inprocess.conftest import Connect
from tests.real.waiting import eventually
from vllm_cp import (
    ConfigError,
    Connection,
    EngineFailed,
    FinishReason,
    HealthStatus,
    InvalidArgument,
    NotAdmitting,
    NotSupported,
    OutOfTime,
    PauseMode,
    PreconditionFailed,
    Retry,
    RpcRecord,
    TooLarge,
    WorkerUnreachable,
)
from vllm_cp.testing import FakeWorker

SAFE_READS = [
    "check",
    "server_info",
    "model_info",
    "kv_event_sources",
    "is_paused",
    "is_sleeping",
    "weight_version",
    "list_loras",
]
CHANGES: dict[str, tuple[tuple[object, ...], dict[str, object]]] = {
    "abort": ((["a"],), {}),
    "pause": ((), {"mode": PauseMode.KEEP, "clear_cache": False}),
    "resume": ((), {}),
    "sleep": ((), {"level": 1, "mode": PauseMode.KEEP}),
    "wake_up": ((), {}),
    "load_lora": (("a", "/a"), {}),
    "unload_lora": (("a",), {}),
    "init_weight_transfer_engine": (({},), {}),
    "start_weight_update": ((), {}),
    "start_draft_weight_update": ((), {}),
    "update_weights": (({},), {}),
    "finish_weight_update": ((), {}),
    "update_weight_version": (("v2",), {}),
    "generate": (("x",), {}),
    "shutdown": ((), {}),
}


@pytest.fixture(params=[*SAFE_READS, *CHANGES])
def verb(request: pytest.FixtureRequest) -> str:
    """Every unary call of a client."""
    return str(request.param)


@pytest.fixture
def able(worker: FakeWorker) -> FakeWorker:
    """The worker, with everything configured that can be."""
    worker.set(
        max_loras=4,
        sleep_mode_enabled=True,
        weight_transfer_enabled=True,
        draft_weight_updates_enabled=True,
        managed=True,
    )
    return worker


async def ask(client: Both, verb: str, **more: object) -> object:
    """Make the call with arguments that are right for it."""
    args, kwargs = CHANGES.get(verb, ((), {}))
    return await getattr(client, verb)(*args, **kwargs, **more)


async def test_every_call_carries_its_deadline(able: FakeWorker, client: Both, verb: str) -> None:
    """The server sees the deadline of each call: the connection's five seconds, or the call's own."""
    if verb == "unload_lora":
        await client.load_lora("a", "/a")
    await ask(client, verb, timeout_s=2.5)
    assert able.calls[-1].deadline_s == pytest.approx(2.5, abs=0.4)


async def test_the_default_deadline_is_the_connections(worker: FakeWorker, connect: Connect) -> None:
    """A call without a time-out of its own sends the connection's."""
    client = await connect(Connection(target=worker.target, timeout_s=7.0))
    await client.server_info()
    assert worker.calls[0].deadline_s == pytest.approx(7.0, abs=0.4)


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan")])
async def test_a_deadline_is_positive(client: Both, timeout_s: float) -> None:
    """A time-out that makes no sense is refused before anything is sent."""
    with pytest.raises(ValueError, match="timeout_s"):
        await client.server_info(timeout_s=timeout_s)


async def test_reads_are_asked_again(able: FakeWorker, client: Both, verb: str) -> None:
    """A read that finds the worker unavailable asks again and gets its answer; a change is sent once and fails."""
    if verb in SAFE_READS:
        able.fail(_method(verb), "UNAVAILABLE", "connection reset", times=2)
        await ask(client, verb)
        assert [call.code for call in able.calls] == ["UNAVAILABLE", "UNAVAILABLE", "OK"]
        assert all(0 < (call.deadline_s or 0) < 5.2 for call in able.calls)
    else:
        able.fail(_method(verb), "UNAVAILABLE", "connection reset", times=2)
        with pytest.raises(WorkerUnreachable):
            await ask(client, verb)
        assert [call.code for call in able.calls] == ["UNAVAILABLE"]


def _method(verb: str) -> str:
    names = {
        "check": "Health.Check",
        "server_info": "GetServerInfo",
        "model_info": "GetModelInfo",
        "kv_event_sources": "GetKvEventSources",
        "weight_version": "GetWeightVersion",
        "pause": "PauseGeneration",
        "resume": "ResumeGeneration",
    }
    return names.get(verb, "".join(word.title() for word in verb.split("_")))


async def test_tries_share_one_deadline(worker: FakeWorker, client: Both) -> None:
    """What the first try took is gone for the next ones."""
    worker.delay("GetServerInfo", 0.2, times=2)
    worker.fail("GetServerInfo", "UNAVAILABLE", "connection reset", times=2)
    await client.server_info(timeout_s=3.0)
    left = [call.deadline_s or 0 for call in worker.calls]
    assert len(left) == 3
    # The answer took 0.2 s, and the pause after it at least half of its longest.
    assert left[0] - left[1] == pytest.approx(0.45, abs=0.2)
    assert left[1] - left[2] == pytest.approx(0.65, abs=0.3)


async def test_tries_have_an_end(worker: FakeWorker, connect: Connect) -> None:
    """A read is given up after the attempts that the connection allows."""
    client = await connect(Connection(target=worker.target, retry=Retry(attempts=2)))
    worker.fail("GetServerInfo", "UNAVAILABLE", "connection reset")
    with pytest.raises(WorkerUnreachable):
        await client.server_info()
    assert len(worker.calls) == 2


async def test_tries_end_with_the_deadline(worker: FakeWorker, connect: Connect) -> None:
    """However many attempts there might be, the caller has its answer within its time."""
    retry = Retry(attempts=1000, initial_s=0.01, max_s=0.02)
    client = await connect(Connection(target=worker.target, retry=retry))
    worker.fail("GetServerInfo", "UNAVAILABLE", "connection reset")
    began = time.monotonic()
    with pytest.raises((WorkerUnreachable, OutOfTime)):
        await client.server_info(timeout_s=0.3)
    assert time.monotonic() - began < 0.6
    assert len(worker.calls) > 3


@pytest.mark.parametrize("code", ["INTERNAL", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED", "CANCELLED", "UNKNOWN"])
async def test_only_unavailable_is_asked_again(worker: FakeWorker, client: Both, code: str) -> None:
    """Every other status is an answer, and asking again would not change it."""
    worker.fail("GetServerInfo", code, "no")
    with pytest.raises(Exception, match="GetServerInfo"):
        await client.server_info()
    assert len(worker.calls) == 1


async def test_a_pause_is_not_asked_again(worker: FakeWorker, client: Both) -> None:
    """A worker that says it is paused will not be pestered, although it says UNAVAILABLE."""
    worker.fail("IsPaused", "UNAVAILABLE", "Generation is paused. Please retry after it resumes.")
    with pytest.raises(NotAdmitting):
        await client.is_paused()
    assert len(worker.calls) == 1


async def test_out_of_time_comes_on_time(worker: FakeWorker, client: Both) -> None:
    """A hung engine costs a caller its time-out and no more."""
    worker.hang()
    began = time.monotonic()
    with pytest.raises(OutOfTime) as failed:
        await client.is_paused(timeout_s=0.2)
    assert 0.15 < time.monotonic() - began < 0.7
    assert failed.value.method == "Control.IsPaused"
    assert failed.value.target == client.target


@pytest.mark.parametrize("words", ["Timeout expired", "Timeout%20expired"])
async def test_a_servers_own_timeout_is_out_of_time(worker: FakeWorker, client: Both, words: str) -> None:
    """The server's clock may run out first; it says CANCELLED, and gRPC may hand over its words undecoded."""
    worker.fail("IsPaused", "CANCELLED", words)
    with pytest.raises(OutOfTime, match="Timeout expired"):
        await client.is_paused()


async def test_every_attempt_is_recorded(worker: FakeWorker, connect: Connect) -> None:
    """The hook hears of each attempt: who, what, how it ended, how long it took."""
    records: list[RpcRecord] = []
    client = await connect(worker.target, on_rpc=records.append)
    worker.fail("GetServerInfo", "UNAVAILABLE", "gone", times=1)
    worker.delay("IsPaused", 0.1)
    await client.server_info()
    await client.is_paused()
    with pytest.raises(PreconditionFailed):
        await client.shutdown()
    assert [(r.method, r.code, r.attempt) for r in records] == [
        ("Control.GetServerInfo", "UNAVAILABLE", 1),
        ("Control.GetServerInfo", "OK", 2),
        ("Control.IsPaused", "OK", 1),
        ("Control.Shutdown", "FAILED_PRECONDITION", 1),
    ]
    assert {r.target for r in records} == {worker.target}
    assert records[0].detail == "gone"
    assert records[2].elapsed_s == pytest.approx(0.1, abs=0.09)


async def test_the_rank_travels_as_metadata(worker: FakeWorker, client: Both) -> None:
    """A call for one rank says so in the metadata the real server reads; others say nothing."""
    await client.generate("x", rank=0)
    await client.generate("x")
    first, second = worker.calls
    assert first.get("x-data-parallel-rank") == "0"
    assert second.get("x-data-parallel-rank") is None
    with pytest.raises(InvalidArgument, match="rank 7 is not connected"):
        await client.generate("x", rank=7)
    with pytest.raises(ValueError, match="rank"):
        await client.generate("x", rank=-1)


async def test_an_answer_that_is_no_message_is_named(connect: Connect) -> None:
    """Bytes that are no answer are an EngineFailed that asks whether this is a vLLM at all, in calls and watches."""
    with babbler() as target:
        client = await connect(target)
        with pytest.raises(EngineFailed, match="is this a vLLM control port"):
            await client.server_info()
        with pytest.raises(EngineFailed, match="is this a vLLM control port"):
            await anext(client.watch())


class _Babble(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes]:
        return grpc.unary_stream_rpc_method_handler(lambda request, context: iter([b"\xff\xff\xff"]))


@contextmanager
def babbler() -> Iterator[str]:
    """A gRPC server that answers everything with nonsense."""
    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool, handlers=[_Babble()])
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        yield f"127.0.0.1:{port}"
        server.stop(None).wait(5)


async def test_calls_overlap(worker: FakeWorker, client: Both) -> None:
    """One client carries many calls at once."""
    worker.delay("IsPaused", 0.2)
    began = time.monotonic()
    assert await asyncio.gather(*(client.is_paused() for _ in range(8))) == [False] * 8
    assert time.monotonic() - began < 1.0


async def test_an_abort_ends_a_generation_with_what_there_was(worker: FakeWorker, client: Both) -> None:
    """An aborted generation is an answer with partial text, not an error."""
    worker.set(token_interval_s=0.01)
    running = asyncio.ensure_future(client.generate("x", max_tokens=3000, request_id="mine", timeout_s=20))
    await asyncio.to_thread(worker.wait_for_call, "Generate")
    await asyncio.sleep(0.1)  # some tokens
    await client.abort(["unknown", "mine"])
    ended = await running
    assert ended.finish_reason is FinishReason.ABORTED
    assert 0 < len(ended.text) == ended.output_tokens < 3000


async def test_a_caller_that_gives_up_aborts_its_generation(worker: FakeWorker, client: Both) -> None:
    """A passed deadline reaches the worker, which stops generating."""
    worker.set(token_interval_s=0.01)
    with pytest.raises(OutOfTime):
        await client.generate("x", max_tokens=3000, timeout_s=0.1)
    await asyncio.to_thread(_ended, worker)
    assert worker.calls[-1].code == "CANCELLED"


def _ended(worker: FakeWorker) -> None:
    eventually(lambda: worker.calls[-1].code, 5.0, "the call to end")


async def test_a_too_large_request_is_named(connect: Connect) -> None:
    """A request above the server's limit is TooLarge, with the limits in the hint."""
    with FakeWorker(version="0.27.0") as old:
        client = await connect(old.target)
        await client.abort(["x" * (3 * 1024 * 1024)])
        with pytest.raises(TooLarge, match="4194304") as failed:
            await client.abort(["x" * (5 * 1024 * 1024)])
        assert "32 MiB" in failed.value.hint


async def test_an_older_worker_is_told_apart_from_an_outage(connect: Connect) -> None:
    """What a version does not have is NotSupported with the version that has it, and is not retried."""
    with FakeWorker(version="0.28.0") as old:
        client = await connect(old.target)
        with pytest.raises(NotSupported) as failed:
            await client.list_loras()
        assert failed.value.since == "0.29"
        assert len(old.calls) == 1


async def test_mistakes_are_found_before_anything_is_sent(worker: FakeWorker, client: Both) -> None:
    """Arguments that cannot be right never reach the wire."""
    with pytest.raises(TypeError, match="list"):
        await client.abort("one-id")
    with pytest.raises(ValueError, match="empty"):
        await client.abort([""])
    with pytest.raises(ValueError, match="max_tokens"):
        await client.generate("x", max_tokens=0)
    with pytest.raises(TypeError):
        await client.wake_up("weights")
    assert worker.calls == []


async def test_a_target_that_cannot_be_is_refused(colour: str) -> None:
    """A client for a target that is none is never made."""
    with pytest.raises(ConfigError, match="URL"):
        Both(colour, "http://worker:8001")


async def test_unknown_health_names_are_an_answer(client: Both) -> None:
    """Check knows three names; any other is SERVICE_UNKNOWN, not an error."""
    assert await client.check() is HealthStatus.SERVING
    assert await client.check("vllm.Inference") is HealthStatus.SERVING
    assert await client.check("nope") is HealthStatus.SERVICE_UNKNOWN
