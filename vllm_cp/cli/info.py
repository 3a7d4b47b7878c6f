"""``vllm-cp info``: what a server says it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from vllm_cp.cli._table import Column, View
from vllm_cp.cli._verb import Verb, answer

if TYPE_CHECKING:
    from vllm_cp.client import ControlClient

__all__ = ["command"]

_VIEW = View(
    (
        Column("TARGET", "target"),
        Column("VERSION", "engine_version"),
        Column("KV BLOCKS", "total_kv_blocks"),
        Column("BLOCK SIZE", "kv_block_size"),
        Column("ATTN BLOCK", "effective_attention_block_size"),
        Column("MAX LEN", "max_model_len"),
        Column("DP", "parallelism.data_parallel_size"),
        Column("TP", "parallelism.tensor_parallel_size"),
        Column("PP", "parallelism.pipeline_parallel_size", wide=True),
        Column("DCP", "parallelism.decode_context_parallel_size", wide=True),
        Column("WORLD", "parallelism.world_size", wide=True),
        Column("DP LOCAL", "parallelism.data_parallel_size_local", wide=True),
        Column("DP RANK", "parallelism.data_parallel_rank", wide=True),
        Column("RUNNING", "max_running_requests", wide=True),
        Column("BATCHED", "max_batched_tokens", wide=True),
        Column("LORAS", "max_loras", wide=True),
        Column("SLEEP", "rl_capabilities.sleep_mode_enabled", wide=True),
        Column("WEIGHTS", "rl_capabilities.weight_transfer_backend", wide=True),
        Column("PROTO", "proto_version", wide=True),
        Column("INSTANCE", "instance_id", wide=True),
    )
)


@click.command(
    "info",
    cls=Verb,
    examples="""
vllm-cp info
vllm-cp info --target llama-0 --target llama-1 -o wide
vllm-cp info -o json | jq '.[] | {target, total_kv_blocks}'
""",
)
def command() -> int:
    """Version, KV-cache blocks, limits and parallelism, as the server states them.

    KV BLOCKS is the sum over the ranks behind the frontend; other numbers are those of one rank, MAX LEN the least of
    them. BLOCK SIZE is the scheduler's unit, ATTN BLOCK the attention block in tokens where the server knows it: for
    hybrid models they differ, and blocks times either is not a number of tokens. "-" is not reported, which is not
    zero. The frontend answers from memory, also when its engine is dead.
    """

    def ask(client: ControlClient) -> Mapping[str, Any]:
        from dataclasses import asdict

        return asdict(client.server_info())

    def told(worker: Mapping[str, Any]) -> Mapping[str, Any]:
        from vllm_cp.cli._daemon import fact

        known: Mapping[str, Any] = fact(worker, "server")
        return known

    return answer(_VIEW, ask, told=told)
