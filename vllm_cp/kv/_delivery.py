"""The last step to the consumer: decodes batches, and counts what only decoding shows."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from vllm_cp.kv._feed import Feed
from vllm_cp.kv._queue import Entry
from vllm_cp.kv._sequence import Arrived
from vllm_cp.kv.decoding import Decoded, DecodeFailure, decode
from vllm_cp.kv.events import Batch, DecodeReason, SourceId, Unknown
from vllm_cp.kv.stream import Gap, GapReason, Item, Notice, NoticeKind, Reset, ResetReason, SourceStats

__all__ = ["Delivery"]


class _Counts:
    __slots__ = ("failures", "rank_disagreements", "unknown_events", "unknown_keys", "unreadable")

    def __init__(self) -> None:
        self.failures = dict.fromkeys(DecodeReason, 0)
        self.unknown_events = self.unknown_keys = self.rank_disagreements = self.unreadable = 0


class Delivery:
    """Turns what the queue holds into what consumers get. Used by one consumer at a time."""

    def __init__(self) -> None:
        self._counts: dict[SourceId, _Counts] = {}

    def items(self, entry: Entry) -> list[Item]:
        """One entry as items; a notice may follow a batch."""
        if isinstance(entry, Arrived):
            return self._batch(entry)
        if isinstance(entry, Reset) and entry.reason is ResetReason.DEPARTED:
            self._counts.pop(entry.source, None)
        return [entry]

    def _batch(self, entry: Arrived) -> list[Item]:
        counts = self._counts.get(entry.source)
        if counts is None:
            counts = self._counts[entry.source] = _Counts()
        decoded = decode(entry.payload)
        if isinstance(decoded, DecodeFailure):
            counts.failures[decoded.reason] += 1
            counts.unreadable += 1
            return [Gap(source=entry.source, first=entry.seq, last=entry.seq, reason=GapReason.UNREADABLE)]
        if not decoded.current:
            _count_unknown(decoded, counts)
        batch = Batch(
            source=entry.source,
            seq=entry.seq,
            ts=decoded.ts,
            events=decoded.events,
            data_parallel_rank=decoded.data_parallel_rank,
            replayed=entry.replayed,
            received_at=entry.at,
            extra=decoded.extra,
        )
        if not batch.rank_disagrees:
            return [batch]
        counts.rank_disagreements += 1
        if counts.rank_disagreements > 1:
            return [batch]
        detail = (
            f"{entry.source.address} is advertised for rank {entry.source.rank},"
            f" its batches are stamped {decoded.data_parallel_rank}"
        )
        return [Notice(source=entry.source, kind=NoticeKind.RANK_DISAGREES, detail=detail), batch]

    def stats(self, feed: Feed, overflow: int) -> SourceStats:
        """The numbers of a source, complete; ``overflow`` is how many of its batches the queue dropped."""
        stats, counts = feed.stats(), self._counts.get(feed.source) or _Counts()
        lost = dict(stats.lost)
        lost[GapReason.OVERFLOW] += overflow
        lost[GapReason.UNREADABLE] += counts.unreadable
        return replace(
            stats,
            lost=MappingProxyType(lost),
            failures=MappingProxyType({reason: n + counts.failures[reason] for reason, n in stats.failures.items()}),
            unknown_events=counts.unknown_events,
            unknown_keys=counts.unknown_keys,
            rank_disagreements=counts.rank_disagreements,
        )


def _count_unknown(decoded: Decoded, counts: _Counts) -> None:
    counts.unknown_keys += len(decoded.extra or ())
    for event in decoded.events:
        if not isinstance(event, Unknown):
            counts.unknown_keys += len(event.extra or ())
        elif event.malformed:
            counts.failures[DecodeReason.EVENT] += 1
        else:
            counts.unknown_events += 1
