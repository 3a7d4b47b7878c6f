"""The one place that knows protobuf: bytes to models and arguments to bytes.

Presence is explicit here: a proto3 zero that means "unknown" leaves as ``None``, a zero that is a number stays one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message

from vllm_cp._proto import control_pb2 as control
from vllm_cp._proto import health_pb2 as health
from vllm_cp._proto import inference_pb2 as inference
from vllm_cp.models.generated import FinishReason, Generated
from vllm_cp.models.health import HealthStatus
from vllm_cp.models.kv_source import KvEventSource, resolve_address
from vllm_cp.models.lora import LoraAdapter
from vllm_cp.models.model import ModelInfo
from vllm_cp.models.pause import PauseMode
from vllm_cp.models.server import Parallelism, RlCapabilities, ServerInfo

__all__: list[str] = []

M = TypeVar("M", bound=Message)

EMPTY = b""

_PAUSE = {
    PauseMode.ABORT: control.PAUSE_MODE_ABORT,
    PauseMode.WAIT: control.PAUSE_MODE_WAIT,
    PauseMode.KEEP: control.PAUSE_MODE_KEEP,
}
_HEALTH = {
    health.HealthCheckResponse.UNKNOWN: HealthStatus.UNKNOWN,
    health.HealthCheckResponse.SERVING: HealthStatus.SERVING,
    health.HealthCheckResponse.NOT_SERVING: HealthStatus.NOT_SERVING,
    health.HealthCheckResponse.SERVICE_UNKNOWN: HealthStatus.SERVICE_UNKNOWN,
}
_FINISH = {
    inference.FinishInfo.NOT_FINISHED: FinishReason.NOT_FINISHED,
    inference.FinishInfo.LENGTH: FinishReason.LENGTH,
    inference.FinishInfo.STOP: FinishReason.STOP,
    inference.FinishInfo.ABORTED: FinishReason.ABORTED,
}


class UndecodableError(Exception):
    """The answer's bytes are no message of the expected kind."""


def _read(kind: Callable[[], M], data: bytes) -> M:
    message = kind()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise UndecodableError(str(error)) from None
    return message


def _text(what: str, value: str) -> str:
    """The value, if it can travel: protobuf strings are UTF-8."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{what} {value!r} is not valid Unicode text and cannot be sent") from None
    return value


# -- health ----------------------------------------------------------------------------


def health_request(service: str) -> bytes:
    return health.HealthCheckRequest(service=_text("service", service)).SerializeToString()


def health_status(data: bytes) -> HealthStatus:
    status = _read(health.HealthCheckResponse, data).status
    return _HEALTH.get(status, HealthStatus.UNKNOWN)


# -- discovery -------------------------------------------------------------------------


def server_info(data: bytes) -> ServerInfo:
    m = _read(control.ServerInfo, data)
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
    m = _read(control.ModelInfo, data)
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
        for m in _read(control.GetKvEventSourcesResponse, data).sources
    )


# -- requests and generation -------------------------------------------------------------


def abort_request(request_ids: Iterable[str]) -> bytes:
    if isinstance(request_ids, str):
        raise TypeError("request_ids is one string: pass a list of ids, [request_id]")
    ids = list(request_ids)
    if not all(ids):
        raise ValueError("a request id is empty: the server would ignore it without a word")
    return control.AbortRequest(request_ids=[_text("request id", i) for i in ids]).SerializeToString()


def generate_request(prompt: str | Sequence[int], max_tokens: int, request_id: str | None) -> bytes:
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be 1 or more, not {max_tokens}")
    m = inference.GenerateRequest(request_id=_text("request id", request_id or ""))
    if isinstance(prompt, str):
        m.text = _text("prompt", prompt)
    else:
        m.token_ids.ids.extend(prompt)
    m.stopping.max_new_tokens = max_tokens
    m.stopping.ignore_eos = True
    m.response.output_token_ids = True
    return m.SerializeToString()


def generated(data: bytes) -> Generated:
    m = _read(inference.GenerateResponse, data)
    finish = m.outputs.finish_info if m.outputs.HasField("finish_info") else None
    return Generated(
        text=m.outputs.text,
        token_ids=tuple(m.outputs.token_ids),
        finish_reason=FinishReason.NOT_FINISHED
        if finish is None
        else _FINISH.get(finish.finish_reason, FinishReason.UNKNOWN),
        prompt_tokens=m.prompt_info.num_prompt_tokens if m.HasField("prompt_info") else None,
        output_tokens=finish.num_output_tokens if finish is not None else None,
    )


# -- pause and sleep ---------------------------------------------------------------------


def pause_request(mode: PauseMode, clear_cache: bool) -> bytes:
    return control.PauseGenerationRequest(mode=_PAUSE[PauseMode(mode)], clear_cache=clear_cache).SerializeToString()


def sleep_request(level: int, mode: PauseMode) -> bytes:
    if level < 0:
        raise ValueError(f"the sleep level must be 0 or more, not {level}")
    return control.SleepRequest(level=level, mode=_PAUSE[PauseMode(mode)]).SerializeToString()


def wake_up_request(tags: Iterable[str]) -> bytes:
    if isinstance(tags, str):
        raise TypeError("tags is one string: pass a list of tags, [tag]")
    return control.WakeUpRequest(tags=[_text("tag", t) for t in tags]).SerializeToString()


def paused(data: bytes) -> bool:
    return _read(control.IsPausedResponse, data).paused


def sleeping(data: bytes) -> bool:
    return _read(control.IsSleepingResponse, data).sleeping


# -- LoRA ----------------------------------------------------------------------------------


def load_lora_request(name: str, path: str) -> bytes:
    request = control.LoadLoraRequest(lora_name=_text("LoRA name", name), source_path=_text("LoRA path", path))
    return request.SerializeToString()


def unload_lora_request(name: str) -> bytes:
    return control.UnloadLoraRequest(lora_name=_text("LoRA name", name)).SerializeToString()


def loaded_lora(data: bytes) -> LoraAdapter:
    return _lora(_read(control.LoadLoraResponse, data).adapter)


def unloaded_lora(data: bytes) -> LoraAdapter:
    return _lora(_read(control.UnloadLoraResponse, data).adapter)


def loras(data: bytes) -> tuple[LoraAdapter, ...]:
    return tuple(_lora(m) for m in _read(control.ListLorasResponse, data).adapters)


def _lora(m: control.LoraAdapter) -> LoraAdapter:
    return LoraAdapter(lora_id=m.lora_id, name=m.lora_name, source_path=m.source_path)


# -- weights -------------------------------------------------------------------------------


def init_weight_transfer_request(init_info: Mapping[str, Any]) -> bytes:
    return control.InitWeightTransferEngineRequest(init_info_json=_json(init_info)).SerializeToString()


def update_weights_request(update_info: Mapping[str, Any]) -> bytes:
    return control.UpdateWeightsRequest(update_info_json=_json(update_info)).SerializeToString()


def finish_weight_update_request(weight_version: str | None) -> bytes:
    m = control.FinishWeightUpdateRequest()
    if weight_version is not None:
        m.weight_version = _text("weight version", weight_version)
    return m.SerializeToString()


def update_weight_version_request(weight_version: str) -> bytes:
    m = control.UpdateWeightVersionRequest(weight_version=_text("weight version", weight_version))
    return m.SerializeToString()


def weight_version(data: bytes) -> str:
    return _read(control.GetWeightVersionResponse, data).weight_version


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(dict(value), allow_nan=False).encode()


def nothing(data: bytes) -> None:
    """An answer that says no more than that it came."""
