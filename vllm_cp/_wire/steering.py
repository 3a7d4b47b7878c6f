"""Pause and sleep, LoRA adapters, weights."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from vllm_cp._proto import control_pb2 as control
from vllm_cp._wire import text
from vllm_cp._wire.messages import read
from vllm_cp.models.lora import LoraAdapter
from vllm_cp.models.pause import PauseMode

__all__: list[str] = []

_PAUSE = {
    PauseMode.ABORT: control.PAUSE_MODE_ABORT,
    PauseMode.WAIT: control.PAUSE_MODE_WAIT,
    PauseMode.KEEP: control.PAUSE_MODE_KEEP,
}


# -- pause and sleep -------------------------------------------------------------------


def pause_request(mode: PauseMode, clear_cache: bool) -> bytes:
    return control.PauseGenerationRequest(mode=_PAUSE[PauseMode(mode)], clear_cache=clear_cache).SerializeToString()


def sleep_request(level: int, mode: PauseMode) -> bytes:
    if level < 0:
        raise ValueError(f"the sleep level must be 0 or more, not {level}")
    return control.SleepRequest(level=level, mode=_PAUSE[PauseMode(mode)]).SerializeToString()


def wake_up_request(tags: Iterable[str]) -> bytes:
    if isinstance(tags, str):
        raise TypeError("tags is one string: pass a list of tags, [tag]")
    return control.WakeUpRequest(tags=[text("tag", t) for t in tags]).SerializeToString()


def paused(data: bytes) -> bool:
    return read(control.IsPausedResponse, data).paused


def sleeping(data: bytes) -> bool:
    return read(control.IsSleepingResponse, data).sleeping


# -- LoRA ------------------------------------------------------------------------------


def load_lora_request(name: str, path: str) -> bytes:
    request = control.LoadLoraRequest(lora_name=text("LoRA name", name), source_path=text("LoRA path", path))
    return request.SerializeToString()


def unload_lora_request(name: str) -> bytes:
    return control.UnloadLoraRequest(lora_name=text("LoRA name", name)).SerializeToString()


def loaded_lora(data: bytes) -> LoraAdapter:
    return _lora(read(control.LoadLoraResponse, data).adapter)


def unloaded_lora(data: bytes) -> LoraAdapter:
    return _lora(read(control.UnloadLoraResponse, data).adapter)


def loras(data: bytes) -> tuple[LoraAdapter, ...]:
    return tuple(_lora(m) for m in read(control.ListLorasResponse, data).adapters)


def _lora(m: control.LoraAdapter) -> LoraAdapter:
    return LoraAdapter(lora_id=m.lora_id, name=m.lora_name, source_path=m.source_path)


# -- weights ---------------------------------------------------------------------------


def init_weight_transfer_request(init_info: Mapping[str, Any]) -> bytes:
    return control.InitWeightTransferEngineRequest(init_info_json=_json(init_info)).SerializeToString()


def update_weights_request(update_info: Mapping[str, Any]) -> bytes:
    return control.UpdateWeightsRequest(update_info_json=_json(update_info)).SerializeToString()


def finish_weight_update_request(weight_version: str | None) -> bytes:
    m = control.FinishWeightUpdateRequest()
    if weight_version is not None:
        m.weight_version = text("weight version", weight_version)
    return m.SerializeToString()


def update_weight_version_request(weight_version: str) -> bytes:
    m = control.UpdateWeightVersionRequest(weight_version=text("weight version", weight_version))
    return m.SerializeToString()


def weight_version(data: bytes) -> str:
    return read(control.GetWeightVersionResponse, data).weight_version


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(dict(value), allow_nan=False).encode()
