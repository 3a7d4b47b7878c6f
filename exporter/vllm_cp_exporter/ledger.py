"""Which worker changed when: revisions, and what changed since one of them.

It compares when somebody asks, not at each look at a worker: most looks change no more than the age of a proof. So a
revision is a statement about the moment it is read; what came and went between two readings is in the episodes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm_cp_exporter.snapshot import Snapshot, WorkerView

__all__ = ["Changes", "Ledger"]

#: Workers that left and are remembered, so that a late reader hears of it.
_GONE = 10_000


@dataclass(frozen=True, slots=True)
class Changes:
    """What is different since a revision."""

    revision: int
    #: Keys of workers that are new or changed.
    changed: tuple[str, ...]
    #: Keys of workers that left.
    removed: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.changed or self.removed)


@dataclass(slots=True)
class _Entry:
    view: WorkerView
    signature: tuple[Any, ...]
    revision: int


class Ledger:
    """Used on the event loop only."""

    def __init__(self, *, clock: Callable[[], float] = time.time) -> None:
        # Later than any revision of a daemon that ran here before, so that its readers are told to read all again.
        self._floor = self._revision = int(clock() * 1000)
        self._snapshot: Snapshot | None = None
        self._entries: dict[str, _Entry] = {}
        self._gone: dict[str, int] = {}

    def catch_up(self, snapshot: Snapshot) -> int:
        """Take in the workers as they are now; the revision."""
        if snapshot is self._snapshot:
            return self._revision
        self._snapshot = snapshot
        for key, view in snapshot.workers.items():
            entry = self._entries.get(key)
            if entry is not None and entry.view is view:
                continue
            signature = _signature(view)
            if entry is not None and entry.signature == signature:
                entry.view = view
                continue
            self._revision += 1
            self._entries[key] = _Entry(view, signature, self._revision)
            self._gone.pop(key, None)
        for key in [key for key in self._entries if key not in snapshot.workers]:
            self._revision += 1
            del self._entries[key]
            self._gone[key] = self._revision
        while len(self._gone) > _GONE:
            oldest = next(iter(self._gone))
            self._floor = self._gone.pop(oldest)
        return self._revision

    def since(self, revision: int) -> Changes | None:
        """What changed after that revision; ``None``: it is too old, or none of ours, so read everything again."""
        if not self._floor <= revision <= self._revision:
            return None
        return Changes(
            self._revision,
            tuple(key for key, entry in self._entries.items() if entry.revision > revision),
            tuple(key for key, gone in self._gone.items() if gone > revision),
        )

    def all(self) -> Changes:
        """Everything."""
        return Changes(self._revision, tuple(self._entries), ())


def _signature(view: WorkerView) -> tuple[Any, ...]:
    """What makes a difference: not ages, load, or texts with a running time in them."""
    state, facts = view.state, view.facts
    fault = state.open_fault
    return (
        view.pool,
        view.target,
        view.http_url,
        view.namespace,
        view.pod,
        view.node,
        state.reason,
        view.pool_state,
        state.evidence.health,
        state.rungs.reachable.holds,
        state.rungs.serving.holds,
        state.rungs.answering.holds,
        state.rungs.admitting.holds,
        state.rungs.warm.holds,
        state.instance_id,
        state.restarts,
        state.first_ready,
        facts.server,
        facts.model,
        facts.sources,
        facts.sources_problem,
        fault.episode if fault is not None else None,
        tuple(engine.state for engine in state.evidence.engines),
    )
