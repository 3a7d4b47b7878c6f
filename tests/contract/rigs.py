"""The same worker twice: the fake, and the genuine ``vllm-rs`` with simulated engines. Both take the same verbs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tests.certs import Certs
from tests.real.stack import EngineFacts, KvEventsFacts, Stack
from vllm_cp import KvEventSource, Parallelism, RlCapabilities, ServerInfo
from vllm_cp.testing import FakeWorker, TlsFiles

#: Between two tokens.
INTERVAL_S = 0.01
#: Patience with a call that will get no answer, but has to arrive.
BRIEF_S = 0.15
SERVED, ALIAS = "m-one", "m-two"


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What a test wants of its worker."""

    version: str
    ranks: int = 1
    #: Sleep mode, weight transfer, LoRA and KV events switched on.
    configured: bool = False
    #: The frontend owns its engine.
    managed: bool = False
    #: Shutdown time-out, seconds.
    drain_s: float = 0.0
    certs: Certs | None = None
    mutual: bool = False


class Rig(Protocol):
    """A worker under test."""

    #: Whether it is the genuine binary, which leaves some things to chance.
    genuine: bool
    target: str
    lora_path: str
    kv_endpoint: str

    def die(self, *, reported: bool, rank: int | None = None) -> None: ...
    def hang(self, rank: int | None = None) -> None: ...
    def unhang(self) -> None: ...
    def freeze(self) -> None: ...
    def thaw(self) -> None: ...
    def drain(self) -> None: ...
    def stop(self) -> None: ...
    def restart(self) -> None: ...
    def set_rank(self, rank: int, *, paused: bool = False, weight_version: str = "default") -> None: ...
    def running(self, count: int) -> bool:
        """Whether so many generations are in flight in the engines."""


class FakeRig:
    """FakeWorker at a version."""

    genuine = False
    lora_path = "/adapters/a"
    kv_endpoint = "tcp://*:5557"

    def __init__(self, worker: FakeWorker, wish: Wish) -> None:
        self._worker = worker
        self._wish = wish
        self.target = worker.target

    def die(self, *, reported: bool, rank: int | None = None) -> None:
        self._worker.die(reported=reported, rank=rank)

    def hang(self, rank: int | None = None) -> None:
        self._worker.hang(rank)

    def unhang(self) -> None:
        self._worker.unhang()

    def freeze(self) -> None:
        self._worker.freeze()

    def thaw(self) -> None:
        self._worker.thaw()

    def drain(self) -> None:
        self._worker.drain(self._wish.drain_s, busy=False)

    def stop(self) -> None:
        self._worker.stop()

    def restart(self) -> None:
        self._worker.restart()

    def set_rank(self, rank: int, *, paused: bool = False, weight_version: str = "default") -> None:
        self._worker.set(rank=rank, paused=paused, weight_version=weight_version)

    def running(self, count: int) -> bool:
        generations = [call for call in self._worker.calls if call.method == "Inference.Generate"]
        return sum(call.code is None for call in generations) >= count


class RealRig:
    """The genuine frontend."""

    genuine = True

    def __init__(self, stack: Stack, lora_path: Path) -> None:
        self._stack = stack
        self.target = stack.target
        self.lora_path = str(lora_path)
        self.kv_endpoint = f"tcp://*:{stack.kv_endpoint().rpartition(':')[2]}"

    def die(self, *, reported: bool, rank: int | None = None) -> None:
        self._stack.die(rank, mode="sentinel" if reported else "abrupt")

    def hang(self, rank: int | None = None) -> None:
        self._stack.hang(rank)

    def unhang(self) -> None:
        for rank, status in self._stack.status().items():
            if status["state"] == "hung":
                self._stack.unhang(rank)

    def freeze(self) -> None:
        self._stack.freeze_frontend()

    def thaw(self) -> None:
        self._stack.thaw_frontend()

    def drain(self) -> None:
        self._stack.terminate()

    def stop(self) -> None:
        self._stack.terminate()
        self._stack.wait_exit()

    def restart(self) -> None:
        self._stack.restart()

    def set_rank(self, rank: int, *, paused: bool = False, weight_version: str = "default") -> None:
        self._stack.set(rank, paused="abort" if paused else None, weight_version=weight_version)

    def running(self, count: int) -> bool:
        busy = [status for status in self._stack.status().values() if status["in_flight"]]
        # A request that has no token yet may not have been admitted, and a pause does not wait for it.
        admitted = all(status["counters"]["tokens"] for status in busy)
        return admitted and sum(len(status["in_flight"]) for status in busy) >= count


