"""What a simulated engine reports about itself, and how it behaves."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

NEWEST = "0.33.0"


def version_tuple(version: str) -> tuple[int, ...]:
    """``"0.33.0rc1+cpu"`` -> ``(0, 33, 0)``; a part that does not start with a digit ends the tuple."""
    parts: list[int] = []
    for chunk in version.split(".")[:3]:
        digits = ""
        for char in chunk:
            if not char.isdigit():
                break
            digits += char
        if not digits:
            break
        parts.append(int(digits))
    return tuple(parts)


def offset_port(endpoint: str | None, rank: int) -> str | None:
    """vLLM's rule for one endpoint per rank: TCP port + rank (port 0 stays), ``inproc`` gets a suffix."""
    if not endpoint or rank == 0:
        return endpoint
    if endpoint.startswith("inproc"):
        return f"{endpoint}_dp{rank}"
    base, _, port = endpoint.rpartition(":")
    if not endpoint.startswith("tcp") or not port.isdigit() or port == "0":
        return endpoint
    return f"{base}:{int(port) + rank}"


@dataclass(kw_only=True)
class KvEventsFacts:
    """KV-event publisher settings, named as in vLLM's ``KVEventsConfig``.

    ``endpoint`` and ``replay_endpoint`` are given for rank 0; vLLM adds the rank to the port.  They are reported
    verbatim, wildcards included.  What is really bound replaces ``*`` by ``bind_host``, so a test stays on loopback.
    An endpoint without ``*``, ``::`` or ``ipc:`` makes vLLM *connect* its PUB socket; ``force_bind`` binds it anyway.
    """

    enable_kv_cache_events: bool = True
    publisher: str = "zmq"
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""
    # Not part of the reported config:
    bind_host: str = "127.0.0.1"
    force_bind: bool = False

    def for_rank(self, rank: int) -> KvEventsFacts:
        """The settings of one data-parallel rank."""
        return dataclasses.replace(
            self,
            endpoint=offset_port(self.endpoint, rank) or "",
            replay_endpoint=offset_port(self.replay_endpoint, rank),
        )

    def reported(self) -> dict[str, Any]:
        """The map put under ``kv_events_config`` in the ready response."""
        hidden = {"bind_host", "force_bind"}
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in hidden}

    def binds(self, endpoint: str) -> bool:
        """Whether the publisher binds ``endpoint`` rather than connecting to it."""
        return self.force_bind or "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))

    def bind_address(self, endpoint: str) -> str:
        """``endpoint`` with its wildcard kept to one interface."""
        return endpoint.replace("*", self.bind_host)


@dataclass(kw_only=True)
class EngineFacts:
    """Everything an engine reports, then how it behaves.  Each engine owns a copy, which ``pace`` edits in place."""

    # -- reported in the ready response
    vllm_version: str = ""  # "": the version of the frontend in front, else the newest
    instance_id: str = "sim-instance"
    dtype: str = "bfloat16"
    max_model_len: int = 4096
    block_size: int = 16
    num_gpu_blocks: int = 1024
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    data_parallel_size: int | None = None  # None: the number of engines in the fleet
    world_size: int | None = None  # None: tensor x pipeline parallel size
    max_loras: int = 0  # > 0 also reports supports_lora
    mamba_block_size: int | None = None
    effective_attention_block_size: int | None = None
    kv_cache_size_tokens: int | None = None  # None: num_gpu_blocks * block_size
    kv_events: KvEventsFacts | None = None
    weight_transfer_backend: str | None = None
    enable_sleep_mode: bool = False
    supports_draft_weight_updates: bool = False
    dp_stats_address: str | None = None
    # Raw edits of the ready response, applied last: keys to add or replace, keys to leave out.
    ready_extra: dict[str, Any] = field(default_factory=dict)
    ready_drop: list[str] = field(default_factory=list)

    # -- behaviour
    protocol: str | None = None  # wire details follow this version; None: vllm_version
    token_interval: float = 0.01  # seconds between scheduler steps
    tokens_per_step: int = 1
    prefill_delay: float = 0.0  # extra seconds before a request's first token
    token_range: tuple[int, int] = (36, 97)  # printable ASCII of model.py's tokenizer
    supported_tasks: tuple[str, ...] = ("generate",)
    weight_version: str = "default"
    utility_delay: float = 0.0  # seconds before a utility call is handled
    ready_delay: float = 0.0  # seconds between INIT and the ready response: "loading the model"
    seed: int = 0

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> EngineFacts:
        """From JSON: ``kv_events`` may be an object, null or true."""
        given = dict(values)
        kv = given.get("kv_events")
        if isinstance(kv, Mapping):
            given["kv_events"] = KvEventsFacts(**kv)
        elif isinstance(kv, bool):
            given["kv_events"] = KvEventsFacts() if kv else None
        for name in ("token_range", "supported_tasks"):
            if name in given:
                given[name] = tuple(given[name])
        return cls(**given)

    def as_dict(self) -> dict[str, Any]:
        """As JSON carries it; ``from_dict`` reads it back."""
        return dataclasses.asdict(self)

    @property
    def version(self) -> str:
        """The vLLM version reported."""
        return self.vllm_version or NEWEST

    @property
    def protocol_version(self) -> tuple[int, ...]:
        """The version whose wire details are spoken; an unreadable one counts as newest."""
        return version_tuple(self.protocol or self.version) or (99,)

    @property
    def workers(self) -> int:
        """Worker processes a real engine of these facts would have."""
        return self.world_size or self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def capacity(self) -> int:
        """KV-cache capacity in tokens."""
        return self.num_gpu_blocks * self.block_size

    def ready_response(self, rank: int, fleet_size: int) -> dict[str, Any]:
        """The map sent on the input socket when the engine is ready."""
        response = {
            "max_model_len": self.max_model_len,
            "num_gpu_blocks": self.num_gpu_blocks,
            "block_size": self.block_size,
            "dp_stats_address": self.dp_stats_address,
            "dtype": self.dtype,
            "vllm_version": self.version,
            "world_size": self.workers,
            "data_parallel_size": self.data_parallel_size or fleet_size,
            "tensor_parallel_size": self.tensor_parallel_size,
            "pipeline_parallel_size": self.pipeline_parallel_size,
            "decode_context_parallel_size": self.decode_context_parallel_size,
            "data_parallel_rank": rank,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "instance_id": self.instance_id,
            "supports_lora": self.max_loras > 0,
            "max_loras": self.max_loras,
            "mamba_block_size": self.mamba_block_size,
            "kv_cache_size_tokens": self.kv_cache_size_tokens or self.capacity,
            "kv_cache_max_concurrency": self.capacity / max(self.max_model_len, 1),
            "kv_events_config": self.kv_events.for_rank(rank).reported() if self.kv_events else None,
            "weight_transfer_backend": self.weight_transfer_backend,
            "enable_sleep_mode": self.enable_sleep_mode,
            "supports_draft_weight_updates": self.supports_draft_weight_updates,
            "effective_attention_block_size": self.effective_attention_block_size,
        }
        response.update(self.ready_extra)
        for key in self.ready_drop:
            response.pop(key, None)
        return response
