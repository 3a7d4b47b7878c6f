"""The RPCs of vllm.Control, as a fake worker answers them."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from google.protobuf.message import Message

from vllm_cp._proto import control_pb2 as control
from vllm_cp.testing._bell import Refusal
from vllm_cp.testing._engine import PARTS, Rank

if TYPE_CHECKING:
    from vllm_cp.testing._frontend import Frontend

__all__ = ["CONTROL"]

Answer = Callable[["Frontend", Any], Awaitable[bytes]]

_MODES = {
    control.PAUSE_MODE_UNSPECIFIED: "abort",
    control.PAUSE_MODE_ABORT: "abort",
    control.PAUSE_MODE_WAIT: "wait",
    control.PAUSE_MODE_KEEP: "keep",
}
_NOTHING = b""


async def _server_info(front: Frontend, _: Message) -> bytes:
    return front.facts.encode()[0]


async def _model_info(front: Frontend, _: Message) -> bytes:
    return front.facts.encode()[1]


async def _kv_event_sources(front: Frontend, _: Message) -> bytes:
    return front.facts.encode()[2]


async def _abort(front: Frontend, request: control.AbortRequest) -> bytes:
    front.engines.abort(request.request_ids)
    return _NOTHING


# -- pause and sleep


async def _pause(front: Frontend, request: control.PauseGenerationRequest) -> bytes:
    await front.engines.pause("pause_generation", _mode(request.mode), refuse=front.facts.version >= (0, 33))
    return _NOTHING


async def _resume(front: Frontend, _: Message) -> bytes:
    await front.engines.resume("resume_generation")
    return _NOTHING


async def _is_paused(front: Frontend, _: Message) -> bytes:
    said = await front.engines.agreed("is_paused", "is_scheduler_paused", lambda rank: rank.paused is not None)
    return control.IsPausedResponse(paused=bool(said)).SerializeToString()


async def _is_sleeping(front: Frontend, _: Message) -> bytes:
    said = await front.engines.agreed("is_sleeping", "is_sleeping", lambda rank: rank.sleeping)
    return control.IsSleepingResponse(sleeping=bool(said)).SerializeToString()


async def _sleep(front: Frontend, request: control.SleepRequest) -> bytes:
    _needs_sleep_mode(front)
    parts = PARTS if not request.HasField("level") or request.level >= 1 else frozenset[str]()
    await front.engines.pause("sleep", _mode(request.mode), refuse=False, asleep=parts)
    return _NOTHING


async def _wake_up(front: Frontend, request: control.WakeUpRequest) -> bytes:
    _needs_sleep_mode(front)
    await front.engines.wake("wake_up", frozenset(request.tags) if request.tags else PARTS)
    return _NOTHING


def _mode(number: int) -> str:
    if number not in _MODES:
        raise Refusal("INVALID_ARGUMENT", "invalid pause mode")
    return _MODES[number]  # type: ignore[index]  # protobuf enums are ints


def _needs_sleep_mode(front: Frontend) -> None:
    if not front.facts.rl.sleep_mode_enabled:
        raise Refusal("FAILED_PRECONDITION", "sleep mode is not configured; start vLLM with --enable-sleep-mode")


# -- weights


async def _init_weight_transfer(front: Frontend, request: control.InitWeightTransferEngineRequest) -> bytes:
    return await _transfer(front, "init_weight_transfer_engine", init_info_json=request.init_info_json)


async def _start_update(front: Frontend, _: Message) -> bytes:
    return await _transfer(front, "start_weight_update")


async def _start_draft_update(front: Frontend, _: Message) -> bytes:
    return await _transfer(front, "start_draft_weight_update")


async def _update(front: Frontend, request: control.UpdateWeightsRequest) -> bytes:
    return await _transfer(front, "update_weights", update_info_json=request.update_info_json)


async def _finish_update(front: Frontend, request: control.FinishWeightUpdateRequest) -> bytes:
    _needs_weight_transfer(front)
    name = request.weight_version if request.HasField("weight_version") else None
    await front.engines.change("finish_weight_update", partial(_name_weights, _weights(name)))
    return _NOTHING


async def _set_weight_version(front: Frontend, request: control.UpdateWeightVersionRequest) -> bytes:
    name = _weights(request.weight_version)
    await front.engines.change("update_weight_version", partial(_name_weights, name))
    return _NOTHING


def _weights(name: str | None) -> str | None:
    if name == "":
        raise Refusal("INVALID_ARGUMENT", "weight_version must not be empty")
    return name


def _name_weights(name: str | None, rank: Rank) -> None:
    if name is not None:
        rank.weight_version = name


async def _transfer(front: Frontend, what: str, **documents: bytes) -> bytes:
    _needs_weight_transfer(front)
    for name, text in documents.items():
        try:
            value = json.loads(text)
        except ValueError as error:
            raise Refusal("INVALID_ARGUMENT", f"{name} must contain valid JSON: {error}") from None
        if not isinstance(value, dict):
            raise Refusal("INVALID_ARGUMENT", f"{name} must contain a JSON object")
    await front.engines.change(what, lambda _: None)
    return _NOTHING


def _needs_weight_transfer(front: Frontend) -> None:
    if not front.facts.rl.weight_transfer_enabled:
        raise Refusal(
            "FAILED_PRECONDITION", "weight transfer is not configured; start vLLM with --weight-transfer-config"
        )


async def _weight_version(front: Frontend, _: Message) -> bytes:
    said = await front.engines.agreed("get_weight_version", "get_weight_version", lambda rank: rank.weight_version)
    return control.GetWeightVersionResponse(weight_version=str(said)).SerializeToString()


# -- LoRA


async def _load_lora(front: Frontend, request: control.LoadLoraRequest) -> bytes:
    _needs_lora(front)
    name, path = request.lora_name, request.source_path
    if not name:
        raise Refusal("INVALID_ARGUMENT", "lora_name must not be empty")
    if not path:
        raise Refusal("INVALID_ARGUMENT", "lora_path must not be empty")
    if path.startswith("/"):
        _needs_path(front, path)
    if name in front.engines.loras:
        raise Refusal("ALREADY_EXISTS", f"LoRA adapter `{name}` is already loaded")
    lora_id = front.engines.next_lora_id()
    await front.engines.answer(f"failed to load LoRA adapter `{name}`")
    front.engines.loras[name] = (lora_id, path)
    return control.LoadLoraResponse(adapter=_adapter(name, lora_id, path)).SerializeToString()


def _needs_path(front: Frontend, path: str) -> None:
    if not front.facts.lora_path_prefixes:
        raise Refusal(
            "INVALID_ARGUMENT",
            "Local LoRA adapter paths require VLLM_RUNTIME_LORA_ALLOWED_PATH_PREFIXES to be configured.",
        )
    if not path.startswith(front.facts.lora_path_prefixes):
        raise Refusal("INVALID_ARGUMENT", "Local LoRA adapter path is outside the configured allowed prefixes.")


async def _unload_lora(front: Frontend, request: control.UnloadLoraRequest) -> bytes:
    name = request.lora_name
    if not name:
        raise Refusal("INVALID_ARGUMENT", "lora_name is required")
    _needs_lora(front)
    if name not in front.engines.loras:
        raise Refusal("NOT_FOUND", f"LoRA adapter `{name}` is not loaded")
    await front.engines.answer(f"failed to unload LoRA adapter `{name}`")
    lora_id, path = front.engines.loras.pop(name)
    return control.UnloadLoraResponse(adapter=_adapter(name, lora_id, path)).SerializeToString()


async def _list_loras(front: Frontend, _: Message) -> bytes:
    _needs_lora(front)
    adapters = [_adapter(name, lora_id, path) for name, (lora_id, path) in sorted(front.engines.loras.items())]
    return control.ListLorasResponse(adapters=adapters).SerializeToString()


def _needs_lora(front: Frontend) -> None:
    if not front.facts.max_loras:
        raise Refusal("FAILED_PRECONDITION", "engine was not started with LoRA enabled")


def _adapter(name: str, lora_id: int, path: str) -> control.LoraAdapter:
    return control.LoraAdapter(lora_id=lora_id, lora_name=name, source_path=path)


# -- shutdown


async def _shutdown(front: Frontend, _: Message) -> bytes:
    if not front.facts.managed:
        raise Refusal("FAILED_PRECONDITION", "this frontend does not manage the engine process")
    front.stop_soon()
    return _NOTHING


#: Method name -> (since, request type, answer).
CONTROL: dict[str, tuple[tuple[int, int], type[Message], Answer]] = {
    "GetServerInfo": ((0, 27), control.GetServerInfoRequest, _server_info),
    "GetModelInfo": ((0, 27), control.GetModelInfoRequest, _model_info),
    "GetKvEventSources": ((0, 27), control.GetKvEventSourcesRequest, _kv_event_sources),
    "Abort": ((0, 27), control.AbortRequest, _abort),
    "PauseGeneration": ((0, 28), control.PauseGenerationRequest, _pause),
    "ResumeGeneration": ((0, 28), control.ResumeGenerationRequest, _resume),
    "IsPaused": ((0, 28), control.IsPausedRequest, _is_paused),
    "Sleep": ((0, 28), control.SleepRequest, _sleep),
    "WakeUp": ((0, 28), control.WakeUpRequest, _wake_up),
    "IsSleeping": ((0, 28), control.IsSleepingRequest, _is_sleeping),
    "InitWeightTransferEngine": ((0, 28), control.InitWeightTransferEngineRequest, _init_weight_transfer),
    "StartWeightUpdate": ((0, 28), control.StartWeightUpdateRequest, _start_update),
    "StartDraftWeightUpdate": ((0, 28), control.StartDraftWeightUpdateRequest, _start_draft_update),
    "UpdateWeights": ((0, 28), control.UpdateWeightsRequest, _update),
    "FinishWeightUpdate": ((0, 28), control.FinishWeightUpdateRequest, _finish_update),
    "UpdateWeightVersion": ((0, 28), control.UpdateWeightVersionRequest, _set_weight_version),
    "GetWeightVersion": ((0, 28), control.GetWeightVersionRequest, _weight_version),
    "LoadLora": ((0, 29), control.LoadLoraRequest, _load_lora),
    "UnloadLora": ((0, 29), control.UnloadLoraRequest, _unload_lora),
    "ListLoras": ((0, 29), control.ListLorasRequest, _list_loras),
    "Shutdown": ((0, 32), control.ShutdownRequest, _shutdown),
}
