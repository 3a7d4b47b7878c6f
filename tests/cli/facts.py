"""A fleet whose every answer is known: a rich worker, an old one that leaves much out, one that denies everything."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from vllm_cp import KvEventSource, ModelInfo, Parallelism, RlCapabilities, ServerInfo
from vllm_cp.testing import FakeWorker

RICH = ServerInfo(
    api_version="vllm",
    instance_id="6f1c0b6e-3f0a",
    parallelism=Parallelism(
        tensor_parallel_size=4,
        pipeline_parallel_size=2,
        data_parallel_size=2,
        data_parallel_rank=0,
        decode_context_parallel_size=1,
        world_size=8,
        data_parallel_size_local=2,
    ),
    max_model_len=131072,
    kv_block_size=4,
    total_kv_blocks=40960,
    max_running_requests=256,
    max_batched_tokens=8192,
    max_loras=8,
    rl_capabilities=RlCapabilities(
        weight_transfer_enabled=True, weight_transfer_backend="nccl", sleep_mode_enabled=True
    ),
    proto_version="0.6.0",
    effective_attention_block_size=256,
)
RICH_MODEL = ModelInfo(
    model_id="/models/llama-3.3-70b",
    served_model_name="llama-70b",
    served_model_aliases=("llama", "chat"),
    supports_text_input=True,
    supports_token_ids_input=True,
    supports_lora=True,
    supports_multimodal=False,
    reasoning_parser="deepseek_r1",
    tool_call_parser="llama3_json",
)


def source(endpoint: str, replay: str | None = None, *, rank: int | None = 0, transport: str = "zmq") -> KvEventSource:
    """One advertised publisher."""
    return KvEventSource(
        transport=transport,
        endpoint=endpoint,
        replay_endpoint=replay,
        topic="kv",
        data_parallel_rank=rank,
        encoding="msgpack",
        schema_version=1,
        buffer_steps=10000,
        hwm=100000,
        max_queue_size=100000,
    )


RICH_SOURCES = (
    source("tcp://*:5557", "tcp://*:5657", rank=0),
    source("tcp://*:5558", "tcp://*:5658", rank=1),
)
OLD = ServerInfo(api_version="vllm", instance_id="1", max_model_len=4096, total_kv_blocks=0, kv_block_size=0)
OLD_MODEL = ModelInfo(model_id="/models/tiny", served_model_name="tiny", supports_text_input=True)
#: All that the verbs call.
METHODS = (
    "Health.Check",
    "Health.Watch",
    *(
        f"Control.{name}"
        for name in (
            "GetServerInfo",
            "GetModelInfo",
            "GetKvEventSources",
            "Abort",
            "PauseGeneration",
            "ResumeGeneration",
            "IsPaused",
            "Sleep",
            "WakeUp",
            "GetWeightVersion",
            "UpdateWeightVersion",
            "LoadLora",
            "UnloadLora",
            "ListLoras",
            "Shutdown",
        )
    ),
)


@contextmanager
def known_fleet() -> Iterator[list[FakeWorker]]:
    """The three workers, running."""
    with (
        FakeWorker(version="0.33.0", ranks=2, info=RICH, model=RICH_MODEL, kv_sources=RICH_SOURCES) as rich,
        FakeWorker(version="0.27.0", info=OLD, model=OLD_MODEL) as old,
        FakeWorker() as denying,
    ):
        rich.set(managed=True)
        for method in METHODS:
            denying.fail(method, "PERMISSION_DENIED", "RBAC: access denied")
        yield [rich, old, denying]
