"""The answer to a generation."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["FinishReason", "Generated"]


class FinishReason(str, Enum):
    """Why a generation ended."""

    NOT_FINISHED = "not_finished"
    LENGTH = "length"
    STOP = "stop"
    #: Aborted by its id, by a pause, or by a passed deadline. The RPC still ends with status OK.
    ABORTED = "aborted"
    #: A reason this version of the project has no name for.
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """One finished generation. Source: Inference.Generate, since vLLM 0.27."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason = FinishReason.NOT_FINISHED
    #: Tokens.
    prompt_tokens: int | None = None
    #: Tokens.
    output_tokens: int | None = None
