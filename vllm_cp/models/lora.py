"""LoRA adapters on a worker."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LoraAdapter"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraAdapter:
    """One loaded adapter. Source: ListLoras, LoadLora, UnloadLora, since vLLM 0.29."""

    lora_id: int = 0
    name: str = ""
    #: Path on the worker's file system.
    source_path: str = ""
