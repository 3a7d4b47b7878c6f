"""When something was done to an engine or its frontend, by the clocks of the process that did it."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Moment:
    """One deed and its two timestamps, taken just before the deed.

    ``monotonic`` (seconds) is comparable between processes of one machine on Linux, so a test can subtract it from its
    own ``time.monotonic()`` wherever the engine runs.  ``wall`` is seconds since the epoch.
    """

    kind: str
    rank: int | None = None
    detail: str = ""
    monotonic: float = dataclasses.field(default_factory=time.monotonic)
    wall: float = dataclasses.field(default_factory=time.time)

    def as_dict(self) -> dict[str, Any]:
        """As JSON carries it; ``Moment(**d)`` reads it back."""
        return dataclasses.asdict(self)
