"""Telling an index things, short."""

from __future__ import annotations

from collections import Counter
from typing import Any

from vllm_cp.kv import Batch, Event, PrefixIndex, Removed, SourceId, Stored

W0 = SourceId(worker="w0", rank=0)
W1 = SourceId(worker="w1", rank=0)


class Feed:
    """Batches in order, for one index."""

    def __init__(self, **options: Any) -> None:
        self.index = PrefixIndex(**options)
        self._next: Counter[SourceId] = Counter()

    def __call__(self, *events: Event, source: SourceId = W0, stamp: int | None = None) -> PrefixIndex:
        seq = self._next[source]
        self._next[source] += 1
        self.index.apply(Batch(source=source, seq=seq, ts=float(seq), events=events, data_parallel_rank=stamp))
        return self.index


def stored(*hashes: int | bytes, tokens: Any = (), size: int = 2, medium: str | None = "GPU", **others: Any) -> Stored:
    """A store event."""
    return Stored(block_hashes=hashes, token_ids=tuple(tokens), block_size=size, medium=medium, **others)


def removed(*hashes: int | bytes, medium: str | None = "GPU", **others: Any) -> Removed:
    """A removal."""
    return Removed(block_hashes=hashes, medium=medium, **others)


def copies(index: PrefixIndex, block: int, medium: str | None) -> int:
    """Copies of a block that the first worker holds in a medium."""
    return sum(count for place, _, name, count in index.held("w0", 0) if name == block and place[0] == medium)


def runs(index: PrefixIndex, tokens: Any, **how: Any) -> dict[str, int]:
    """Leading tokens by worker."""
    return {match.worker: match.tokens for match in index.match(list(tokens), **how)}
