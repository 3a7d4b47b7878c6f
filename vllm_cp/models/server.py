"""What a server says it is."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Parallelism", "RlCapabilities", "ServerInfo"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallelism:
    """How the model is spread. Source: GetServerInfo, since vLLM 0.27. ``None`` is unknown, never zero."""

    #: Tensor-parallel size, ranks.
    tensor_parallel_size: int | None = None
    #: Pipeline-parallel size, stages.
    pipeline_parallel_size: int | None = None
    #: Data-parallel size, ranks. 0.27 may report the size as the engine sees it, not this frontend's.
    data_parallel_size: int | None = None
    #: Rank of the first engine of this frontend; zero is a rank.
    data_parallel_rank: int = 0
    #: Decode-context-parallel size, ranks.
    decode_context_parallel_size: int | None = None
    #: Workers of one engine. Since vLLM 0.29.
    world_size: int | None = None
    #: Ranks behind this frontend. Since vLLM 0.31.
    data_parallel_size_local: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RlCapabilities:
    """What reinforcement-learning controllers may use. Source: GetServerInfo, since vLLM 0.28."""

    weight_transfer_enabled: bool = False
    #: ``nccl``, …; ``None`` when weight transfer is not configured.
    weight_transfer_backend: str | None = None
    sleep_mode_enabled: bool = False
    draft_weight_updates_enabled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """Identity, limits and KV-cache capacity of a worker. Source: GetServerInfo, since vLLM 0.27.

    The frontend answers from memory, also when its engine is dead. ``None`` is unknown, never zero.
    Blocks times ``kv_block_size`` is not a token count for hybrid models, so no such product is offered.
    """

    #: vLLM's version, ``0.33.0``.
    engine_version: str = ""
    #: Always the word ``vllm``; not a version.
    api_version: str = ""
    #: Opaque; changes when the engine is replaced. ``None`` when the server gives none.
    instance_id: str | None = None
    #: ``None`` when the server sent none.
    parallelism: Parallelism | None = None
    #: Longest sequence, tokens; the minimum over the ranks.
    max_model_len: int | None = None
    #: Scheduler block, in the scheduler's own unit (tokens, except for hybrid models).
    kv_block_size: int | None = None
    #: KV-cache blocks, the sum over this frontend's ranks.
    total_kv_blocks: int | None = None
    #: Most sequences that run at once, per rank.
    max_running_requests: int | None = None
    #: Most tokens in one scheduler step, per rank.
    max_batched_tokens: int | None = None
    #: Most LoRA adapters at once. Since vLLM 0.29; ``None`` before that or when LoRA is off.
    max_loras: int | None = None
    #: Since vLLM 0.28; ``None`` when the server sent none.
    rl_capabilities: RlCapabilities | None = None
    #: Version of the wire contract. Since vLLM 0.33.
    proto_version: str | None = None
    #: The attention block in tokens. Since vLLM 0.31, where the server knows it.
    effective_attention_block_size: int | None = None
