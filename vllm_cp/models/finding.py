"""What an outsider can do to a worker."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["Finding", "Severity", "Verdict"]


class Severity(str, Enum):
    """How much harm an open door does, least first."""

    INFO = "info"
    LOW = "low"
    MEDIUM = "medium"
    HIGH = "high"

    @property
    def level(self) -> int:
        """0 for the least."""
        return _ORDER.index(self)


_ORDER = list(Severity)


class Verdict(str, Enum):
    """What was found."""

    #: The door is open: tried, and it worked.
    EXPOSED = "exposed"
    #: Tried, and refused.
    GUARDED = "guarded"
    #: There is no such door.
    ABSENT = "absent"
    #: It could not be told; the evidence says why.
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One check of an audit, and what it saw."""

    #: Stable: ``abort-open``.
    id: str
    verdict: Verdict
    #: ``INFO`` unless the verdict is ``EXPOSED``.
    severity: Severity
    #: What was seen, as told by the worker or the network.
    evidence: str
    #: What to do about it, or what would make an unknown known; "" when there is nothing to do.
    remedy: str = ""