@contextmanager
def fake_rig(wish: Wish) -> Iterator[FakeRig]:
    """A started fake."""
    tls = None
    if wish.certs is not None:
        certs = wish.certs
        tls = TlsFiles(cert=certs.server_cert, key=certs.server_key, ca=certs.ca, require_client_cert=wish.mutual)
    sources = [_source(rank) for rank in range(wish.ranks)] if wish.configured else []
    with FakeWorker(version=wish.version, ranks=wish.ranks, info=_info(wish), kv_sources=sources, tls=tls) as worker:
        worker.set(
            token_interval_s=INTERVAL_S,
            managed=wish.managed,
            lora_path_prefixes=("/adapters",),
            served_model_name=SERVED,
            served_model_aliases=(ALIAS,),
        )
        yield FakeRig(worker, wish)


@contextmanager
def real_rig(wish: Wish, model: Path, directory: Path) -> Iterator[RealRig]:
    """A started frontend with its engines."""
    facts = EngineFacts(
        instance_id="first",
        max_model_len=3001,
        block_size=17,
        num_gpu_blocks=1001,
        max_num_seqs=301,
        max_num_batched_tokens=5001,
        tensor_parallel_size=2,
        pipeline_parallel_size=3,
        decode_context_parallel_size=4,
        effective_attention_block_size=68,
        token_interval=INTERVAL_S,
    )
    kv = False if not wish.configured else KvEventsFacts(topic="kv@m")
    if wish.configured:
        facts.max_loras = 7
        facts.enable_sleep_mode = facts.supports_draft_weight_updates = True
        facts.weight_transfer_backend = "nccl"
    adapter = directory / "adapters" / "a"
    adapter.mkdir(parents=True)
    arguments = ["--served-model-name", SERVED, ALIAS]
    if wish.drain_s:
        arguments += ["--shutdown-timeout", str(int(wish.drain_s))]
    if wish.certs is not None:
        arguments += ["--ssl-certfile", str(wish.certs.server_cert), "--ssl-keyfile", str(wish.certs.server_key)]
        if wish.mutual:
            arguments += ["--ssl-ca-certs", str(wish.certs.ca), "--ssl-cert-reqs", "2"]
    stack = Stack(
        wish.version,
        engines=wish.ranks,
        facts=facts,
        kv_events=kv,
        mode="managed" if wish.managed else "thread",
        frontend_args=arguments,
        env={"VLLM_RUNTIME_LORA_ALLOWED_PATH_PREFIXES": str(adapter.parent)},
        model=model,
        directory=directory,
    )
    with ExitStack() as after:
        after.callback(stack.stop)
        stack.start()
        yield RealRig(stack, adapter)


def expected_info(version: tuple[int, int], wish: Wish, instance_id: str | None) -> ServerInfo:
    """What a worker of that version says of the facts above: later fields are unknown, never zero."""
    full = _info(wish)
    assert full.parallelism is not None
    return ServerInfo(
        engine_version=wish.version,
        api_version="vllm",
        instance_id=instance_id,
        parallelism=Parallelism(
            tensor_parallel_size=2,
            pipeline_parallel_size=3,
            data_parallel_size=wish.ranks,
            decode_context_parallel_size=4,
            world_size=6 if version >= (0, 29) else None,
            data_parallel_size_local=wish.ranks if version >= (0, 31) else None,
        ),
        max_model_len=3001,
        kv_block_size=17,
        total_kv_blocks=1001 * wish.ranks,
        max_running_requests=301,
        max_batched_tokens=5001,
        max_loras=full.max_loras if version >= (0, 29) else None,
        rl_capabilities=full.rl_capabilities if version >= (0, 28) else None,
        effective_attention_block_size=68 if version >= (0, 31) else None,
        proto_version="0.6.0" if version >= (0, 33) else None,
    )


def _info(wish: Wish) -> ServerInfo:
    on = wish.configured
    return ServerInfo(
        api_version="vllm",
        instance_id="first",
        parallelism=Parallelism(
            tensor_parallel_size=2,
            pipeline_parallel_size=3,
            data_parallel_size=wish.ranks,
            decode_context_parallel_size=4,
            world_size=6,
            data_parallel_size_local=wish.ranks,
        ),
        max_model_len=3001,
        kv_block_size=17,
        total_kv_blocks=1001 * wish.ranks,
        max_running_requests=301,
        max_batched_tokens=5001,
        max_loras=7 if on else None,
        rl_capabilities=RlCapabilities(
            weight_transfer_enabled=on,
            weight_transfer_backend="nccl" if on else None,
            sleep_mode_enabled=on,
            draft_weight_updates_enabled=on,
        ),
        effective_attention_block_size=68,
        proto_version="0.6.0",
    )


def _source(rank: int) -> KvEventSource:
    return KvEventSource(
        transport="zmq",
        endpoint=f"tcp://*:{5557 + rank}",
        replay_endpoint=f"tcp://*:{5567 + rank}",
        topic="kv@m",
        data_parallel_rank=rank,
        encoding="msgpack",
        schema_version=1,
        buffer_steps=10_000,
        hwm=100_000,
        max_queue_size=100_000,
    )


async def aside(work: Any) -> Any:
    """Do a verb of a rig off the event loop, so that clients go on meanwhile."""
    return await asyncio.to_thread(work)
