"""The one place that knows protobuf: bytes to models and arguments to bytes.

Presence is explicit here: a proto3 zero that means "unknown" leaves as ``None``, a zero that is a number stays one.
A part is loaded when a name of it is first used: a command that asks for health must not wait for all the rest.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_cp._wire.discovery import kv_event_sources as kv_event_sources
    from vllm_cp._wire.discovery import model_info as model_info
    from vllm_cp._wire.discovery import server_info as server_info
    from vllm_cp._wire.health import health_request as health_request
    from vllm_cp._wire.health import health_status as health_status
    from vllm_cp._wire.requests import abort_request as abort_request
    from vllm_cp._wire.requests import generate_request as generate_request
    from vllm_cp._wire.requests import generated as generated
    from vllm_cp._wire.steering import finish_weight_update_request as finish_weight_update_request
    from vllm_cp._wire.steering import init_weight_transfer_request as init_weight_transfer_request
    from vllm_cp._wire.steering import load_lora_request as load_lora_request
    from vllm_cp._wire.steering import loaded_lora as loaded_lora
    from vllm_cp._wire.steering import loras as loras
    from vllm_cp._wire.steering import pause_request as pause_request
    from vllm_cp._wire.steering import paused as paused
    from vllm_cp._wire.steering import sleep_request as sleep_request
    from vllm_cp._wire.steering import sleeping as sleeping
    from vllm_cp._wire.steering import unload_lora_request as unload_lora_request
    from vllm_cp._wire.steering import unloaded_lora as unloaded_lora
    from vllm_cp._wire.steering import update_weight_version_request as update_weight_version_request
    from vllm_cp._wire.steering import update_weights_request as update_weights_request
    from vllm_cp._wire.steering import wake_up_request as wake_up_request
    from vllm_cp._wire.steering import weight_version as weight_version

__all__: list[str] = []

EMPTY = b""

_HOMES = {
    "discovery": ("kv_event_sources", "model_info", "server_info"),
    "health": ("health_request", "health_status"),
    "requests": ("abort_request", "generate_request", "generated"),
    "steering": (
        "finish_weight_update_request",
        "init_weight_transfer_request",
        "load_lora_request",
        "loaded_lora",
        "loras",
        "pause_request",
        "paused",
        "sleep_request",
        "sleeping",
        "unload_lora_request",
        "unloaded_lora",
        "update_weight_version_request",
        "update_weights_request",
        "wake_up_request",
        "weight_version",
    ),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}


class UndecodableError(Exception):
    """The answer's bytes are no message of the expected kind."""


def nothing(data: bytes) -> None:
    """An answer that says no more than that it came."""


def text(what: str, value: str) -> str:
    """The value, if it can travel: protobuf strings are UTF-8."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{what} {value!r} is not valid Unicode text and cannot be sent") from None
    return value


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    return value
