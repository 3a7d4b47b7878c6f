"""What is known of a worker's KV-cache events at one moment: plain numbers, immutable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, TypeVar

__all__ = ["KV_STATES", "KvView", "settled"]

K = TypeVar("K")

#: How a publisher can be heard, a closed set; ``unknown`` while the worker cannot be asked where it publishes.
KV_STATES = ("connected", "connecting", "unreachable", "unsupported", "denied", "disabled", "unknown")

_Numbers = Mapping[K, float]


def _nothing() -> Mapping[Any, float]:
    return MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class KvView:
    """The numbers of one worker, as label values and counts. Without ``states``: its events are not followed."""

    #: Events by type, medium and tier.
    events: _Numbers[tuple[str, str, str]] = field(default_factory=_nothing)
    #: Blocks that events named, and blocks held now, by rank and medium.
    stored: _Numbers[tuple[str, str]] = field(default_factory=_nothing)
    removed: _Numbers[tuple[str, str]] = field(default_factory=_nothing)
    #: Only ranks whose view is complete are in it.
    resident: _Numbers[tuple[str, str]] = field(default_factory=_nothing)
    #: By rank, whether every change since the cache was empty was seen; ranks that said nothing are not in it.
    complete: _Numbers[str] = field(default_factory=_nothing)
    #: By rank, the number of the last batch and when it came, Unix seconds.
    last_sequence: _Numbers[str] = field(default_factory=_nothing)
    last_event: _Numbers[str] = field(default_factory=_nothing)
    #: By rank, one of KV_STATES.
    states: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    #: Replays by how they ended.
    replays: _Numbers[str] = field(default_factory=_nothing)
    #: What could not be read, by reason.
    failures: _Numbers[str] = field(default_factory=_nothing)
    gaps: float | None = None
    lost: float | None = None
    replay_seconds: float | None = None
    restarts: float | None = None
    queue_depth: float | None = None
    dropped: float | None = None


def settled(old: KvView, new: KvView) -> KvView:
    """``new`` with the parts that are as before being the same objects, ``old`` itself where all are: pages are kept
    by identity."""
    parts = {each.name: (getattr(old, each.name), getattr(new, each.name)) for each in fields(new)}
    if all(was == now for was, now in parts.values()):
        return old
    return KvView(**{name: was if was == now else now for name, (was, now) in parts.items()})
