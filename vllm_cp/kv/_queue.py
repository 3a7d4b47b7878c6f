"""What waits for the consumer. Bounded: the oldest batches go first, and what went is said where it is missing."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

from vllm_cp.kv._sequence import Arrived
from vllm_cp.kv.events import SourceId
from vllm_cp.kv.stream import Gap, GapReason, Notice, Reset, StateChange

__all__ = ["Entry", "ItemQueue"]

Entry: TypeAlias = Arrived | Gap | Reset | StateChange | Notice


@dataclass(slots=True)
class _Owed:
    """What has to be told of one source before anything else of it, after its entries were dropped."""

    reset: Reset | None = None
    gap: Gap | None = None
    state: StateChange | None = None
    notice: Notice | None = None

    def take(self) -> list[Entry]:
        return [entry for entry in (self.state, self.reset, self.gap, self.notice) if entry is not None]


class ItemQueue:
    """A queue with one producer and any consumers, thread-safe. ``put`` never waits.

    A source that overflows owes its consumer at most one of each kind of entry, so memory is bounded whatever happens.
    """

    def __init__(self, max_batches: int, max_bytes: int) -> None:
        self._max_batches = max_batches
        self._max_bytes = max_bytes
        self._entries: deque[Entry] = deque()
        self._owed: dict[SourceId | None, _Owed] = {}
        self._ready: deque[Entry] = deque()
        self._changed = threading.Condition()
        self._wake: Callable[[], None] | None = None
        self._batches = 0
        self._bytes = 0
        self.dropped = 0
        #: Batches dropped, by source.
        self.dropped_of: dict[SourceId, int] = {}
        self.closed = False

    @property
    def depth(self) -> int:
        """Batches in it."""
        return self._batches

    @property
    def empty(self) -> bool:
        """Nothing can be taken now."""
        return not (self._entries or self._ready or self._owed)

    @property
    def bytes(self) -> int:
        """Bytes of their payloads."""
        return self._bytes

    def on_change(self, wake: Callable[[], None]) -> None:
        """Call ``wake`` when there may be something to take; from the producer's thread."""
        self._wake = wake

    def put(self, entries: list[Entry]) -> None:
        """Append, dropping the oldest where there is no room."""
        if not entries:
            return
        with self._changed:
            for entry in entries:
                self._entries.append(entry)
                if isinstance(entry, Arrived):
                    self._batches += 1
                    self._bytes += len(entry.payload)
            # Entries that are no batches take little, but a consumer that is away must not let them pile up either.
            while self._batches > self._max_batches or self._bytes > self._max_bytes:
                self._drop()
            while len(self._entries) > 2 * self._max_batches + 64:
                self._drop()
            self._changed.notify()
        if self._wake is not None:
            self._wake()

    def take(self) -> Entry | None:
        """The next entry, ``None`` when there is none now."""
        with self._changed:
            return self._next()

    def wait(self, timeout_s: float | None) -> Entry | None:
        """The next entry, as soon as there is one; ``None`` when the queue is closed and empty, or time is up."""
        with self._changed:
            self._changed.wait_for(lambda: not self.empty or self.closed, timeout_s)
            return self._next()

    def close(self) -> None:
        """Nothing more will come; what is in it can still be taken."""
        with self._changed:
            self.closed = True
            self._changed.notify_all()
        if self._wake is not None:
            self._wake()

    def _next(self) -> Entry | None:
        if self._ready:
            return self._ready.popleft()
        if not self._entries:
            if not self._owed:
                return None
            self._ready.extend(self._owed.pop(next(iter(self._owed))).take())
            return self._ready.popleft()
        if self._owed:
            owed = self._owed.pop(self._entries[0].source, None)
            if owed is not None:
                self._ready.extend(owed.take())
                return self._ready.popleft()
        entry = self._entries.popleft()
        self._forget_size(entry)
        return entry

    def _forget_size(self, entry: Entry) -> None:
        if isinstance(entry, Arrived):
            self._batches -= 1
            self._bytes -= len(entry.payload)

    def _drop(self) -> None:
        entry = self._entries.popleft()
        self._forget_size(entry)
        owed = self._owed.setdefault(entry.source, _Owed())
        if isinstance(entry, Arrived):
            self.dropped += 1
            self.dropped_of[entry.source] = self.dropped_of.get(entry.source, 0) + 1
            lost = Gap(source=entry.source, first=entry.seq, last=entry.seq, reason=GapReason.OVERFLOW)
            owed.gap = _joined(owed.gap, lost)
        elif isinstance(entry, Gap):
            owed.gap = _joined(owed.gap, entry)
        elif isinstance(entry, Reset):
            owed.reset, owed.gap = entry, None
        elif isinstance(entry, StateChange):
            owed.state = entry
        else:
            owed.notice = entry


def _joined(before: Gap | None, lost: Gap) -> Gap:
    """One gap out of what was lost before and what follows it: numbers of one source have no holes."""
    return lost if before is None else replace(before, last=lost.last, reason=GapReason.OVERFLOW)
