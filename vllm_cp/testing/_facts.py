"""What a fake worker says about itself, and which vLLM version says what."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import fields, replace
from difflib import get_close_matches
from typing import Any
from uuid import uuid4

from vllm_cp._proto import control_pb2 as control
from vllm_cp.models.kv_source import KvEventSource
from vllm_cp.models.model import ModelInfo
from vllm_cp.models.server import Parallelism, RlCapabilities, ServerInfo

__all__ = ["Facts", "new_instance_id", "version_of"]

Version = tuple[int, ...]
OLDEST: Version = (0, 27)

#: Fields that came after 0.27, by message.
_SINCE: dict[type, dict[str, Version]] = {
    ServerInfo: {
        "rl_capabilities": (0, 28),
        "max_loras": (0, 29),
        "effective_attention_block_size": (0, 31),
        "proto_version": (0, 33),
    },
    Parallelism: {"world_size": (0, 29), "data_parallel_size_local": (0, 31)},
    RlCapabilities: {},
    ModelInfo: {"supports_lora": (0, 29)},
}


def version_of(text: str) -> Version:
    """``0.33.0`` -> (0, 33, 0). Raises ValueError for what was never a Rust frontend with a control plane."""
    found = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", text)
    numbers = tuple(int(n) for n in found.groups(default="0")) if found else ()
    if numbers < OLDEST:
        raise ValueError(f"version {text!r}: vLLM has this control plane from 0.27.0 on; write for example 0.33.0")
    return numbers


def new_instance_id() -> str:
    """An id unlike any before."""
    return str(uuid4().int % 2**63)


class Facts:
    """The answers of GetServerInfo, GetModelInfo and GetKvEventSources, and some settings of the fake itself."""

    def __init__(
        self,
        version: str,
        ranks: int,
        info: ServerInfo | None,
        model: ModelInfo | None,
        kv_sources: Sequence[KvEventSource],
    ) -> None:
        self.version = version_of(version)
        self.info = info if info is not None else _default_info(ranks)
        if not self.info.engine_version:
            self.info = replace(self.info, engine_version=version)
        self.parallelism = self.info.parallelism
        self.rl = self.info.rl_capabilities if self.info.rl_capabilities is not None else RlCapabilities()
        self.model = model if model is not None else _default_model()
        self.kv_sources = tuple(kv_sources)
        #: Seconds between two tokens of a generation.
        self.token_interval_s = 0.0
        #: Whether the frontend started its engine itself and so may be shut down over gRPC.
        self.managed = False
        #: Path prefixes under which adapters may be loaded.
        self.lora_path_prefixes: tuple[str, ...] = ("/",)
        self.encode()

    def set(self, facts: dict[str, Any]) -> None:
        """Change facts by name. Raises TypeError for a name or a value that cannot be; then nothing has changed."""
        before = dict(vars(self))
        try:
            for name, value in facts.items():
                self._set(name, value)
            self.encode()
        except (TypeError, ValueError) as error:
            vars(self).update(before)
            raise error if isinstance(error, TypeError) else TypeError(str(error)) from error

    def _set(self, name: str, value: Any) -> None:
        if name in ("token_interval_s", "managed", "lora_path_prefixes", "kv_sources"):
            setattr(self, name, tuple(value) if name in ("kv_sources", "lora_path_prefixes") else value)
        elif name == "parallelism":
            self.parallelism = value
        elif name == "rl_capabilities":
            self.rl = value if value is not None else RlCapabilities()
        elif name in _names(ServerInfo):
            self.info = replace(self.info, **{name: value})
        elif name in _names(Parallelism):
            self.parallelism = replace(self.parallelism or Parallelism(), **{name: value})
        elif name in _names(RlCapabilities):
            self.rl = replace(self.rl, **{name: value})
        elif name in _names(ModelInfo):
            self.model = replace(self.model, **{name: value})
        else:
            raise TypeError(unknown_fact(name))

    def encode(self) -> tuple[bytes, bytes, bytes]:
        """The three discovery answers at this version. Raises TypeError or ValueError for values that do not fit."""
        info = self._fill(control.ServerInfo(), self.info)
        if self.parallelism is not None:
            info.parallelism.SetInParent()
            self._fill(info.parallelism, self.parallelism)
        if self.version >= _SINCE[ServerInfo]["rl_capabilities"]:
            info.rl_capabilities.SetInParent()
            self._fill(info.rl_capabilities, self.rl)
        model = self._fill(control.ModelInfo(), self.model)
        if self.model.supports_lora is None and self.max_loras and self.version >= _SINCE[ModelInfo]["supports_lora"]:
            model.supports_lora = True
        sources = control.GetKvEventSourcesResponse(sources=[_source(source) for source in self.kv_sources])
        return info.SerializeToString(), model.SerializeToString(), sources.SerializeToString()

    @property
    def max_loras(self) -> int:
        """Adapters at once; 0 is LoRA off."""
        return self.info.max_loras or 0

    def _fill(self, message: Any, facts: Any) -> Any:
        since = _SINCE[type(facts)]
        for name in _names(type(facts)):
            value = getattr(facts, name)
            if value is None or name in ("parallelism", "rl_capabilities") or self.version < since.get(name, OLDEST):
                continue
            if isinstance(value, tuple):
                getattr(message, name).extend(value)
            else:
                setattr(message, name, value)
        return message


def unknown_fact(name: str) -> str:
    """The message for a fact that does not exist."""
    known = sorted(
        {name for kind in _SINCE for name in _names(kind)}
        | {"token_interval_s", "managed", "lora_path_prefixes", "kv_sources", "paused", "sleeping", "weight_version"}
    )
    close = get_close_matches(name, known, n=1)
    return f"no fact is called {name!r}" + (f"; did you mean {close[0]!r}?" if close else f"; one of {known}")


def _names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


def _default_info(ranks: int) -> ServerInfo:
    return ServerInfo(
        api_version="vllm",
        instance_id=new_instance_id(),
        parallelism=Parallelism(
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            data_parallel_size=ranks,
            decode_context_parallel_size=1,
            world_size=1,
            data_parallel_size_local=ranks,
        ),
        max_model_len=4096,
        kv_block_size=16,
        total_kv_blocks=1024 * ranks,
        max_running_requests=256,
        max_batched_tokens=8192,
        proto_version="0.6.0",
        effective_attention_block_size=16,
    )


def _default_model() -> ModelInfo:
    return ModelInfo(
        model_id="/models/tiny",
        served_model_name="tiny",
        supports_text_input=True,
        supports_token_ids_input=True,
    )


def _source(source: KvEventSource) -> control.KvEventSource:
    return control.KvEventSource(
        transport=source.transport,
        endpoint=source.endpoint,
        topic=source.topic,
        replay_endpoint=source.replay_endpoint or "",
        data_parallel_rank=source.data_parallel_rank,
        encoding=source.encoding,
        schema_version=source.schema_version or 0,
        buffer_steps=source.buffer_steps or 0,
        hwm=source.hwm,
        max_queue_size=source.max_queue_size or 0,
    )
