"""What a server says about its model."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

__all__ = ["ModelInfo"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """The model, its names and capabilities. Source: GetModelInfo, since vLLM 0.27."""

    #: Path or hub id the server loaded.
    model_id: str = ""
    #: The first name clients may use.
    served_model_name: str = ""
    #: Further names clients may use.
    served_model_aliases: tuple[str, ...] = ()
    supports_text_input: bool = False
    supports_token_ids_input: bool = False
    #: Since vLLM 0.29. The wire cannot tell "no" from "older server", so this is ``True`` or ``None`` as read;
    #: ``seen_on`` settles it.
    supports_lora: bool | None = None
    supports_multimodal: bool = False
    #: Name of the reasoning parser; ``None`` when there is none.
    reasoning_parser: str | None = None
    #: Name of the tool-call parser; ``None`` when there is none.
    tool_call_parser: str | None = None

    def seen_on(self, engine_version: str) -> ModelInfo:
        """The same facts, read knowing the server's version: from vLLM 0.29 an unset ``supports_lora`` is a no."""
        numbers = re.match(r"(\d+)\.(\d+)", engine_version)
        if self.supports_lora is None and numbers and (int(numbers[1]), int(numbers[2])) >= (0, 29):
            return replace(self, supports_lora=False)
        return self
