"""How to pause generation."""

from __future__ import annotations

from enum import Enum

__all__ = ["PauseMode"]


class PauseMode(str, Enum):
    """What becomes of the requests in flight when generation is paused. Source: PauseGeneration, since vLLM 0.28."""

    #: End them now; they finish as aborted.
    ABORT = "abort"
    #: Let them finish; the call returns when the last one has. A call that runs out of time leaves the worker paused.
    WAIT = "wait"
    #: Keep them where they are; they go on after a resume.
    KEEP = "keep"
