"""What a server says it is."""

from __future__ import annotations

from vllm_cp._proto import control_pb2 as control
from vllm_cp._wire.messages import read
from vllm_cp.models.kv_source import KvEventSource, resolve_address
from vllm_cp.models.model import ModelInfo
from vllm_cp.models.server import Parallelism, RlCapabilities, ServerInfo

__all__: list[str] = []


def server_info(data: bytes) -> ServerInfo:
    m = read(control.ServerInfo, data)
    return ServerInfo(
        engine_version=m.engine_version,
        api_version=m.api_version,
        instance_id=m.instance_id or None,
        parallelism=_parallelism(m.parallelism) if m.HasField("parallelism") else None,
        max_model_len=m.max_model_len or None,
        kv_block_size=m.kv_block_size or None,
        total_kv_blocks=m.total_kv_blocks or None,
        max_running_requests=m.max_running_requests or None,
        max_batched_tokens=m.max_batched_tokens or None,
        max_loras=m.max_loras or None,
        rl_capabilities=_rl_capabilities(m.rl_capabilities) if m.HasField("rl_capabilities") else None,
        proto_version=m.proto_version or None,
        effective_attention_block_size=(
            m.effective_attention_block_size or None if m.HasField("effective_attention_block_size") else None
        ),
    )


def _parallelism(m: control.ParallelismInfo) -> Parallelism:
    return Parallelism(
        tensor_parallel_size=m.tensor_parallel_size or None,
        pipeline_parallel_size=m.pipeline_parallel_size or None,
        data_parallel_size=m.data_parallel_size or None,
        data_parallel_rank=m.data_parallel_rank,
        decode_context_parallel_size=m.decode_context_parallel_size or None,
        world_size=m.world_size or None,
        data_parallel_size_local=m.data_parallel_size_local or None,
    )


def _rl_capabilities(m: control.RlCapabilities) -> RlCapabilities:
    return RlCapabilities(
        weight_transfer_enabled=m.weight_transfer_enabled,
        weight_transfer_backend=m.weight_transfer_backend or None,
        sleep_mode_enabled=m.sleep_mode_enabled,
        draft_weight_updates_enabled=m.draft_weight_updates_enabled,
    )


def model_info(data: bytes) -> ModelInfo:
    m = read(control.ModelInfo, data)
    return ModelInfo(
        model_id=m.model_id,
        served_model_name=m.served_model_name,
        served_model_aliases=tuple(m.served_model_aliases),
        supports_text_input=m.supports_text_input,
        supports_token_ids_input=m.supports_token_ids_input,
        # Older servers do not have the field, and a plain false looks the same: only a yes is knowledge.
        supports_lora=m.supports_lora or None,
        supports_multimodal=m.supports_multimodal,
        reasoning_parser=m.reasoning_parser or None,
        tool_call_parser=m.tool_call_parser or None,
    )


def kv_event_sources(data: bytes, worker_host: str | None) -> tuple[KvEventSource, ...]:
    return tuple(
        KvEventSource(
            transport=m.transport,
            endpoint=m.endpoint,
            replay_endpoint=m.replay_endpoint or None,
            topic=m.topic,
            data_parallel_rank=m.data_parallel_rank if m.HasField("data_parallel_rank") else None,
            encoding=m.encoding,
            schema_version=m.schema_version or None,
            buffer_steps=m.buffer_steps or None,
            hwm=m.hwm,
            max_queue_size=m.max_queue_size or None,
            live=resolve_address(m.endpoint, worker_host, m.transport),
            replay=resolve_address(m.replay_endpoint, worker_host, m.transport),
        )
        for m in read(control.GetKvEventSourcesResponse, data).sources
    )
