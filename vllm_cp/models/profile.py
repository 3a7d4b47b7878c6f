"""What a worker said it is when it was locked, and how it differs later."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

__all__ = ["Allowed", "Drift", "DriftKind", "Profile", "Value"]

#: Text, a number, yes or no, a list of names or ranks; ``None`` is "not reported", which is neither zero nor no.
Value = str | int | bool | tuple[str | int, ...] | None

_RANGE = re.compile(r"(\d*)\.\.(\d*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """A rule: what a fact may be besides its locked value."""

    #: As it is written.
    text: str
    #: Values; ``None`` is "not reported", ``*`` in text stands for any text, text beside a number is a range of them.
    alternatives: tuple[Value, ...] = ()
    #: Anything goes, "not reported" included.
    any: bool = False
    #: What the line says after its ``#``.
    comment: str = ""

    def admits(self, value: Value) -> bool:
        """Whether the rule is content with this value."""
        return self.any or any(_admits(alternative, value) for alternative in self.alternatives)


def _admits(alternative: Value, value: Value) -> bool:
    if alternative == value and isinstance(alternative, bool) == isinstance(value, bool):
        return True
    if not isinstance(alternative, str):
        return False
    if isinstance(value, str):
        return re.fullmatch(".*".join(map(re.escape, alternative.split("*"))), value, re.DOTALL) is not None
    ends = _RANGE.fullmatch(alternative)
    if ends is None or not isinstance(value, int):
        return False
    return int(ends[1] or 0) <= value and (not ends[2] or value <= int(ends[2]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What a worker says it is, and what may differ from it."""

    #: By name, in the order of the file; ``kv_events.*.name`` holds for every rank that has no line of its own.
    #: ``None`` is not reported; a name that is missing is not compared.
    facts: Mapping[str, Value] = field(default_factory=dict)
    #: By name, where ``kv_events.*.name`` is for every rank.
    allow: Mapping[str, Allowed] = field(default_factory=dict)
    #: For people; never compared.
    notes: tuple[str, ...] = ()


class DriftKind(str, Enum):
    """In which way a fact differs."""

    #: Both sides know it, and differ.
    CHANGED = "changed"
    #: It was not reported when the lock was made.
    NEWLY_REPORTED = "newly_reported"
    #: It has a value in the lock; the worker does not report it.
    NO_LONGER_REPORTED = "no_longer_reported"


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """A fact that is neither as locked nor allowed."""

    name: str
    kind: DriftKind
    locked: Value
    live: Value
    #: The rule that did not admit it; ``None`` when there is none.
    allowed: str | None = None
