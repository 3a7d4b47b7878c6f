"""One pure function per RPC. A call is a value; the two clients only differ in how they run it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from vllm_cp import _wire
from vllm_cp.errors import ControlError, NotFound
from vllm_cp.models.health import HealthStatus

if TYPE_CHECKING:
    from vllm_cp.models.generated import Generated
    from vllm_cp.models.kv_source import KvEventSource
    from vllm_cp.models.lora import LoraAdapter
    from vllm_cp.models.model import ModelInfo
    from vllm_cp.models.pause import PauseMode
    from vllm_cp.models.server import ServerInfo

__all__ = ["Call"]

T = TypeVar("T")

_CONTROL = "/vllm.Control/"
_HEALTH = "/grpc.health.v1.Health/"
_INFERENCE = "/vllm.Inference/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Generic[T]):
    """One RPC, ready to run: what to send where, how to read the answer, and whether it may be asked again."""

    #: ``/vllm.Control/GetServerInfo``.
    path: str
    request: bytes
    parse: Callable[[bytes], T]
    #: A read: asking twice does no harm.
    safe: bool
    #: The vLLM version that brought the RPC.
    since: str
    #: Errors that are answers.
    answers: Mapping[type[ControlError], T] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def method(self) -> str:
        """The short name that errors and records carry: ``Control.GetServerInfo``."""
        return short_name(self.path)


def short_name(path: str) -> str:
    """``/grpc.health.v1.Health/Check`` -> ``Health.Check``."""
    service, _, method = path.rpartition("/")
    return f"{service.rpartition('.')[2]}.{method}"


def _read(path: str, parse: Callable[[bytes], T], *, since: str, request: bytes = _wire.EMPTY) -> Call[T]:
    return Call(path=path, request=request, parse=parse, safe=True, since=since)


def _change(name: str, request: bytes = _wire.EMPTY, *, since: str) -> Call[None]:
    return Call(path=_CONTROL + name, request=request, parse=_wire.nothing, safe=False, since=since)


def check(service: str) -> Call[HealthStatus]:
    return Call(
        path=_HEALTH + "Check",
        request=_wire.health_request(service),
        parse=_wire.health_status,
        safe=True,
        since="0.27",
        answers={NotFound: HealthStatus.SERVICE_UNKNOWN},
    )


def watch(service: str) -> Call[HealthStatus]:
    """A stream; ``parse`` reads each message of it."""
    return _read(_HEALTH + "Watch", _wire.health_status, since="0.27", request=_wire.health_request(service))


def server_info() -> Call[ServerInfo]:
    return _read(_CONTROL + "GetServerInfo", _wire.server_info, since="0.27")


def model_info() -> Call[ModelInfo]:
    return _read(_CONTROL + "GetModelInfo", _wire.model_info, since="0.27")


def kv_event_sources(worker_host: str | None) -> Call[tuple[KvEventSource, ...]]:
    def parse(data: bytes) -> tuple[KvEventSource, ...]:
        return _wire.kv_event_sources(data, worker_host)

    return _read(_CONTROL + "GetKvEventSources", parse, since="0.27")


def abort(request_ids: Iterable[str]) -> Call[None]:
    return _change("Abort", _wire.abort_request(request_ids), since="0.27")


def is_paused() -> Call[bool]:
    return _read(_CONTROL + "IsPaused", _wire.paused, since="0.28")


def is_sleeping() -> Call[bool]:
    return _read(_CONTROL + "IsSleeping", _wire.sleeping, since="0.28")


def weight_version() -> Call[str]:
    return _read(_CONTROL + "GetWeightVersion", _wire.weight_version, since="0.28")


def pause(mode: PauseMode, clear_cache: bool) -> Call[None]:
    return _change("PauseGeneration", _wire.pause_request(mode, clear_cache), since="0.28")


def resume() -> Call[None]:
    return _change("ResumeGeneration", since="0.28")


def sleep(level: int, mode: PauseMode) -> Call[None]:
    return _change("Sleep", _wire.sleep_request(level, mode), since="0.28")


def wake_up(tags: Iterable[str]) -> Call[None]:
    return _change("WakeUp", _wire.wake_up_request(tags), since="0.28")


def list_loras() -> Call[tuple[LoraAdapter, ...]]:
    return _read(_CONTROL + "ListLoras", _wire.loras, since="0.29")


def load_lora(name: str, path: str) -> Call[LoraAdapter]:
    request = _wire.load_lora_request(name, path)
    return Call(path=_CONTROL + "LoadLora", request=request, parse=_wire.loaded_lora, safe=False, since="0.29")


def unload_lora(name: str) -> Call[LoraAdapter]:
    request = _wire.unload_lora_request(name)
    return Call(path=_CONTROL + "UnloadLora", request=request, parse=_wire.unloaded_lora, safe=False, since="0.29")


def init_weight_transfer_engine(init_info: Mapping[str, Any]) -> Call[None]:
    return _change("InitWeightTransferEngine", _wire.init_weight_transfer_request(init_info), since="0.28")


def start_weight_update() -> Call[None]:
    return _change("StartWeightUpdate", since="0.28")


def start_draft_weight_update() -> Call[None]:
    return _change("StartDraftWeightUpdate", since="0.28")


def update_weights(update_info: Mapping[str, Any]) -> Call[None]:
    return _change("UpdateWeights", _wire.update_weights_request(update_info), since="0.28")


def finish_weight_update(version: str | None) -> Call[None]:
    return _change("FinishWeightUpdate", _wire.finish_weight_update_request(version), since="0.28")


def update_weight_version(version: str) -> Call[None]:
    return _change("UpdateWeightVersion", _wire.update_weight_version_request(version), since="0.28")


def generate(prompt: str | Sequence[int], max_tokens: int, request_id: str | None) -> Call[Generated]:
    request = _wire.generate_request(prompt, max_tokens, request_id)
    return Call(path=_INFERENCE + "Generate", request=request, parse=_wire.generated, safe=False, since="0.27")


def shutdown() -> Call[None]:
    return _change("Shutdown", since="0.32")
