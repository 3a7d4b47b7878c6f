# pyright: strict, reportUnnecessaryTypeIgnoreComment=true, reportUnusedExpression=false
"""What users write, as type checkers see it. Never run: each line that is wrong on purpose says so, and must be."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from typing_extensions import assert_type

from vllm_cp import (
    Address,
    AsyncControlClient,
    ClientClosed,
    ConfigError,
    Connection,
    ControlClient,
    ControlError,
    CredentialsRejected,
    EngineFailed,
    FinishReason,
    ForkedClient,
    Generated,
    HealthStatus,
    InvalidArgument,
    KvEventSource,
    LoraAdapter,
    ModelInfo,
    NotAdmitting,
    NotFound,
    NotSupported,
    OutOfTime,
    Parallelism,
    PauseMode,
    PreconditionFailed,
    RanksDisagree,
    Refused,
    Retry,
    RlCapabilities,
    RpcRecord,
    ServerInfo,
    Tls,
    TlsFailed,
    TooLarge,
    WorkerUnreachable,
)
from vllm_cp.episodes import Memory, Observation, Rules, Transition, WorkerState, begin, remember, step
from vllm_cp.models.ladder import Rung, Rungs
from vllm_cp.readiness import AsyncLadder, Ladder, Progress


def told(record: RpcRecord) -> None:
    assert_type(record.method, str)
    assert_type(record.elapsed_s, float)
    assert_type(record.attempt, int)


def connections() -> None:
    everything = Connection(
        target="[::1]:8001",
        tls=Tls(ca_file=Path("ca.pem"), cert_file=Path("c.pem"), key_file=Path("k.pem")),
        token_file=Path("token"),
        insecure_token=False,
        timeout_s=2.5,
        retry=Retry(attempts=1, initial_s=0.1, max_s=1.0),
        proxy=False,
        server_name="worker-0",
    )
    assert_type(everything.timeout_s, float)
    assert_type(everything.tls, Tls | None)
    assert_type(Connection.parse("dns:///worker-0", timeout_s=1.0), Connection)
    Connection("worker-0")  # type: ignore[call-arg]
    Connection(targets="worker-0")  # type: ignore[call-arg]
    everything.target = "other"  # type: ignore[misc]


def clients() -> None:
    ControlClient()
    ControlClient(Connection())
    ControlClient(target="worker-0")  # type: ignore[call-arg]
    with ControlClient("worker-0", on_rpc=told) as worker:
        assert_type(worker, ControlClient)
        assert_type(worker.target, str)
        assert_type(worker.check(), HealthStatus)
        assert_type(worker.check("vllm.Control", timeout_s=1.0, rank=0), HealthStatus)
        assert_type(worker.watch("", check_every_s=1.0), Iterator[HealthStatus])
        assert_type(worker.server_info(rank=1), ServerInfo)
        assert_type(worker.model_info(), ModelInfo)
        assert_type(worker.kv_event_sources(), tuple[KvEventSource, ...])
        assert_type(worker.is_paused(), bool)
        assert_type(worker.is_sleeping(), bool)
        assert_type(worker.weight_version(), str)
        assert_type(worker.list_loras(), tuple[LoraAdapter, ...])
        assert_type(worker.load_lora("name", "/path"), LoraAdapter)
        assert_type(worker.unload_lora("name"), LoraAdapter)
        assert_type(worker.generate("hello", max_tokens=4, request_id="a"), Generated)
        assert_type(worker.generate([1, 2, 3]), Generated)
        worker.abort(["a", "b"], timeout_s=0.5)
        worker.abort(request_id for request_id in ("a", "b"))
        worker.pause(mode=PauseMode.KEEP, clear_cache=False)
        worker.resume()
        worker.sleep(level=1, mode=PauseMode.WAIT)
        worker.wake_up()
        worker.wake_up(("weights",))
        worker.init_weight_transfer_engine({"master": "10.0.0.1"})
        worker.start_weight_update()
        worker.start_draft_weight_update()
        worker.update_weights({"names": ["a"]})
        worker.finish_weight_update()
        worker.finish_weight_update("v2")
        worker.update_weight_version("v2")
        worker.shutdown()
        worker.pause()  # type: ignore[call-arg]
        worker.pause(mode=PauseMode.KEEP)  # type: ignore[call-arg]
        worker.pause(mode="keep", clear_cache=True)  # type: ignore[arg-type]
        worker.sleep(level=1)  # type: ignore[call-arg]
        worker.server_info(1.0)  # type: ignore[call-arg]
        worker.reboot()  # type: ignore[attr-defined]
    worker.close()


async def async_clients() -> None:
    async with AsyncControlClient("worker-0", on_rpc=told) as worker:
        assert_type(worker, AsyncControlClient)
        assert_type(await worker.check(), HealthStatus)
        assert_type(worker.watch(""), AsyncIterator[HealthStatus])
        async for status in worker.watch():
            assert_type(status, HealthStatus)
        assert_type(await worker.server_info(timeout_s=1.0, rank=1), ServerInfo)
        assert_type(await worker.model_info(), ModelInfo)
        assert_type(await worker.kv_event_sources(), tuple[KvEventSource, ...])
        assert_type(await worker.is_paused(), bool)
        assert_type(await worker.is_sleeping(), bool)
        assert_type(await worker.weight_version(), str)
        assert_type(await worker.list_loras(), tuple[LoraAdapter, ...])
        assert_type(await worker.load_lora("name", "/path"), LoraAdapter)
        assert_type(await worker.unload_lora("name"), LoraAdapter)
        assert_type(await worker.generate((1, 2)), Generated)
        await worker.abort({"a"})
        await worker.pause(mode=PauseMode.ABORT, clear_cache=True)
        await worker.pause(mode=PauseMode.ABORT)  # type: ignore[call-arg]
        await worker.shutdown()
    await worker.close()


def facts(info: ServerInfo, model: ModelInfo, source: KvEventSource, made: Generated) -> None:
    assert_type(info.total_kv_blocks, int | None)
    assert_type(info.instance_id, str | None)
    assert_type(info.parallelism, Parallelism | None)
    assert_type(info.rl_capabilities, RlCapabilities | None)
    info.total_kv_blocks + 1  # type: ignore[operator]
    if info.parallelism is not None:
        assert_type(info.parallelism.data_parallel_rank, int)
        assert_type(info.parallelism.world_size, int | None)
    assert_type(model.supports_lora, bool | None)
    assert_type(model.seen_on("0.33.0"), ModelInfo)
    assert_type(source.endpoint, str)
    assert_type(source.connect_to, str | None)
    assert_type(source.reason, str | None)
    assert_type(source.live, Address)
    assert_type(source.data_parallel_rank, int | None)
    assert_type(made.finish_reason, FinishReason)
    assert_type(made.token_ids, tuple[int, ...])
    assert_type(HealthStatus("SERVING"), HealthStatus)


def errors(worker: ControlClient) -> str:
    try:
        worker.is_paused()
    except NotSupported as error:
        return error.since
    except (TlsFailed, WorkerUnreachable, OutOfTime, CredentialsRejected) as error:
        return error.hint
    except (NotAdmitting, PreconditionFailed, Refused, NotFound, InvalidArgument, TooLarge) as error:
        return error.detail
    except (RanksDisagree, EngineFailed) as error:
        return error.method
    except ControlError as error:
        assert_type(error.target, str)
        assert_type(error.code, str)
        return str(error)
    except (ConfigError, ClientClosed, ForkedClient) as error:
        return str(error)
    return ""


def episodes() -> None:
    state = begin(at=0.0, wall=1.0, rules=Rules(window_s=30.0), memory=Memory(instance_id="one"))
    assert_type(state, WorkerState)
    state, transitions = step(state, Observation(at=1.0, wall=2.0, contact=True, health=HealthStatus.SERVING))
    assert_type(transitions, tuple[Transition, ...])
    assert_type(state.ready, bool)
    assert_type(state.rungs[Rung.ANSWERING].holds, bool | None)
    assert_type(state.rungs.highest, Rung | None)
    assert_type(remember(state), Memory)
    step(state, Observation(at=1.0))  # type: ignore[call-arg]


def watched(progress: Progress) -> None:
    assert_type(progress.elapsed_s, float)
    assert_type(progress.rungs, Rungs)


def ladders(worker: ControlClient) -> None:
    with Ladder(worker) as ladder:
        assert_type(ladder.observe(), Rungs)
        assert_type(ladder.wait_until(Rung.ADMITTING, 30.0, watched), Rungs)
        assert_type(ladder.wait_until("gone", 30.0), Rungs)


async def async_ladders(worker: AsyncControlClient) -> None:
    async with AsyncLadder(worker) as ladder:
        assert_type(await ladder.observe(), Rungs)
        assert_type(await ladder.wait_until("drained", 30.0, watched), Rungs)
