"""``vllm-cp model``: what a server says about its model."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
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
        Column("MODEL", "served_model_name"),
        Column("LORA", "supports_lora"),
        Column("MULTIMODAL", "supports_multimodal"),
        Column("REASONING", "reasoning_parser"),
        Column("TOOLS", "tool_call_parser"),
        Column("TEXT", "supports_text_input", wide=True),
        Column("TOKEN IDS", "supports_token_ids_input", wide=True),
        Column("ALIASES", "served_model_aliases", wide=True),
        Column("MODEL ID", "model_id", wide=True),
    )
)


@click.command(
    "model",
    cls=Verb,
    examples="""
vllm-cp model
vllm-cp model --target llama-0 -o wide
vllm-cp model -o json | jq -r '.[].served_model_name'
""",
)
def command() -> int:
    """The model, the names clients may use for it, and its capabilities.

    Servers before vLLM 0.29 do not say whether they support LoRA: "-", null in json.
    """
    return answer(_VIEW, _ask, told=_told)


def _told(worker: Mapping[str, Any]) -> Mapping[str, Any]:
    from vllm_cp.cli._daemon import fact

    known: Mapping[str, Any] = fact(worker, "model")
    return known


def _ask(client: ControlClient) -> Mapping[str, Any]:
    from dataclasses import asdict

    from vllm_cp.errors import ControlError

    model = client.model_info()
    if model.supports_lora is None:
        # An older server leaves the field out, which looks like a no; only its version tells them apart.
        with suppress(ControlError):
            model = model.seen_on(client.server_info().engine_version)
    return asdict(model)
