"""A worker whose every answer is known."""

from __future__ import annotations

from vllm_cp import KvEventSource, ModelInfo, Parallelism, RlCapabilities, ServerInfo

SERVER = ServerInfo(
    engine_version="0.33.0",
    api_version="vllm",
    instance_id="6f1c0b6e-3f0a",
    parallelism=Parallelism(
        tensor_parallel_size=4,
        pipeline_parallel_size=1,
        data_parallel_size=2,
        data_parallel_rank=0,
        decode_context_parallel_size=1,
        world_size=4,
        data_parallel_size_local=2,
    ),
    max_model_len=131072,
    kv_block_size=16,
    total_kv_blocks=40960,
    max_running_requests=256,
    max_batched_tokens=8192,
    max_loras=8,
    rl_capabilities=RlCapabilities(sleep_mode_enabled=True),
    proto_version="0.6.0",
    effective_attention_block_size=256,
)
MODEL = ModelInfo(
    model_id="/models/llama-3.3-70b",
    served_model_name="llama-70b",
    served_model_aliases=("llama", "chat"),
    supports_text_input=True,
    supports_token_ids_input=True,
    supports_lora=True,
    tool_call_parser="llama3_json",
)


def source(port: int, rank: int | None) -> KvEventSource:
    """A publisher at a port, with its replay a hundred above."""
    return KvEventSource(
        transport="zmq",
        endpoint=f"tcp://*:{port}",
        replay_endpoint=f"tcp://*:{port + 100}",
        topic="kv",
        data_parallel_rank=rank,
        encoding="msgpack",
        schema_version=1,
        buffer_steps=10000,
        hwm=100000,
        max_queue_size=100000,
    )


SOURCES = (source(5557, 0), source(5558, 1))
